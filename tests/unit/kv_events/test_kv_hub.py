"""The hub tells each chunk once when it comes and once when it goes, with what is in it, in bounded memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from support.kv_chunks import Prompt, Witness, extra, prompt, random_prompt, scheduler

from kvserver.events import (
    ChunksEvicted,
    ChunksStored,
    InstanceDescribed,
    InstanceGone,
    L1Cleared,
    L1Recounted,
    RecountPart,
)
from kvserver.kv_events import Hub
from kvserver.kv_events import hub as hub_module
from kvserver.kv_events.types import MOST_CHUNKS, KVRemoved, KVStored, ReaderCame, ReaderGone, Tier

HERE, THERE = b"n" * 32, b"o" * 32
MANY = 1 << 30


class Told:
    """A hub, and a witness of what it tells."""

    def __init__(self, memory_bytes: int = MANY) -> None:
        self.witness = Witness()
        self.hub = Hub(memory_bytes, self.witness.observe)

    def stored(self, keys: list[bytes], namespace: bytes = HERE, instance: str = "engine") -> None:
        self.hub.handle(ChunksStored(5, instance, "m", namespace, b"".join(keys), 100))

    def evicted(self, keys: list[bytes], namespace: bytes = HERE) -> None:
        self.hub.handle(ChunksEvicted(6, namespace, b"".join(keys)))

    def recounted(self, part: RecountPart, keys: list[bytes] | None = None, namespace: bytes = HERE) -> None:
        self.hub.handle(L1Recounted(7, part, namespace, b"".join(keys or [])))

    def described(self, prompt: Prompt, *args: Any, namespace: bytes = HERE, **changes: Any) -> None:
        self.hub.handle(prompt.described(namespace, *args, **changes))

    @property
    def unannounced(self) -> dict[str, int]:
        found: dict[str, int] = self.hub.status()["unannounced"]
        return {reason: count for reason, count in found.items() if count}

    def check(self) -> None:
        """State, figures and what was told agree."""
        number, chunks = self.hub.snapshot(b"")
        status, held = self.hub.status(), list(self.witness.held.values())
        assert number == len(self.witness.events) == status["events"]
        assert sorted(map(id, chunks)) == sorted(map(id, held))
        assert status["chunks"] == len(held)
        assert status["described_chunks"] == sum(chunk.description is not None for chunk in held)


@pytest.fixture
def told() -> Iterator[Told]:
    made = Told()
    yield made
    made.check()


def test_each_chunk_of_a_store_has_its_own_share_of_the_contents(told: Told) -> None:
    long = Prompt(range(24), chunk_blocks=3)
    told.described(long, lora_name="tuned")
    told.stored(long.keys)
    (event,) = told.witness.events
    assert isinstance(event, KVStored)
    assert (event.tier, event.namespace, event.instance_id, event.time_ns) == (Tier.L1, HERE, "engine", 5)
    first, second = (chunk.description for chunk in event.chunks)
    assert first is not None
    assert second is not None
    assert (first.parent, second.parent) == (b"", long.hashes[2])
    assert first.hashes + second.hashes == b"".join(long.hashes)
    assert first.tokens + second.tokens == long.contents().tokens
    assert (second.blocks, second.block_tokens, second.lora_name, second.extra_keys) == (3, 4, "tuned", b"")


def test_a_later_store_of_a_prompt_begins_with_the_block_before(told: Told) -> None:
    long = Prompt(range(32))
    told.described(long, 2)
    told.stored(long.keys[2:])
    chunk = told.witness.held[HERE, long.keys[2]]
    assert chunk.description is not None
    assert chunk.description.parent == long.hashes[3]


def test_what_is_evicted_is_told_as_it_was_stored(told: Told) -> None:
    one = Prompt(range(32))
    told.described(one)
    told.stored(one.keys)
    told.evicted(one.keys[1:3])
    assert isinstance(told.witness.events[-1], KVRemoved)
    assert {key for _, key in told.witness.held} == {one.keys[0], one.keys[3]}
    told.evicted(one.keys[1:3])  # a chunk that was never READY leaves, too
    assert len(told.witness.events) == 2


def test_a_clear_takes_all_namespaces_below_it_in_bounded_events(told: Told) -> None:
    many = Prompt(range(8 * (MOST_CHUNKS + 10)))
    for namespace in (HERE, HERE + b"lora" * 8, THERE):
        told.stored(many.keys, namespace)
    before = len(told.witness.events)
    assert before == 6
    told.hub.handle(L1Cleared(8, HERE, 0))
    assert {namespace for namespace, _ in told.witness.held} == {THERE}
    gone = told.witness.events[before:]
    assert all(isinstance(event, KVRemoved) and len(event.chunks) <= MOST_CHUNKS for event in gone)
    told.hub.handle(L1Cleared(9, b"", 0))
    assert told.witness.held == {}


def test_a_chunk_that_nobody_describes_is_told_without_and_counted(told: Told) -> None:
    one = Prompt(range(16))
    told.stored(one.keys)
    assert [chunk.description for chunk in told.witness.held.values()] == [None, None]
    assert told.unannounced == {"undescribed": 2}


def test_a_chunk_that_is_described_late_goes_and_comes(told: Told) -> None:
    one = Prompt(range(16))
    told.stored(one.keys)
    told.described(one, instance="other")
    _, removed, stored = told.witness.events
    assert isinstance(removed, KVRemoved)
    assert isinstance(stored, KVStored)
    assert stored.instance_id == "other"
    assert all(chunk.description is not None for chunk in told.witness.held.values())
    told.described(one)
    assert len(told.witness.events) == 3, "it is known already"


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
def test_contents_that_cannot_be_are_not_taken(told: Told, changes: dict[str, Any]) -> None:
    one = Prompt(range(16))
    told.described(one, **changes)
    told.stored(one.keys)
    assert [chunk.description for chunk in told.witness.held.values()] == [None, None]
    assert told.unannounced == {"mismatched": 2}


def test_only_the_chunks_whose_hash_is_not_their_key_are_mismatched(told: Told) -> None:
    one = Prompt(range(24))
    hashes = bytearray(one.contents().hashes)
    hashes[3 * 32] ^= 1  # the last block of the second chunk
    told.described(one, hashes=bytes(hashes))
    told.stored(one.keys)
    known = [chunk.description is not None for chunk in told.witness.held.values()]
    assert known == [True, False, True]
    assert told.unannounced == {"mismatched": 1}


def test_short_hashes_are_keys_filled_up_with_zeros(told: Told) -> None:
    one = Prompt(range(16), hash_bytes=16)
    told.described(one)
    told.stored(one.keys)
    assert told.unannounced == {}


def test_extra_keys_are_cut_by_chunk_and_left_out_where_all_are_nil(told: Told) -> None:
    one = Prompt(range(24))
    image = ["image-hash", 3]
    told.described(one, extra_keys=extra(["salt"], None, None, [image, b"\xff"], None, None))
    told.stored(one.keys)
    first, second, third = (chunk.description for chunk in told.witness.held.values())
    assert first is not None
    assert second is not None
    assert third is not None
    assert msgspec.msgpack.decode(first.extra_keys) == [["salt"], None]
    assert msgspec.msgpack.decode(second.extra_keys) == [None, [image, b"\xff"]]
    assert third.extra_keys == b""


def test_chunks_beyond_the_memory_count_as_undescribed_and_those_evicted_make_room() -> None:
    one = Prompt(range(8 * 100))
    told = Told(memory_bytes=20_000)
    for at in range(100):
        told.described(one, at, at + 1)
        told.stored(one.keys[at : at + 1])
        assert told.hub.status()["state_bytes"] <= 20_000
    told.check()
    described = told.hub.status()["described_chunks"]
    assert 30 < described < 60
    assert told.unannounced == {"memory": 100 - described}
    told.evicted(one.keys)
    assert told.hub.status()["state_bytes"] == 0
    told.described(one, 0, 5)
    told.stored(one.keys[:5])
    told.check()
    assert told.hub.status()["described_chunks"] == 5


def test_descriptions_of_chunks_that_never_become_ready_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "_MOST_EXPECTED", 10)
    one, told = Prompt(range(8 * 30)), Told()
    told.described(one)
    told.stored(one.keys)
    told.check()
    known = [key for (_, key), chunk in told.witness.held.items() if chunk.description is not None]
    assert known == one.keys[20:]


def test_descriptions_that_wait_take_a_quarter_of_the_memory_at_most() -> None:
    one, told = Prompt(range(8 * 100)), Told(memory_bytes=20_000)
    told.described(one)
    assert 2_000 < told.hub.status()["state_bytes"] <= 5_000
    told.stored(one.keys)
    told.check()
    assert told.unannounced == {"memory": 100 - told.hub.status()["described_chunks"]}


def test_readers_are_told_of_when_they_are_described_and_when_they_go(told: Told) -> None:
    told.hub.handle(InstanceGone(1, "unknown", "m", "one", True))
    told.hub.handle(InstanceDescribed(2, scheduler(), HERE, 2, 16))
    told.hub.handle(InstanceDescribed(3, scheduler(), THERE, 2, 16))
    told.hub.handle(InstanceGone(4, "engine", "m", "one", True))
    told.hub.handle(InstanceGone(5, "engine", "m", "one", True))
    came, changed, gone = told.witness.events
    assert isinstance(came, ReaderCame)
    assert isinstance(changed, ReaderCame)
    assert (came.scheduler, came.reach, came.chunk_blocks, came.block_tokens) == (scheduler(), HERE, 2, 16)
    assert changed.reach == THERE
    assert isinstance(gone, ReaderGone)
    assert (gone.instance_id, gone.model_name) == ("engine", "m")


def test_a_snapshot_is_of_one_reach_and_names_the_last_event(told: Told) -> None:
    one = prompt(*range(16))
    told.stored(one.keys, HERE)
    told.stored(one.keys, HERE + b"lora" * 8)
    told.stored(one.keys, THERE)
    number, chunks = told.hub.snapshot(HERE)
    assert number == 3
    assert sorted(chunk.key for chunk in chunks) == sorted(one.keys * 2)


# ---- recounts ---------------------------------------------------------------------------------


def test_a_recount_tells_only_what_was_missed(told: Told) -> None:
    one = Prompt(range(48))
    told.described(one)
    told.stored(one.keys[:4])
    told.recounted(RecountPart.BEGIN)
    assert len(told.hub.snapshot(b"")[1]) == 4, "what is being recounted is held meanwhile"
    told.recounted(RecountPart.SLICE, one.keys[2:5])
    told.evicted(one.keys[2:3])  # between the slices
    told.stored(one.keys[5:6])
    told.recounted(RecountPart.END)
    assert {key for _, key in told.witness.held} == set(one.keys[3:6])
    assert all(chunk.description is not None for chunk in told.witness.held.values())
    assert told.hub.status()["recounts"] == 1


def test_a_recount_that_begins_again_forgets_nothing(told: Told) -> None:
    one = Prompt(range(48))
    told.stored(one.keys[:4])
    told.recounted(RecountPart.BEGIN)
    told.recounted(RecountPart.SLICE, one.keys[:1])
    told.recounted(RecountPart.BEGIN)
    told.recounted(RecountPart.SLICE, one.keys[:3])
    told.recounted(RecountPart.END)
    assert {key for _, key in told.witness.held} == set(one.keys[:3])
    assert len(told.witness.events) == 2


@pytest.mark.parametrize("seed", range(5))
def test_random_events_agree_with_a_plain_set(seed: int) -> None:
    generator = random.Random(seed)
    told = Told(memory_bytes=generator.choice((0, 20_000, MANY)))
    model: set[tuple[bytes, bytes]] = set()
    recounting: list[tuple[bytes, bytes]] = []
    agrees = True  # nothing was lost that was not recounted since
    for _ in range(1500):
        namespace = generator.choice((HERE, HERE + b"lora" * 8, THERE))
        chosen = random_prompt(generator, chunks=generator.randint(1, 6))
        match generator.randrange(12):
            case 0 | 1 | 2:
                told.described(chosen, namespace=namespace)
            case 3 | 4 | 5:
                told.stored(chosen.keys, namespace)
                model |= {(namespace, key) for key in chosen.keys}
            case 6 | 7 | 8:
                told.evicted(chosen.keys[1:], namespace)
                model -= {(namespace, key) for key in chosen.keys[1:]}
            case 9 if generator.random() < 0.2:
                base = generator.choice((b"", HERE, namespace))
                told.hub.handle(L1Cleared(1, base, 0))
                model = {name for name in model if not name[0].startswith(base)}
            case 10 if generator.random() < 0.2:  # some were dropped; it begins, perhaps once more
                model = {name for name in model if generator.random() < 0.8} | {(THERE, chosen.keys[0])}
                told.recounted(RecountPart.BEGIN)
                recounting, agrees = sorted(model), False
            case _ if not agrees:
                for space, key in recounting[:5]:
                    told.recounted(RecountPart.SLICE, [key] if (space, key) in model else [], space)
                del recounting[:5]
                if not recounting:
                    told.recounted(RecountPart.END)
                    agrees = True
        if agrees:
            assert set(told.witness.held) == model
    assert told.hub.status()["recounts"] > 3
    told.check()
    told.hub.handle(L1Cleared(1, b"", 0))
    told.check()
    assert told.witness.held == {}
