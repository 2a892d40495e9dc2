"""SGLang's hashes and its own KV events, as the daemon reads them for routers."""

from __future__ import annotations

import json
import random
import tempfile
import time
from array import array
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest
from conftest import Engines
from modelless import Stage
from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, StorageMedium
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import (
    get_hash_str,
    get_storage_hash_str,
    hash_str_to_int64,
    storage_namespace_seed,
)
from sglang_engines import PAGE
from support.daemon import Daemon, wait_until
from support.kv_subscriber import Subscriber
from test_sglang_outputs import Make, Start, cached, wait_for_stores

from kvserver.adapters.sglang.events import EventsAddress, events_of
from kvserver.adapters.sglang.keys import keys_of, packed
from kvserver.routing.block_hashes import hash_pages
from kvserver.routing.engine_wire import Change, decode

TOKENS = [random.Random(1).randrange(1 << 17) for _ in range(300)]


def hashes_of(tokens: list[int], salt: str | None = None) -> list[str]:
    found: list[str] = get_hash_str(tokens, storage_namespace_seed(None, salt), PAGE)
    return found[: len(tokens) // PAGE]


def test_a_key_ends_in_the_short_form_of_sglangs_hash() -> None:
    hashes = hashes_of(TOKENS)
    keys = packed(hashes)
    assert len(keys) == 32 * len(hashes) > 32
    for number, value in enumerate(hashes):
        key = keys[32 * number : 32 * number + 32]
        assert int.from_bytes(key[-8:], "big", signed=True) == hash_str_to_int64(value)
        assert key[24:] + key[:24] == bytes.fromhex(value)
    assert keys_of(b"") == b""


@pytest.mark.parametrize("salt", [None, "a salt"])
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("length", [4 * PAGE, 4 * PAGE + 1])
def test_the_daemon_hashes_tokens_as_sglang_does(salt: str | None, pairs: bool, length: int) -> None:
    key = RadixKey(array("q", TOKENS[:length]), is_bigram=pairs, cache_salt=salt).page_aligned(PAGE)
    own = list(hash_pages(PAGE, TOKENS[:length], salt or "", pairs))
    assert b"".join(own) == packed(get_storage_hash_str(key, page_size=PAGE))
    assert len(own) == (3 if pairs and length == 4 * PAGE else 4)


def test_events_of_pages_of_pairs_have_the_hashes_that_the_daemon_computes() -> None:
    recorder = KVCacheEventRecorder(enabled=True, page_size=PAGE)
    key = RadixKey(array("q", TOKENS[: 4 * PAGE + 1]), is_bigram=True)
    recorder.record_store(SimpleNamespace(key=key, parent=None, hash_value=None, event_hash_value=None))
    batch = decode(msgspec.msgpack.encode(KVEventBatch(ts=1.5, events=recorder.take())), [0])
    assert batch is not None
    keys = hash_pages(PAGE, TOKENS[: 4 * PAGE + 1], "", pairs=True)
    assert batch.changes == [(Change.STORED, 0, b"".join(each[-8:] for each in keys))]


def test_events_of_sglangs_are_decoded_with_and_without_lora_name() -> None:
    numbers = [hash_str_to_int64(value) for value in hashes_of(TOKENS)]
    assert min(numbers) < 0 < max(numbers)
    page = {"parent_block_hash": None, "token_ids": TOKENS[:PAGE], "block_size": PAGE, "lora_id": None}
    events = [
        BlockStored(block_hashes=numbers, medium=StorageMedium.GPU, cache_salt="s", session_id="one", **page),
        BlockStored(block_hashes=numbers[:1], medium=StorageMedium.GPU, lora_name="a", **page),
        *(
            BlockStored(block_hashes=numbers, medium=medium, **page)
            for medium in (StorageMedium.CPU, StorageMedium.DISK, StorageMedium.EXTERNAL)
        ),
        BlockRemoved(block_hashes=numbers[1:], medium=StorageMedium.GPU),
        BlockRemoved(block_hashes=numbers, medium=StorageMedium.CPU),
        AllBlocksCleared(),
    ]
    batch = decode(msgspec.msgpack.encode(KVEventBatch(ts=1.5, events=events, attn_dp_rank=0)), [0])
    assert batch is not None
    assert batch.malformed == 0
    ends = [packed([value])[-8:] for value in hashes_of(TOKENS)]
    assert batch.changes == [
        (Change.STORED, 0, b"".join(ends)),
        (Change.STORED, 0, ends[0]),
        (Change.REMOVED, 0, b"".join(ends[1:])),
        (Change.CLEARED, 0, b""),
    ]


@pytest.mark.parametrize(
    ("config", "rank", "address"),
    [
        (None, None, EventsAddress()),
        ({"publisher": "null"}, None, EventsAddress()),
        ({"publisher": "zmq"}, None, EventsAddress("tcp://127.0.0.1:5557")),
        ({"publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "t"}, 2, EventsAddress("tcp://127.0.0.1:5559", "", "t")),
        ({"publisher": "zmq", "endpoint": "ipc:///x", "replay_endpoint": "tcp://0.0.0.0:7"}, 0, EventsAddress("ipc:///x", "tcp://127.0.0.1:7")),
        ({"publisher": "zmq", "endpoint": "tcp://127.0.0.1:5557"}, None, EventsAddress()),
        ({"publisher": "zmq", "endpoint": "tcp://127.0.0.1:5557", "bind": True}, None, EventsAddress("tcp://127.0.0.1:5557")),
        ({"publisher": "zmq", "endpoint": "tcp://*:5557", "bind": False}, None, EventsAddress()),
        ({"publisher": "zmq", "endpoint": "tcp://*:0"}, None, EventsAddress()),
    ],
)  # fmt: skip
def test_address_of_the_events_is_the_one_where_sglang_listens(
    config: dict[str, object] | None, rank: int | None, address: EventsAddress
) -> None:
    assert events_of(json.dumps(config) if config is not None else None, rank) == address


class Page(NamedTuple):
    """A page as an event names it."""

    hash: int
    parent: int | None
    tokens: tuple[int, ...]


def read(subscriber: Subscriber) -> list[Any]:
    """All events, as a consumer with SGLang's own structs reads them."""
    return [
        event
        for payload in subscriber.batches.values()
        for event in msgspec.msgpack.decode(payload, type=KVEventBatch).events
    ]


def stored_pages(subscriber: Subscriber, medium: str = "CPU_PINNED") -> list[Page]:
    found = []
    for event in read(subscriber):
        if isinstance(event, BlockStored):
            assert (event.block_size, event.lora_id, event.medium) == (PAGE, None, medium)
            chain = [event.parent_block_hash, *event.block_hashes]
            found += [
                Page(name, parent, tuple(event.token_ids[at * PAGE : (at + 1) * PAGE]))
                for at, (parent, name) in enumerate(pairwise(chain))
            ]
    return found


@pytest.fixture
def sockets() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="kvs-") as folder:  # not tmp_path: a socket's path has little room
        yield f"ipc://{folder}"


def addresses(sockets: str) -> tuple[dict[str, str], dict[str, str]]:
    """SGLang's configuration of its own events, and the daemon's flags."""
    own = {"publisher": "zmq", "endpoint": f"{sockets}/e", "replay_endpoint": f"{sockets}/r"}
    return own, {"kv_events_endpoint": f"{sockets}/events", "kv_events_replay_endpoint": f"{sockets}/replay"}


@pytest.fixture
def consumer(sockets: str) -> Iterator[Subscriber]:
    consumer = Subscriber(f"{sockets}/events", f"{sockets}/replay")
    yield consumer
    consumer.close()


def follow(consumer: Subscriber, hashes: list[str], medium: str = "CPU_PINNED") -> None:
    """Wait until the consumer knows these pages in L1, and no others."""
    expected = {(medium, None, hash_str_to_int64(value)) for value in hashes}
    consumer.follow(lambda: consumer.blocks.resident == expected, 60)


def wait_for_subscription(stage: Stage, subscriber: Subscriber) -> None:
    """SGLang drops the batches that it publishes before a subscriber has joined."""
    publisher = stage.publisher
    assert publisher is not None

    def receives() -> bool:
        publisher.publish(KVEventBatch(ts=time.time(), events=[]))
        return subscriber.receive(20) is not None

    wait_until(receives, 20, "the subscription")


def test_a_consumer_of_sglangs_events_reads_the_pages_of_l1_as_sglang_publishes_its_own(
    model: Path, sockets: str, consumer: Subscriber
) -> None:
    own, flags = addresses(sockets)
    daemon = Daemon(l1_size="64MiB", **flags)
    engine = Subscriber(own["endpoint"], own["replay_endpoint"])
    stage: Stage | None = None
    try:
        daemon.start()
        stage = Stage(str(model), daemon.endpoint, kv_events=own)
        stage.wait_for_daemon(daemon)
        wait_for_subscription(stage, engine)
        salted = RadixKey(array("q", TOKENS[: 2 * PAGE]), cache_salt="a salt")
        stage.tree.insert(InsertParams(key=salted, value=stage.allocator.alloc(2 * PAGE)))
        for pages in (3, 9):
            stage.compute(TOKENS[: pages * PAGE], session_id="agent")
            stage.wait_for_stores()
        names = hashes_of(TOKENS)
        follow(consumer, names)
        engine.follow(lambda: len(engine.blocks.resident) == 2 + len(names))
        found = stored_pages(consumer)
        published = stored_pages(engine, StorageMedium.GPU.value)
        assert {*found} == {page for page in published if page.hash in {each.hash for each in found}}
        assert {page.hash: page.tokens for page in found} == {
            hash_str_to_int64(name): tuple(TOKENS[at * PAGE : (at + 1) * PAGE]) for at, name in enumerate(names)
        }
        assert {event.session_id for event in read(consumer) if isinstance(event, BlockStored)} == {"agent"}
        assert daemon.http("/cache/clear", "POST")[0] == 200
        follow(consumer, [])
        removed = [event for event in read(consumer) if isinstance(event, BlockRemoved)]
        assert {event.medium for event in removed} == {StorageMedium.CPU.value}
        assert {name for event in removed for name in event.block_hashes} == {page.hash for page in found}
    finally:
        if stage is not None:
            stage.close()
        engine.close()
        daemon.close()


@pytest.mark.long
def test_a_router_finds_an_sglangs_blocks_in_l0_and_l1_by_tokens_and_by_hashes(
    engines: Engines, start_daemon: Start, prompt: Make, sockets: str, consumer: Subscriber
) -> None:
    own, flags = addresses(sockets)
    engine = engines.get("events", kv_events_config=json.dumps(own), extra={"kvserver.engine_id": "events"})
    daemon = start_daemon(engine, **flags)
    text = prompt(9, 500)
    engine.generate([text], max_tokens=1)
    pages = len(text) // PAGE
    wait_for_stores(daemon, pages)
    model = daemon.status()["instances"][0]["model_name"]

    def found(**query: object) -> tuple[int, int]:
        (one,) = daemon.match(model=model, **query).values()
        return one["l0"], one["l1"]

    wait_until(lambda: found(tokens=text) == (pages, pages), 10, "the prompt in L0 and L1")
    assert found(block_hashes=[hash_str_to_int64(value) for value in hashes_of(text)]) == (pages, pages)
    assert found(block_hashes=hashes_of(text)) == (pages, pages)
    follow(consumer, hashes_of(text))
    tokens = {page.hash: page.tokens for page in stored_pages(consumer)}
    assert [tokens[hash_str_to_int64(value)] for value in hashes_of(text)] == [
        tuple(text[at * PAGE : (at + 1) * PAGE]) for at in range(pages)
    ]
    engine.flush()
    wait_until(lambda: found(tokens=text) == (0, pages), 10, "the flush in L0")
    assert engine.generate([text], max_tokens=1)[0]["cached_tokens"] == cached(len(text))
    wait_until(lambda: found(tokens=text)[0] == pages, 10, "what was loaded in L0")
    engines.end("events")
