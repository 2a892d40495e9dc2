"""The hub publishes each described chunk once when it is stored and once when it is removed, in bounded memory; of others their keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from support.kv_chunks import Prompt, Witness, extra, prompt, scheduler

from kvserver.events import (
    ChunksEvicted,
    ChunksStored,
    InstanceDescribed,
    InstanceDisconnected,
    L1Cleared,
    L2Cleared,
    L2Removed,
    L2Resynced,
    L2Stored,
    ResyncPart,
)
from kvserver.kv_events import Hub, ReaderCame, ReaderGone
from kvserver.kv_events import described as described_module
from kvserver.kv_events.types import MOST_CHUNKS, KVRemoved, KVStored, ReaderConnected, ReaderDisconnected, Tier

HERE, THERE = b"n" * 32, b"o" * 32
MANY = 1 << 30


class WitnessedHub:
    """A hub, and a witness of its events."""

    def __init__(self, memory_bytes: int = MANY) -> None:
        self.witness = Witness()
        self.hub = Hub(memory_bytes, self.witness.observe)

    def stored(self, keys: list[bytes], namespace: bytes = HERE, instance: str = "engine") -> None:
        self.hub.handle(ChunksStored(5, instance, "m", namespace, b"".join(keys)))

    def evicted(self, keys: list[bytes], namespace: bytes = HERE) -> None:
        self.hub.handle(ChunksEvicted(6, namespace, b"".join(keys)))

    def written(self, keys: list[bytes], namespace: bytes = HERE) -> None:
        self.hub.handle(L2Stored(7, namespace, b"".join(keys), 0))

    def left_l2(self, keys: list[bytes], namespace: bytes = HERE) -> None:
        self.hub.handle(L2Removed(8, namespace, b"".join(keys), 0))

    @property
    def in_l2(self) -> list[bytes]:
        """Keys of the described objects there."""
        return [key for _, key in self.witness.tiers[Tier.L2][()]]

    def described(self, prompt: Prompt, *args: Any, namespace: bytes = HERE, **changes: Any) -> None:
        self.hub.handle(prompt.described(namespace, *args, **changes))

    @property
    def unannounced(self) -> dict[str, int]:
        found = self.hub.status().unannounced
        return {reason: count for reason, count in found.items() if count}

    def check(self) -> None:
        """The state, the status and the published events agree."""
        number, chunks = self.hub.snapshot_of_tiers(b"")
        status = self.hub.status()
        held = [(tier, chunk) for tier in Tier for chunk in self.witness.tiers[tier][()].values()]
        assert number == len(self.witness.events) == status.events
        assert sorted((tier.value, id(chunk)) for tier, chunk in chunks) == sorted((t.value, id(c)) for t, c in held)
        assert self.hub.snapshot(b"") == (number, [chunk for tier, chunk in chunks if tier is Tier.L1])
        assert status.described_chunks == len(held)
        assert status.state_bytes == sum({id(chunk): chunk.description.size for _, chunk in held}.values())
        assert self.witness.resident.keys() <= self.witness.keys.keys()


@pytest.fixture
def world() -> Iterator[WitnessedHub]:
    made = WitnessedHub()
    yield made
    made.check()


def test_each_chunk_of_a_store_has_its_own_share_of_the_contents(world: WitnessedHub) -> None:
    long = Prompt(range(24), chunk_blocks=3)
    world.described(long, lora_name="tuned")
    world.stored(long.keys)
    (event,) = world.witness.events
    assert isinstance(event, KVStored)
    assert (event.tier, event.namespace, event.instance_id, event.time_ns) == (Tier.L1, HERE, "engine", 5)
    first, second = (chunk.description for chunk in event.chunks)
    assert (first.parent, second.parent) == (b"", long.hashes[2])
    assert first.hashes + second.hashes == b"".join(long.hashes)
    assert first.tokens + second.tokens == long.contents().tokens
    assert (second.blocks, second.block_tokens, second.lora_name, second.extra_keys) == (3, 4, "tuned", b"")


def test_a_later_store_of_a_prompt_begins_with_the_block_before(world: WitnessedHub) -> None:
    long = Prompt(range(32))
    world.described(long, 2)
    world.stored(long.keys[2:])
    assert world.witness.resident[HERE, long.keys[2]].description.parent == long.hashes[3]


def test_an_evicted_chunk_is_published_as_it_was_stored(world: WitnessedHub) -> None:
    one = Prompt(range(32))
    world.described(one)
    world.stored(one.keys)
    world.evicted(one.keys[1:3])
    assert isinstance(world.witness.events[-1], KVRemoved)
    assert {key for _, key in world.witness.resident} == {one.keys[0], one.keys[3]}
    world.evicted(one.keys[1:3])  # a chunk that was never READY leaves, too
    assert len(world.witness.events) == 2


def test_a_clear_removes_all_namespaces_below_it_in_bounded_events(world: WitnessedHub) -> None:
    many = Prompt(range(8 * (MOST_CHUNKS + 10)))
    for namespace in (HERE, HERE + b"lora" * 8, THERE):
        world.described(many, namespace=namespace)
        world.stored(many.keys, namespace)
    before = len(world.witness.events)
    assert before == 6
    world.hub.handle(L1Cleared(8, HERE))
    assert {namespace for namespace, _ in world.witness.resident} == {THERE}
    assert {namespace for namespace, _ in world.witness.keys} == {THERE}
    removals = world.witness.events[before:]
    assert all(isinstance(event, KVRemoved) and len(event.chunks) <= MOST_CHUNKS for event in removals)
    world.hub.handle(L1Cleared(9, b""))
    assert world.witness.resident == world.witness.keys == {}


def test_of_a_chunk_without_a_description_only_the_key_is_handed_over(world: WitnessedHub) -> None:
    one = Prompt(range(16))
    world.stored(one.keys)
    assert world.witness.keys == {(HERE, key): 1 for key in one.keys}
    assert world.witness.events == []
    assert world.unannounced == {"undescribed": 2}
    world.evicted(one.keys)
    assert world.witness.keys == {}


def test_a_chunk_that_is_described_late_is_published_then(world: WitnessedHub) -> None:
    one = Prompt(range(24))
    world.stored(one.keys[:2])
    world.described(one, instance="other", ready=one.keys[:2])
    (stored,) = world.witness.events
    assert isinstance(stored, KVStored)
    assert (stored.instance_id, [chunk.key for chunk in stored.chunks]) == ("other", one.keys[:2])
    world.described(one, ready=one.keys[:2])
    assert len(world.witness.events) == 1, "the description is known already"
    world.stored(one.keys[2:])
    assert {key for _, key in world.witness.resident} == set(one.keys), "the third was not READY"


def test_a_chunk_whose_eviction_was_dropped_is_published_and_counted_once(world: WitnessedHub) -> None:
    one = Prompt(range(16))
    for _ in range(2):
        world.described(one)
        world.stored(one.keys)
        assert world.hub.status().state_bytes == sum(c.description.size for c in world.witness.resident.values())
    assert len(world.witness.events) == 1
    assert world.unannounced == {}


def test_impossible_late_description_counts_nothing_when_its_chunk_is_stored_again(world: WitnessedHub) -> None:
    one = Prompt(range(16))
    world.stored(one.keys)
    world.described(one, hashes=bytes(4 * 32), ready=one.keys)
    world.evicted(one.keys)
    world.stored(one.keys)
    assert world.witness.resident == {}
    assert world.unannounced == {"undescribed": 4}


@pytest.mark.parametrize(
    "changes",
    [
        {"hashes": bytes(4 * 32)},
        {"extra_keys": b"\xc1"},
        {"extra_keys": extra(None)},
        {"extra_keys": extra(None, None, None, 5)},
        {"extra_keys": extra(None, None, None, {"a": 1})},
        {"extra_keys": extra(None, None, None, [{"a": 1}])},
        {"extra_keys": extra(None, None, None, [[["deep"]]])},
        {"extra_keys": extra(None, None, None, [msgspec.msgpack.Ext(5, b"x")])},
        {"extra_keys": b"\x94\xc0\xc0\xc0\x91\xa2\xff\xfe"},
        {"extra_keys": b"\x94\xc0\xc0\xc0" + b"\x91" * 1000 + b"\xc0"},
        {"extra_keys": b"\x94\xc0\xc0\xc0" + b"\x91" * 900 + b"\xc0"},
        {"extra_keys": extra(None, None, None, None) + b"\xc0"},
        {"extra_keys": b"\xdd\xff\xff\xff\xff"},
    ],
    ids=lambda changes: repr(changes)[:40],
)
def test_impossible_contents_are_counted_as_mismatched_and_not_published(
    world: WitnessedHub, changes: dict[str, Any]
) -> None:
    one = Prompt(range(16))
    world.described(one, **changes)
    world.stored(one.keys)
    assert world.witness.resident == {}
    assert world.unannounced == {"mismatched": 2}


def test_only_the_chunks_whose_hash_is_not_their_key_are_mismatched(world: WitnessedHub) -> None:
    one = Prompt(range(24))
    hashes = bytearray(one.contents().hashes)
    hashes[3 * 32] ^= 1  # the last block of the second chunk
    world.described(one, hashes=bytes(hashes))
    world.stored(one.keys)
    assert [key for _, key in world.witness.resident] == [one.keys[0], one.keys[2]]
    assert world.unannounced == {"mismatched": 1}


def test_short_hashes_are_keys_filled_up_with_zeros(world: WitnessedHub) -> None:
    one = Prompt(range(16), hash_bytes=16)
    world.described(one)
    world.stored(one.keys)
    assert world.unannounced == {}


def test_extra_keys_are_cut_by_chunk_and_left_out_where_all_are_nil(world: WitnessedHub) -> None:
    one = Prompt(range(24))
    image = ["image-hash", 3]
    world.described(one, extra_keys=extra(["salt"], None, None, [image, b"\xff"], None, None))
    world.stored(one.keys)
    first, second, third = (chunk.description for chunk in world.witness.resident.values())
    assert msgspec.msgpack.decode(first.extra_keys) == [["salt"], None]
    assert msgspec.msgpack.decode(second.extra_keys) == [None, [image, b"\xff"]]
    assert third.extra_keys == b""


def test_chunks_beyond_the_memory_count_as_undescribed_and_those_evicted_make_room() -> None:
    one = Prompt(range(8 * 100))
    world = WitnessedHub(memory_bytes=20_000)
    for at in range(100):
        world.described(one, at, at + 1)
        world.stored(one.keys[at : at + 1])
        assert world.hub.status().state_bytes <= 20_000
    world.check()
    described = world.hub.status().described_chunks
    assert 30 < described < 60
    assert world.unannounced == {"memory": 100 - described}
    world.evicted(one.keys)
    assert world.hub.status().state_bytes == 0
    world.described(one, 0, 5)
    world.stored(one.keys[:5])
    world.check()
    assert world.hub.status().described_chunks == 5


def test_descriptions_of_chunks_that_never_become_ready_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(described_module, "_MOST_EXPECTED", 10)
    one, world = Prompt(range(8 * 30)), WitnessedHub()
    world.described(one)
    world.stored(one.keys)
    world.check()
    assert [key for _, key in world.witness.resident] == one.keys[20:]


def test_descriptions_that_wait_use_a_quarter_of_the_memory_at_most() -> None:
    one, world = Prompt(range(8 * 100)), WitnessedHub(memory_bytes=20_000)
    world.described(one)
    assert 2_000 < world.hub.status().state_bytes <= 5_000
    world.stored(one.keys)
    world.check()
    assert world.unannounced == {"memory": 100 - world.hub.status().described_chunks}


def test_readers_are_published_when_they_are_described_and_when_they_disconnect(world: WitnessedHub) -> None:
    world.hub.handle(InstanceDisconnected(1, "unknown", "m", True))
    world.hub.handle(InstanceDescribed(2, scheduler(), HERE, 2, 16))
    world.hub.handle(InstanceDescribed(3, scheduler(), THERE, 2, 16))
    world.hub.handle(InstanceDisconnected(4, "engine", "m", True))
    world.hub.handle(InstanceDisconnected(5, "engine", "m", True))
    first, changed, last = world.witness.events
    assert isinstance(first, ReaderConnected)
    assert isinstance(changed, ReaderConnected)
    assert (first.scheduler, first.namespace_prefix, first.chunk_blocks, first.block_tokens) == (
        scheduler(),
        HERE,
        2,
        16,
    )
    assert changed.namespace_prefix == THERE
    assert isinstance(last, ReaderDisconnected)
    assert (last.instance_id, last.model_name) == ("engine", "m")


def test_observers_of_readers_may_use_the_earlier_names(world: WitnessedHub) -> None:
    world.hub.handle(InstanceDescribed(1, scheduler(), HERE, 2, 16))
    world.hub.handle(InstanceDisconnected(2, "engine", "m", True))
    first, last = world.witness.events
    assert isinstance(first, ReaderCame)
    assert first.reach == HERE
    assert isinstance(last, ReaderGone)


def test_a_snapshot_is_of_one_namespace_prefix_and_names_the_last_event(world: WitnessedHub) -> None:
    one = prompt(*range(16))
    for namespace in (HERE, HERE + b"lora" * 8, THERE):
        world.described(one, namespace=namespace)
        world.stored(one.keys, namespace)
    number, chunks = world.hub.snapshot(HERE)
    assert number == 3
    assert sorted(chunk.key for chunk in chunks) == sorted(one.keys * 2)


class TestL2:
    def test_what_is_written_is_described_as_in_l1_and_stays_when_l1_evicts_it(self, world: WitnessedHub) -> None:
        one = Prompt(range(16))
        world.described(one)
        world.stored(one.keys)
        world.written(one.keys)
        first, second = world.witness.events
        assert isinstance(second, KVStored)
        assert (second.tier, second.chunks) == (Tier.L2, first.chunks)
        world.evicted(one.keys)
        assert world.in_l2 == one.keys
        world.stored(one.keys)  # a fill, which no engine describes
        assert {key for _, key in world.witness.resident} == set(one.keys)
        world.left_l2(one.keys[:1])
        assert world.in_l2 == one.keys[1:]
        world.hub.handle(L2Cleared(9, HERE))
        assert world.in_l2 == []
        assert world.unannounced == {}

    def test_what_nothing_describes_is_announced_once_an_engine_stores_it_again(self, world: WitnessedHub) -> None:
        one = Prompt(range(16))
        world.written(one.keys)
        assert world.witness.keys_in[Tier.L2][0].total() == 2
        assert world.in_l2 == []
        assert world.unannounced == {"undescribed": 2}
        world.described(one, in_l2=(b"".join(one.keys[:1]),))
        assert world.in_l2 == one.keys[:1]
        world.stored(one.keys)
        assert {key for _, key in world.witness.resident} == set(one.keys)

    def test_l2_alone_uses_half_of_the_memory_and_l1_is_described_as_before(self) -> None:
        one, world = Prompt(range(8 * 100)), WitnessedHub(memory_bytes=20_000)
        for at in range(100):
            world.described(one, at, at + 1)
            world.stored(one.keys[at : at + 1])
            world.written(one.keys[at : at + 1])
            assert world.in_l2[-1] == one.keys[at]
            world.evicted(one.keys[at : at + 1])
            assert world.hub.status().state_bytes <= 10_000
            world.check()
        assert 15 < len(world.in_l2) < 30
        assert world.unannounced == {"memory": 100 - len(world.in_l2)}
        world.described(one, 99, ready=(), in_l2=(one.keys[99],))
        assert one.keys[99] not in world.in_l2, "there is no room for a late description either"
        world.left_l2(one.keys)
        assert world.in_l2 == []

    def test_a_resync_removes_what_it_does_not_name_and_keeps_what_is_described_meanwhile(
        self, world: WitnessedHub
    ) -> None:
        one, two = Prompt(range(24)), Prompt(range(100, 108))
        world.described(one)
        world.stored(one.keys)
        world.written(one.keys)
        world.hub.handle(L2Resynced(9, ResyncPart.BEGIN))
        assert world.witness.keys_in[Tier.L2][0].total() == 0
        world.hub.handle(L2Resynced(9, ResyncPart.SLICE, HERE, b"".join([*one.keys[:2], *two.keys])))
        world.described(two, in_l2=(two.keys[0],))
        world.left_l2(one.keys[1:2])
        world.hub.handle(L2Resynced(9, ResyncPart.END))
        assert set(world.in_l2) == {one.keys[0], *two.keys}
        assert world.witness.keys_in[Tier.L2][0].total() == 2
        world.evicted(two.keys)
        world.hub.handle(L2Removed(9, HERE, two.keys[0], 0))
        world.stored(two.keys)  # takes the description that waits
        assert world.hub.status().recounts == 1
