"""Each consumer of KV events ends with what L1 and L2 hold, whatever happens to tiers, engines, events, messages and daemons.

One property over stages. A stage is a kind of consumer: engines that request events from a feed and lose replies, and
subscribers of the publisher from its start, with losses, by a snapshot and by a replay. All outlive their daemons. Beside
them the index of routers, which a daemon has of its own.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.daemon import wait_until
from support.kv_chunks import Prompt
from support.kv_feed import chunk
from support.kv_follower import Follower, split
from support.kv_loop import Loop
from support.kv_publisher import Published, from_snapshot
from support.kv_subscriber import Blocks, Subscriber
from support.listed_tier import ListedTier
from support.properties import examples

from kvserver.cache import Groups
from kvserver.config import Settings
from kvserver.kv_events import Feed, Hub, ObserverContext
from kvserver.kv_events.types import DirectEvent, KVChunk, KVEvent, KVRemoved, KVStored, Tier
from kvserver.l2 import ObjectName
from kvserver.protocol import ObjectGroup
from kvserver.routing import KVIndex

PREFIX, OTHER = b"r" * 64, b"o" * 64
SPACES = [PREFIX, PREFIX + b"lora" * 8, OTHER]
# Of OTHER: beside full attention two groups with a window of a block, which is half a chunk.
WINDOWS = Groups([ObjectGroup("full", (0,), 4), ObjectGroup("window", (1, 2), 4, tokens=3)], ranks=1, chunk_tokens=8)
ENOUGH = 1 << 30
BOOT = 1_700_000_000_000_000
# Prompts that often begin alike, and part anywhere, also inside a chunk; of those that begin with 0 nothing is described.
PROMPTS = st.lists(st.integers(0, 2), min_size=2, max_size=8).map(lambda of: Prompt([n for n in of for _ in range(4)]))


def blocks_of(chunks: list[tuple[Tier, KVChunk]], group: int | None = 0) -> set[tuple[str, int | None, bytes]]:
    """Medium, KV cache group and hash of each. `group`: of an engine with one."""
    return {
        (tier.value, number, name)
        for tier, each in chunks
        for name in split(each.description.hashes, each.description.hash_bytes)
        for number in each.description.members or (group,)
    }


class Engines:
    """Two engines, each of a prefix, that request events. The feed observes an event when it is ordered to."""

    def __init__(self, most_queued: int) -> None:
        self.most_queued = most_queued
        self.engines = [Follower(lambda request: self.feed.take_kv_events(request), name) for name in ("a", "b")]
        self.queued: deque[KVEvent] = deque()

    def start(self, hub: Hub, boot: int) -> None:
        def snapshot(prefix: bytes) -> tuple[int, list[tuple[Tier, KVChunk]]]:
            self.observe_queued(2)  # while the feed's worker takes it
            return hub.snapshot_of_tiers(prefix)

        context = ObserverContext(Settings(), "boot", boot, snapshot_of_tiers=snapshot)
        self.feed = Feed(context, most_queued=self.most_queued)

    def observe_queued(self, most: int) -> None:
        while self.queued and most > 0:
            self.feed.observe(self.queued.popleft())
            most -= 1

    def check(self, hub: Hub, prefixes: dict[str, bytes]) -> None:
        self.observe_queued(len(self.queued))
        for engine in self.engines:
            engine.catch_up()
            assert engine.names == blocks_of(hub.snapshot_of_tiers(prefixes[engine.instance_id])[1])
            assert engine.before == set(), "what an earlier follow reported was reported again or withdrawn"
        assert all(row.unbalanced_blocks == 0 for row in self.feed.status().followers)

    def end(self) -> None:
        self.queued.clear()
        self.feed.close()


class Subscribers:
    """Of a publisher: from the start, with losses, and by a snapshot in the middle."""

    def __init__(self, folder: Path) -> None:
        self.urls = {f"kv_events{name}_endpoint": f"ipc://{folder}/events{name}" for name in ("", "_replay")}
        self.subscribers: list[Subscriber] = []

    def start(self, boot: int) -> None:
        self.published = Published(boot, **self.urls)
        self.last: KVChunk | None = None

    def connect(self) -> Subscriber:
        """It begins as one that lost its state: all that is kept is replayed."""
        made = Subscriber(self.urls["kv_events_endpoint"], self.urls["kv_events_replay_endpoint"])
        made.last = 0
        return made

    def publish_last(self) -> list[tuple[Tier, KVChunk]]:
        """A change of no daemon's, which shows a gap to a subscriber that lost all. Returns what is resident by it."""
        kind, changed = (KVStored, chunk("last")) if self.last is None else (KVRemoved, self.last)
        self.last = changed if kind is KVStored else None
        self.published.publisher.observe(kind(1, 1, Tier.L2, PREFIX, (changed,)))
        return [] if self.last is None else [(Tier.L2, self.last)]

    def lose(self, subscriber: Subscriber, messages: int) -> None:
        while messages and subscriber.receive(1) is not None:
            messages -= 1

    def check(self, hub: Hub) -> None:
        expected = blocks_of(hub.snapshot_of_tiers(b"")[1] + self.publish_last(), None)
        publisher = self.published.publisher
        sequence = self.published.sequence()
        by_replay = self.connect()
        kept = by_replay.replay(0)
        numbers = [number for _, number, _ in kept]
        assert numbers == [*range(self.published.boot_micros, max(sequence, numbers[-1]) + 1)]
        for _, number, payload in kept:
            by_replay.apply(number, payload)
        taken = publisher.snapshot()
        assert from_snapshot(taken).resident == by_replay.blocks.resident == expected
        by_replay.close()
        if len(self.subscribers) < 4:
            late = self.connect()
            late.blocks, late.last = from_snapshot(taken), taken.sequence
            self.subscribers.append(late)
        for each in self.subscribers:
            each.follow(lambda each=each: each.last >= sequence)
            assert each.blocks.resident == expected
        (status,) = publisher.status().streams
        counted = {name for name in expected if name[1] != WINDOWS.objects[1].members[-1]}  # a hash of two groups, once
        assert (status.held_blocks, status.unbalanced_blocks) == (len(counted), 0)

    def end(self) -> None:
        self.published.publisher.close()


class World:
    """One daemon after the other, and consumers that outlive them."""

    def __init__(self, limit: int, memory_bytes: int, most_queued: int) -> None:
        self.limit, self.memory_bytes, self.boot = limit, memory_bytes, BOOT
        self.described_keys: set[bytes] = set()
        self.tiers = [ListedTier(), ListedTier()]  # which outlive daemons, too
        self.written: set[tuple[bytes, bytes]] = (
            set()
        )  # chunks with a description, by this daemon, and readable ever since
        self.folder = Path(tempfile.mkdtemp(prefix="kvs-"))
        self.engines, self.subscribers = Engines(most_queued), Subscribers(self.folder)
        self.start_daemon()
        self.subscribers.subscribers += [self.subscribers.connect(), self.subscribers.connect()]

    def start_daemon(self) -> None:
        self.loop = Loop(
            self.limit,
            pages=12,
            memory_bytes=self.memory_bytes,
            observe=self.observe,
            groups={OTHER: WINDOWS},
            tiers=self.tiers,
        )
        self.loop.l2_events.step()  # from now on it knows which tiers can be read
        self.written.clear()
        self.index = KVIndex(ENOUGH, follow_engines=False)
        self.engines.start(self.loop.hub, self.boot)
        self.subscribers.start(self.boot)
        self.prefixes = {"a": PREFIX, "b": OTHER, "c": PREFIX}  # with c, a reader of each stays
        for name, prefix in self.prefixes.items():
            self.loop.reader(name, prefix)

    def observe(self, event: DirectEvent) -> None:
        self.index.observe(event)
        if isinstance(event, KVEvent):
            self.engines.queued.append(event)
            self.subscribers.published.publisher.observe(event)

    def end_daemon(self) -> None:
        self.loop.close()
        self.engines.end()
        self.subscribers.end()
        self.index.close()

    def close(self) -> None:
        self.end_daemon()
        for each in self.subscribers.subscribers:
            each.close()
        shutil.rmtree(self.folder)

    def check(self) -> None:
        self.loop.catch_up()
        self.loop.check()
        if self.limit == self.memory_bytes == ENOUGH:
            self.check_described()
        for name, prefix in self.prefixes.items():
            indexed = self.index.instance(name)
            assert indexed is not None
            for tier, chunks in (("l1", self.loop.ready_chunks), ("l2", self.loop.in_l2(0))):
                assert indexed[tier]["chunks"] == len({key for at, key in chunks if at.startswith(prefix)})
        self.engines.check(self.loop.hub, self.prefixes)
        self.subscribers.check(self.loop.hub)

    def check_described(self) -> None:
        """Where no event and no description was dropped."""
        loop, described_in = self.loop, self.loop.witness.tiers[Tier.L1]
        chunks = {name for members in ((), WINDOWS.objects[0].members) for name in described_in.get(members, ())}
        assert chunks == {name for name in loop.ready_chunks if name[1] in self.described_keys}
        windows = set(described_in.get(WINDOWS.objects[1].members, ()))
        assert windows & chunks == set(loop.ready_objects(1)) & chunks
        assert set(described_in.get((-1,), ())) == set(loop.ready_objects(-1))
        in_l2 = {
            name for resident in loop.witness.tiers[Tier.L2].values() for name, of in resident.items() if not of.group
        }
        assert self.written & set(loop.in_l2(0)) <= in_l2 <= set(loop.in_l2(0))

    # ---- what may happen ------------------------------------------------------------------------

    def nothing(self) -> None:
        pass

    def store(self, space: bytes, prompt: Prompt, copied: int) -> None:
        contents = None if prompt.tokens[0] == 0 else prompt
        self.described_keys |= set(contents.keys) if contents else set()
        self.loop.store(space, prompt.keys, copied > 0, contents)

    def store_windows(self, prompt: Prompt, dropped: int) -> None:
        """Of the end of the prompt, in place of those of its beginning."""
        self.loop.store(OTHER, prompt.keys[-1:], group=1)
        self.loop.drop(OTHER, prompt.keys[:-1][:dropped], group=1)

    def store_tail(self, space: bytes, prompt: Prompt, first: int) -> None:
        self.loop.store_tail(space, prompt.single, first % len(prompt.hashes))

    def write(self, space: bytes, prompt: Prompt, group: int, tier: int) -> None:
        """To L2 what L1 has of the prompt."""
        group = group if space == OTHER else 0
        before = set(self.loop.in_l2(group))
        written = {
            (space, key) for key in self.loop.write(space, prompt.keys, group, tier) if key in self.described_keys
        }
        if not group and self.tiers[tier].state == "ready":
            self.written |= written - before

    def drop_in_l2(self, prompt: Prompt, tier: int) -> None:
        """Evicted, corrupt or dropped."""
        for space in SPACES:
            for group in (0, 1):
                for key in prompt.keys:
                    self.tiers[tier].drop(ObjectName(space, group, key))
                    if not group and (space, key) not in self.loop.in_l2(0):
                        self.written.discard((space, key))

    def change_state(self, tier: int) -> None:
        """It cannot be read, or can again: what is read again is described by what L1 has."""
        self.tiers[tier].state = "unavailable" if self.tiers[tier].state == "ready" else "ready"
        self.written.clear()

    def clear(self, base: bytes) -> None:
        self.loop.clear(base)
        self.written = {name for name in self.written if not name[0].startswith(base)}

    def turn(self, handled: bool) -> None:
        """Of the loop, with the events so far handled or still queued."""
        if handled:
            self.loop.handle_events()
        self.loop.resync.step()
        self.loop.l2_events.step()

    def change_weights(self, prefix: bytes) -> None:
        self.prefixes["a"] = prefix
        self.loop.reader("a", prefix)

    def restart(self, lost: int) -> None:
        self.end_daemon()
        self.lose_messages(lost)  # the last ones
        self.boot += 1_000_000
        self.start_daemon()

    def request(self, number: int, observed: int, arrives: bool) -> None:
        """The feed observes some events, and its first reply with events is lost; perhaps the next one arrives."""
        self.engines.observe_queued(observed)
        engine = self.engines.engines[number]
        wait_until(lambda: (reply := engine.ask()).events or not reply.more)
        if arrives:
            engine.step()

    def forget(self, number: int) -> None:
        """The engine lost its state, and begins anew: what is prepared waits for its next request."""
        self.engines.engines[number].follow = 0
        self.engines.engines[number].ask()

    def lose_messages(self, messages: int) -> None:
        self.subscribers.lose(self.subscribers.subscribers[1], messages)


ENGINE = st.integers(0, 1)
OPERATIONS: dict[str, tuple[int, tuple[st.SearchStrategy[Any], ...]]] = {  # how often, and with what
    "nothing": (1, ()),  # to which an operation shrinks
    "store": (16, (st.sampled_from(SPACES), PROMPTS, st.integers(0, 4))),
    "store_windows": (8, (PROMPTS, st.integers(0, 4))),
    "turn": (8, (st.booleans(),)),
    "request": (10, (ENGINE, st.integers(0, 4), st.booleans())),
    "lose_messages": (3, (st.integers(1, 5),)),
    "store_tail": (5, (st.sampled_from(SPACES[:2]), PROMPTS, st.integers(0, 7))),
    "write": (10, (st.sampled_from(SPACES), PROMPTS, st.integers(0, 1), st.integers(0, 1))),
    "drop_in_l2": (4, (PROMPTS, st.integers(0, 1))),
    "change_state": (2, (st.integers(0, 1),)),
    "clear": (1, (st.sampled_from([b"", PREFIX, OTHER]),)),
    "change_weights": (2, (st.sampled_from([PREFIX, OTHER]),)),
    "forget": (3, (ENGINE,)),
    "check": (1, ()),
    "restart": (1, (st.integers(0, 5),)),
}
WEIGHTED = st.sampled_from([name for name, (weight, _) in OPERATIONS.items() for _ in range(weight)])


@given(
    limit=st.sampled_from([3, 12, ENOUGH]),
    memory_bytes=st.sampled_from([2000, ENOUGH, ENOUGH]),
    most_queued=st.sampled_from([10, 1000]),
    operations=st.lists(
        WEIGHTED.flatmap(lambda name: st.tuples(st.just(name), *OPERATIONS[name][1])), min_size=50, max_size=100
    ),
)
@examples(25)
def test_every_consumer_ends_with_what_l1_and_l2_hold(
    limit: int, memory_bytes: int, most_queued: int, operations: list[tuple[Any, ...]]
) -> None:
    world = World(limit, memory_bytes, most_queued)
    try:
        for name, *arguments in operations:
            getattr(world, name)(*arguments)
        world.check()
    finally:
        world.close()


def test_a_consumer_of_a_repeated_event_fails() -> None:
    """The check that the subscribers rest on."""
    event = {"type": "BlockStored", "medium": "CPU", "group_idx": 0, "block_hashes": [1]}
    blocks = Blocks()
    blocks.apply_event(event)
    for consumer, kind in ((blocks, "BlockStored"), (Blocks(), "BlockRemoved")):
        with pytest.raises(AssertionError):
            consumer.apply_event({**event, "type": kind})
