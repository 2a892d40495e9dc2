"""vLLM's own structs and its own way to subscribe read the published events, unchanged."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import zmq
from msgspec.msgpack import Decoder
from support.kv_feed import chunk, describe, in_form, named, namespace_prefix
from support.kv_publisher import Published
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from kvserver.kv_events.types import KVChunk, Tier
from kvserver.protocol import KVGroup

HERE = namespace_prefix("weights")
DECODER = Decoder(type=KVEventBatch)


@pytest.fixture
def published() -> Iterator[Published]:
    made = Published()
    made.feed.reader_connected("engine", HERE, groups=(KVGroup("full_attention"),))
    yield made
    made.close()


def test_structs_of_vllm_decode_every_event(published: Published) -> None:
    subscriber = published.subscriber()
    one = KVChunk(
        named("b"), describe("a", "b", parent="p", lora_name="lora", extra_keys=[None, ["lora", ["image", 0]]])
    )
    published.feed.stored(HERE, one)
    published.feed.stored(HERE, one, tier=Tier.L2)
    published.feed.removed(HERE, one)
    published.catch_up(subscriber)
    cleared, *batches = [DECODER.decode(payload) for _, _, payload in subscriber.received]
    assert (cleared.events, cleared.data_parallel_rank) == ([AllBlocksCleared()], 0)
    names = [in_form(named(name), "int") for name in "ab"]
    stored = BlockStored(
        block_hashes=names,
        parent_block_hash=in_form(named("p"), "int"),
        token_ids=list(range(32)),
        block_size=16,
        lora_id=None,
        medium="CPU",
        lora_name="lora",
        extra_keys=[None, ("lora", ["image", 0])],
        group_idx=0,
        kv_cache_spec_kind="full_attention",
        locality="LOCAL",
    )
    events = [event for batch in batches for event in batch.events]
    assert events[0] == stored
    assert (events[1].medium, events[1].block_hashes) == ("STORAGE", names)
    assert events[1].locality is None
    assert events[2] == BlockRemoved(block_hashes=names, medium="CPU", group_idx=0, locality="LOCAL")


def test_structs_of_vllm_decode_the_events_of_a_window_beside_full_attention() -> None:
    published = Published()
    published.feed.reader_connected("engine", HERE, groups=(KVGroup("full_attention"), KVGroup("sliding_window", 32)))
    try:
        subscriber = published.subscriber()
        full = KVChunk(named("d"), describe("a", "b", "c", "d", members=(0,)))
        window = KVChunk(named("d"), describe("c", "d", parent="b", members=(1,)))
        published.feed.stored(HERE, full)
        published.feed.stored(HERE, window)
        published.feed.removed(HERE, window)
        published.catch_up(subscriber)
    finally:
        published.close()
    events = [event for _, _, payload in subscriber.received for event in DECODER.decode(payload).events][1:]
    names = [in_form(named(name), "int") for name in "abcd"]
    spec = [(e.group_idx, e.kv_cache_spec_kind, e.kv_cache_spec_sliding_window, e.block_hashes) for e in events[:2]]
    assert spec == [(0, "full_attention", None, names), (1, "sliding_window", 32, names[2:])]
    assert events[1].parent_block_hash == names[1]
    assert events[2] == BlockRemoved(block_hashes=names[2:], medium="CPU", group_idx=1, locality="LOCAL")


def test_integer_hashes_equal_those_that_vllm_publishes_for_its_own_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1")
    for text in ("a", "b", "c"):
        assert maybe_convert_block_hash(BlockHash(named(text))) == in_form(named(text), "int")


class Example:
    """The steps of vLLM's kv_events_subscriber.py: SUB and REQ, a replay when numbers are missing."""

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        self.context = zmq.Context()
        self.sub, self.replay = self.context.socket(zmq.SUB), self.context.socket(zmq.REQ)
        self.sub.connect(endpoint)
        self.sub.setsockopt_string(zmq.SUBSCRIBE, "")
        self.replay.connect(replay_endpoint)
        self.poller = zmq.Poller()
        self.poller.register(self.replay, zmq.POLLIN)
        self.last = -1
        self.events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []

    def turn(self, lose: bool = False) -> None:
        assert self.sub.poll(10_000)
        _, sequence_bytes, payload = self.sub.recv_multipart()
        sequence = int.from_bytes(sequence_bytes, "big")
        if lose:
            return
        if 0 <= self.last < sequence - 1:
            self.replay.send((self.last + 1).to_bytes(8, "big"))
            while self.poller.poll(timeout=200):
                _, number, missed = self.replay.recv_multipart()
                if not missed:
                    break
                if int.from_bytes(number, "big") > self.last:
                    self.events += DECODER.decode(missed).events
                    self.last = int.from_bytes(number, "big")
                    if self.last >= sequence - 1:
                        break
        self.events += DECODER.decode(payload).events
        self.last = sequence


def test_example_subscriber_of_vllm_follows_and_replays(published: Published) -> None:
    stream = published.stream()
    example = Example(stream.endpoint, stream.replay_endpoint)
    try:
        example.turn()  # the greeting
        for number in range(30):
            published.feed.stored(HERE, chunk(f"{number}"))
            published.sequence()
            example.turn(
                lose=number == 10
            )  # one only: a second REQ may be answered by what is left of the first replay
        deadline = time.monotonic() + 20
        while len(example.events) < 31 and time.monotonic() < deadline:  # an empty batch may have come between
            example.turn()
    finally:
        example.context.destroy(0)
    assert example.events[0] == AllBlocksCleared()
    told = [event.block_hashes for event in example.events[1:]]
    assert told == [[in_form(named(f"{number}"), "int")] for number in range(30)]
