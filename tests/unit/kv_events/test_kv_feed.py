"""The feed: an engine ends with what it can read, each block reported once, whatever messages are lost."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.daemon import wait_until
from support.kv_chunks import Prompt, extra, scheduler
from support.kv_follower import Follower, split

from kvserver.config import Settings
from kvserver.events import ChunksEvicted, ChunksStored, InstanceDescribed, InstanceDisconnected
from kvserver.kv_events import Feed, Hub, ObserverContext
from kvserver.kv_events.feed import MOST_BYTES
from kvserver.kv_events.types import KVChunk, Tier
from kvserver.protocol import KVBlocks, KVEventsTaken, KVGroup, TakeKVEvents

PREFIX, LORA, OTHER = b"r" * 64, b"r" * 64 + b"lora" * 8, b"o" * 64
BOOT = 1_700_000_000_000_000


class World:
    """A hub, and a feed that observes its events."""

    def __init__(self, **options: Any) -> None:
        self.hub = Hub(1 << 30, lambda event: self.feed.observe(event))
        self.feed = Feed(
            ObserverContext(Settings(), "boot", BOOT, snapshot_of_tiers=self.hub.snapshot_of_tiers), **options
        )

    def reader(self, instance_id: str = "engine", prefix: bytes = PREFIX, **changes: Any) -> None:
        self.hub.handle(InstanceDescribed(1, scheduler(instance_id, **changes), prefix, 2, 4))

    def store(
        self, prompt: Prompt, namespace: bytes = PREFIX, first: int = 0, last: int | None = None, **of: Any
    ) -> None:
        self.hub.handle(prompt.described(namespace, first, last, **of))
        self.hub.handle(ChunksStored(1, "other", "m", namespace, b"".join(prompt.keys[first:last])))

    def evict(self, keys: list[bytes], namespace: bytes = PREFIX) -> None:
        self.hub.handle(ChunksEvicted(1, namespace, b"".join(keys)))

    def readable_blocks(self) -> set[bytes]:
        """Hashes of all blocks in the chunks that can be read."""
        found: set[bytes] = set()
        for chunk in self.hub.snapshot(PREFIX)[1]:
            assert chunk.description is not None
            found |= set(split(chunk.description.hashes, chunk.description.hash_bytes))
        return found


@pytest.fixture
def world() -> World:
    return World()


def test_an_engine_receives_the_blocks_that_were_there_and_every_change(world: World) -> None:
    one = Prompt(range(40))
    world.store(one, last=3)
    world.reader()
    engine = Follower(world.feed.take_kv_events)
    engine.catch_up()
    assert set(engine.blocks) == set(one.hashes[:6])
    world.store(one, first=3)
    world.evict(one.keys[:1])
    engine.catch_up()
    assert set(engine.blocks) == set(one.hashes[2:]) == world.readable_blocks()
    assert [event.stored for event in engine.received] == [True] * 3 + [True] * 2 + [False]
    assert engine.follows == [BOOT + 1]


def test_what_happens_after_the_snapshot_is_in_the_same_reply_behind_it(world: World) -> None:
    one, two = Prompt(range(24)), Prompt(range(100, 124))
    taken: list[bytes] = []

    def snapshot(prefix: bytes) -> tuple[int, list[tuple[Tier, KVChunk]]]:
        found = world.hub.snapshot_of_tiers(prefix)
        if not taken:
            world.store(two)
            world.evict(one.keys[2:])
        taken.append(prefix)
        return found

    world.feed = Feed(ObserverContext(Settings(), "boot", BOOT, snapshot_of_tiers=snapshot))
    world.store(one)
    world.reader()
    world.reader("later", OTHER)
    engine, later = (Follower(world.feed.take_kv_events, name) for name in ("engine", "later"))
    engine.step()
    # One thread prepares for both, so all for the first one is prepared. While the thread has the feed's lock replies are empty.
    wait_until(lambda: later.step() and OTHER in taken)
    reply = wait_until(lambda: (reply := engine.step()).whole and reply)
    assert [event.stored for event in reply.events] == [True] * 6 + [False]
    assert set(engine.blocks) == {*one.hashes[:4], *two.hashes} == world.readable_blocks()


def test_an_event_that_the_snapshot_has_is_counted_once(world: World) -> None:
    one = Prompt(range(24))

    def snapshot(prefix: bytes) -> tuple[int, list[tuple[Tier, KVChunk]]]:
        world.store(one)  # which the feed observes before the snapshot
        return world.hub.snapshot_of_tiers(prefix)

    world.feed = Feed(ObserverContext(Settings(), "boot", BOOT, snapshot_of_tiers=snapshot))
    world.reader()
    engine = Follower(world.feed.take_kv_events)
    engine.catch_up()
    assert set(engine.blocks) == set(one.hashes)
    world.evict(one.keys)
    engine.catch_up()
    assert engine.blocks == {}


def test_a_stored_block_comes_with_its_whole_description(world: World) -> None:
    one = Prompt(range(24), hash_bytes=16)
    keys = [["salt"], None, None, [["image", 5]], None, None]
    world.store(one, lora_name="tuned", extra_keys=extra(*keys))
    world.reader()
    engine = Follower(world.feed.take_kv_events)
    engine.catch_up()
    for number, event in enumerate(engine.received):
        assert (event.stored, event.medium, event.hash_bytes, event.block_tokens) == (True, "CPU", 16, 4)
        assert event.parent == (one.hashes[2 * number - 1] if number else b"")
        assert event.tokens == one.contents(number, number + 1).tokens
        assert event.lora_name == "tuned"
        assert (msgspec.msgpack.decode(event.extra_keys) if event.extra_keys else [None, None]) == keys[
            2 * number : 2 * number + 2
        ]


def test_blocks_that_two_chunks_share_are_reported_once_with_the_parent_inside_the_chunk(world: World) -> None:
    one, other = Prompt([1] * 8), Prompt([1] * 4 + [2] * 4)
    keys = [["first"], ["second"]]
    world.reader()
    engine = Follower(world.feed.take_kv_events)
    world.store(one, extra_keys=extra(*keys))
    world.store(other, extra_keys=extra(*keys))
    engine.catch_up()
    assert [len(split(event.hashes, 32)) for event in engine.received] == [2, 1]
    assert engine.received[1].parent == one.hashes[0]
    assert msgspec.msgpack.decode(engine.received[1].extra_keys) == keys[1:]
    world.evict(one.keys)
    engine.catch_up()
    assert engine.received[2].hashes == one.hashes[1]
    world.evict(other.keys)
    engine.catch_up()
    assert engine.blocks == {}


def test_each_group_of_the_engine_has_events_of_its_own(world: World) -> None:
    world.store(Prompt(range(8)))
    world.reader(groups=(KVGroup("full_attention"), KVGroup("sliding_window", 64)))
    found: list[KVBlocks] = []
    wait_until(lambda: found.extend(Follower(world.feed.take_kv_events).ask().events) or found)
    assert [event.group for event in found] == [0, 1]
    assert found[0].hashes == found[1].hashes


def test_an_instance_that_is_not_described_yet_receives_nothing(world: World) -> None:
    assert world.feed.take_kv_events(
        TakeKVEvents(instance_id="who", incarnation="one", follow=7, cursor=3)
    ) == KVEventsTaken(follow=7, cursor=3, events=[], whole=False)
    world.reader(incarnation="two")
    assert Follower(world.feed.take_kv_events).ask().events == []
    assert world.feed.status().followers == []


def test_a_lost_reply_comes_again(world: World) -> None:
    world.store(Prompt(range(8 * 300)))
    world.reader()
    engine = Follower(world.feed.take_kv_events)
    wait_until(lambda: engine.step() and engine.received)
    lost = wait_until(lambda: (reply := engine.ask()).events and reply)
    assert lost.events
    for reply in (engine.ask(), engine.step()):
        assert (reply.cursor, reply.events) == (lost.cursor, lost.events)
    engine.catch_up()
    assert set(engine.blocks) == world.readable_blocks()
    assert len(engine.follows) == 1


def test_the_first_reply_comes_again_when_it_was_lost(world: World) -> None:
    world.store(Prompt(range(16)))
    world.reader()
    engine = Follower(world.feed.take_kv_events)
    wait_until(lambda: engine.ask().events)  # none of these arrives
    engine.catch_up()
    assert len(engine.follows) == 1
    assert len(engine.received) == 2


@pytest.mark.parametrize(("follow", "cursor"), [(0, 0), (5, 3), (None, 1000)])
def test_an_engine_with_an_unknown_position_begins_anew(world: World, follow: int | None, cursor: int) -> None:
    world.store(Prompt(range(40)))
    world.reader()
    engine = Follower(world.feed.take_kv_events)
    engine.catch_up()
    engine.follow = engine.follow if follow is None else follow
    engine.cursor = cursor
    engine.catch_up()
    assert len(engine.follows) == 2
    assert set(engine.blocks) == world.readable_blocks()


def test_replies_are_bounded(world: World) -> None:
    world.store(Prompt(range(8 * 200)))
    big = Prompt(range(32 * 256 * 4), chunk_blocks=256)
    world.store(big)
    world.reader()
    engine = Follower(world.feed.take_kv_events)
    sizes: list[int] = []

    def step() -> bool:
        reply = engine.step()
        sizes.append(sum(len(event.hashes) + len(event.tokens) for event in reply.events))
        return reply.whole and not reply.more

    wait_until(step)
    largest_chunk = 256 * (32 + 16)
    assert max(sizes) <= MOST_BYTES + largest_chunk
    assert set(engine.blocks) == world.readable_blocks()


def test_an_engine_that_falls_behind_begins_anew_and_loses_nothing() -> None:
    world = World(most_queued=50)
    world.reader()
    engine = Follower(world.feed.take_kv_events)
    first, second = Prompt(range(8 * 40)), Prompt(range(1000, 1000 + 8 * 40))
    world.store(first)
    engine.catch_up()
    world.evict(first.keys)
    world.store(second)
    assert world.feed.status().followers[0].queued_chunks == 0
    assert set(engine.blocks) == set(first.hashes)
    engine.catch_up()
    assert engine.follows == [BOOT + 1, BOOT + 2]
    assert set(engine.blocks) == set(second.hashes)
    assert engine.before == set()


def test_an_event_whose_preparation_paused_is_delivered_without_another_event(world: World) -> None:
    world.reader(groups=(KVGroup("full_attention"),) * 3)  # three blocks a chunk: enough is ready inside the event
    world.reader("later", OTHER)
    engine, later = (Follower(world.feed.take_kv_events, name) for name in ("engine", "later"))
    engine.catch_up()
    one = Prompt(range(8 * 256))
    world.store(one)
    wait_until(lambda: later.step().whole)  # one thread prepares for both: it has paused for the first one
    engine.catch_up()
    assert {name for _, group, name in engine.names if group == 2} == set(one.hashes)


def test_another_namespace_prefix_begins_anew(world: World) -> None:
    world.reader()
    engine = Follower(world.feed.take_kv_events)
    old, new = Prompt(range(16)), Prompt(range(100, 116))
    world.store(old)
    world.store(new, OTHER)
    engine.catch_up()
    world.reader(prefix=OTHER)
    engine.catch_up()
    assert len(engine.follows) == 2
    assert set(engine.blocks) == set(new.hashes)
    world.reader(prefix=OTHER)  # described again, unchanged
    engine.catch_up()
    assert len(engine.follows) == 2


def test_an_instance_that_went_is_forgotten(world: World) -> None:
    world.reader()
    engine = Follower(world.feed.take_kv_events)
    world.store(Prompt(range(16)))
    engine.catch_up()
    world.hub.handle(InstanceDisconnected(1, "engine", "m", True))
    assert world.feed.status().followers == []
    assert engine.ask().events == []
