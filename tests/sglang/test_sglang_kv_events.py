"""SGLang's hashes and its own KV events, as the daemon reads them for routers."""

from __future__ import annotations

import json
import random
from array import array
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from conftest import Engines
from sglang.srt.disaggregation.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, StorageMedium
from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import (
    get_hash_str,
    get_storage_hash_str,
    hash_str_to_int64,
    storage_namespace_seed,
)
from sglang_engines import PAGE
from support.daemon import wait_until
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


@pytest.mark.long
def test_a_router_finds_an_sglangs_blocks_in_l0_and_l1_by_tokens_and_by_hashes(
    engines: Engines, start_daemon: Start, prompt: Make, tmp_path: Path
) -> None:
    config = {"publisher": "zmq", "endpoint": f"ipc://{tmp_path}/e", "replay_endpoint": f"ipc://{tmp_path}/r"}
    engine = engines.get("events", kv_events_config=json.dumps(config), extra={"kvserver.engine_id": "events"})
    daemon = start_daemon(engine)
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
    engine.flush()
    wait_until(lambda: found(tokens=text) == (0, pages), 10, "the flush in L0")
    assert engine.generate([text], max_tokens=1)[0]["cached_tokens"] == cached(len(text))
    wait_until(lambda: found(tokens=text)[0] == pages, 10, "what was loaded in L0")
    engines.end("events")
