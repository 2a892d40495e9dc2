"""The hub publishes of each object group what its objects hold, described by the chunks of the first group."""

from __future__ import annotations

import msgspec
import pytest
from support.kv_chunks import Prompt, Witness, extra

from kvserver.cache import WHOLE_CHUNKS, GroupObjects, Groups
from kvserver.events import ChunksEvicted, ChunksStored, L1Cleared, L1Resynced, ResyncPart
from kvserver.kv_events import Hub
from kvserver.kv_events.types import Description, KeysRemoved, KeysStored
from kvserver.protocol import ObjectGroup

HERE = b"n" * 32
CHUNK_TOKENS = 16  # four blocks of four tokens
FULL, WINDOW, LARGER, STATE = Groups(
    [
        ObjectGroup("full", (0, 3), 4),
        ObjectGroup("window", (1,), 4, tokens=7),
        ObjectGroup("window", (2,), 8, tokens=8),
        ObjectGroup("state", (4,), 16),
    ],
    ranks=1,
    chunk_tokens=CHUNK_TOKENS,
).objects
ONE = Prompt(range(48), chunk_blocks=4)


class World:
    def __init__(self, memory_bytes: int = 1 << 30) -> None:
        self.witness = Witness()
        self.hub = Hub(memory_bytes, self.witness.observe)

    def stored(self, group: GroupObjects, *chunks: int) -> None:
        keys = b"".join(ONE.keys[chunk] for chunk in chunks)
        self.hub.handle(ChunksStored(1, "engine", "m", HERE, keys, group))

    def evicted(self, group: GroupObjects | None, *chunks: int) -> None:
        self.hub.handle(ChunksEvicted(1, HERE, b"".join(ONE.keys[chunk] for chunk in chunks), group))

    def described(self, group: GroupObjects, chunk: int) -> Description:
        return self.witness.groups[group.members][HERE, ONE.keys[chunk]].description

    def chunks(self, group: GroupObjects) -> list[int]:
        return sorted(ONE.keys.index(key) for _, key in self.witness.groups.get(group.members, ()))

    @property
    def unannounced(self) -> dict[str, int]:
        return {reason: count for reason, count in self.hub.status().unannounced.items() if count}


@pytest.fixture
def world() -> World:
    made = World()
    made.hub.handle(ONE.described(HERE, ready={FULL: ()}))
    made.stored(FULL, 0, 1, 2)
    return made


def test_an_object_is_described_by_the_last_blocks_of_its_chunk(world: World) -> None:
    world.stored(WINDOW, 1)
    found, tokens = world.described(WINDOW, 1), ONE.contents().tokens
    assert found.hashes == b"".join(ONE.hashes[6:8])
    assert (found.parent, found.tokens, found.block_tokens) == (ONE.hashes[5], tokens[24 * 4 : 32 * 4], 4)
    assert (found.members, world.described(FULL, 1).members) == ((1,), (0, 3))


@pytest.mark.parametrize(("group", "hashes", "parent"), [(LARGER, [7], 5), (STATE, [7], 3)])
def test_a_larger_block_has_the_last_hash_inside_it(
    world: World, group: GroupObjects, hashes: list[int], parent: int
) -> None:
    world.stored(group, 1)
    found = world.described(group, 1)
    assert found.hashes == b"".join(ONE.hashes[at] for at in hashes)
    assert (found.parent, found.blocks * found.block_tokens * 4) == (ONE.hashes[parent], len(found.tokens))


def test_the_block_before_a_state_at_the_first_boundary_is_none(world: World) -> None:
    world.stored(STATE, 0)
    assert world.described(STATE, 0).parent == b""


def test_extra_keys_of_a_larger_block_are_those_of_its_parts_with_offsets_from_its_start() -> None:
    world, image = World(), ["image", 1]
    parts = [["lora", "salt"], None, ["lora", image], ["lora", ["image", -3]], *[None] * 8]
    world.hub.handle(ONE.described(HERE, ready={FULL: ()}, extra_keys=extra(*parts)))
    world.stored(FULL, 0, 1)
    for group in (LARGER, STATE, WINDOW):
        world.stored(group, 0, 1)
    keys = {group: msgspec.msgpack.decode(world.described(group, 0).extra_keys) for group in (LARGER, STATE, WINDOW)}
    assert keys == {
        LARGER: [["lora", image]],
        STATE: [["lora", "salt", ["image", 9]]],
        WINDOW: [["lora", image], ["lora", ["image", -3]]],
    }
    assert world.described(STATE, 1).extra_keys == b""


def test_blocks_smaller_than_those_of_the_first_group_are_described_by_what_is_kept_beside_it() -> None:
    large, small = Groups(
        [ObjectGroup("full", (0,), 8), ObjectGroup("window", (1,), 4, tokens=7)], 1, CHUNK_TOKENS
    ).objects
    world = World()
    world.hub.handle(ONE.described(HERE, 0, 2, ready={large: ()}))
    world.stored(large, 0, 1)
    before = world.hub.status().state_bytes
    world.stored(small, 1)
    assert world.described(large, 1).hashes == ONE.hashes[5] + ONE.hashes[7]
    assert world.described(small, 1).hashes == b"".join(ONE.hashes[6:8])
    assert world.hub.status().state_bytes == before + world.described(small, 1).size
    world.evicted(None, 0, 1)
    assert world.hub.status().state_bytes == 0


def test_blocks_smaller_than_the_described_blocks_are_counted_as_undescribed(world: World) -> None:
    finer = GroupObjects(1, (5,), 2, 4)
    world.stored(finer, 0, 1)
    assert world.chunks(finer) == []
    assert world.unannounced == {"undescribed": 2}


def test_object_of_an_undescribed_chunk_is_counted_and_published_once_described() -> None:
    world = World()
    world.stored(WINDOW, 0)
    assert world.unannounced == {"undescribed": 1}
    world.hub.handle(ONE.described(HERE, ready={FULL: (), WINDOW: ONE.keys[:1]}))
    assert (world.chunks(WINDOW), world.chunks(FULL)) == ([0], [])
    world.stored(FULL, 0)
    assert world.chunks(FULL) == [0]
    assert world.unannounced == {"undescribed": 1}


def test_each_object_of_a_chunk_counts(world: World) -> None:
    world.stored(WINDOW, 1)
    assert world.hub.status().described_chunks == 4
    world.evicted(None, 1)
    assert world.hub.status().described_chunks == 2
    other = World()
    for group in (FULL, WINDOW, STATE):
        other.stored(group, 0)
    assert other.unannounced == {"undescribed": 3}


def test_dropped_objects_are_of_one_group_and_an_eviction_of_all(world: World) -> None:
    world.stored(WINDOW, 0, 1)
    world.evicted(WINDOW, 0)
    assert (world.chunks(FULL), world.chunks(WINDOW)) == ([0, 1, 2], [1])
    world.evicted(None, 1, 2)
    assert (world.chunks(FULL), world.chunks(WINDOW)) == ([0], [])
    world.stored(WINDOW, 0)
    assert world.chunks(WINDOW) == [0], "the first group's object describes it"
    world.hub.handle(L1Cleared(1, b""))
    assert (world.chunks(FULL), world.chunks(WINDOW)) == ([], [])
    assert world.hub.status().state_bytes == 0


def test_keys_are_handed_over_with_their_group() -> None:
    seen: list[object] = []
    hub, keys = Hub(1 << 30, seen.append), b"".join(ONE.keys[:1])
    for group in (WHOLE_CHUNKS, WINDOW):
        hub.handle(ChunksStored(1, "engine", "m", HERE, keys, group))
    for evicted in (WINDOW, None):
        hub.handle(ChunksEvicted(1, HERE, keys, evicted))
    assert [each.group for each in seen if isinstance(each, KeysStored | KeysRemoved)] == [0, 1, 1, None]


def test_descriptions_of_windows_count_towards_the_memory() -> None:
    world = World(memory_bytes=2200)
    for chunk in (0, 1):
        world.hub.handle(ONE.described(HERE, chunk, chunk + 1, ready={FULL: ()}))
        world.stored(FULL, chunk)
    for group in (WINDOW, LARGER, STATE):
        world.stored(group, 0)
    sizes = [chunk.description.size for of in world.witness.groups.values() for chunk in of.values()]
    assert (len(sizes), world.unannounced) == (4, {"memory": 1})
    assert world.hub.status().state_bytes == sum(sizes) <= 2200


def test_a_resync_removes_the_objects_that_it_does_not_name_of_their_group_alone(world: World) -> None:
    world.stored(WINDOW, 0, 1)
    world.hub.handle(L1Resynced(1, ResyncPart.BEGIN))
    for group, chunks in ((FULL, (0, 1, 2)), (WINDOW, (1, 2))):
        keys = b"".join(ONE.keys[chunk] for chunk in chunks)
        world.hub.handle(L1Resynced(1, ResyncPart.SLICE, HERE, keys, group))
    world.hub.handle(L1Resynced(1, ResyncPart.END))
    assert (world.chunks(FULL), world.chunks(WINDOW)) == ([0, 1, 2], [1, 2])
