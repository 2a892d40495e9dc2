"""What L2Events publishes is what the tiers hold together, however changes, resyncs and losses of events meet."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.daemon import wait_until
from support.listed_tier import ListedTier
from support.properties import Dice, examples, walks

from kvserver.events import (
    Bus,
    Event,
    L2Cleared,
    L2Removed,
    L2Resynced,
    L2Stored,
    ResyncPart,
    Subscriber,
)
from kvserver.l2 import ObjectName
from kvserver.protocol import KEY_BYTES
from kvserver.tiering.events import L2Events
from kvserver.tiering.tiered import TieredStorage

SPACES = (b"n" * 32, b"n" * 64, b"o" * 32)
ACTIONS = ("put", "drop", "step", "flush", "clear", "lose", "state")
NAMES = [ObjectName(space, group, bytes([number]) * 32) for space in SPACES for group in (0, 1) for number in range(4)]


class Counting(Subscriber):
    """Counts as the index of matches does: what is stored twice has to be removed twice."""

    name = "counting"

    def __init__(self) -> None:
        self.counts: Counter[ObjectName] = Counter()

    def handle(self, event: Event) -> None:
        match event:
            case L2Stored():
                self.counts.update(self._names(event))
            case L2Removed():
                self.counts -= Counter(self._names(event))
            case L2Cleared():
                self.counts = Counter(
                    {n: c for n, c in self.counts.items() if not n.namespace.startswith(event.namespace)}
                )
            case L2Resynced(part=ResyncPart.BEGIN):
                self.counts.clear()
            case L2Resynced():
                self.counts.update(self._names(event))

    def _names(self, event: L2Stored | L2Removed | L2Resynced) -> list[ObjectName]:
        keys = [event.keys[at : at + KEY_BYTES] for at in range(0, len(event.keys), KEY_BYTES)]
        return [ObjectName(event.namespace, event.group, key) for key in keys]


class World:
    def __init__(self, tiers: int, limit: int) -> None:
        self.counting = Counting()
        self.bus = Bus([self.counting], limit)
        self.tiers = [ListedTier() for _ in range(tiers)]
        self.events = L2Events(self.tiers, self.bus)  # type: ignore[arg-type]
        self.bus.start()

    @property
    def readable(self) -> set[ObjectName]:
        return {name for tier in self.tiers for name in tier.readable}

    def act(self, dice: Dice, resyncs: bool) -> None:
        tier, name = dice.choice(self.tiers), dice.choice(NAMES)
        match dice.choices(ACTIONS, (8, 6, 12, 4, 1, 2 * resyncs, resyncs))[0]:
            case "put":
                tier.put(name)
            case "drop":
                tier.drop(name)
            case "step":
                self.events.step()
            case "flush":
                self.bus.flush()
            case "lose":
                self.bus.needs_resync.add(L2Resynced)
            case "state":
                tier.state = "unavailable" if tier.state == "ready" else "ready"
            case "clear":
                self.events.clear(name.namespace)
                for each in self.tiers:
                    each.clear(name.namespace)

    def check(self) -> None:
        def is_idle() -> bool:
            return self.bus.flush() and not self.events.step() and self.bus.flush() and not self.bus.needs_resync

        def caught_up() -> bool:
            return is_idle() and is_idle()  # the first step may have found no room for a slice

        wait_until(caught_up)
        assert self.counting.counts == dict.fromkeys(self.readable, 1)
        for space in SPACES:
            keys = b"".join(dict.fromkeys(name.key for name in NAMES))
            present = self.events.present(space, 2, keys)
            held = [{name.key for name in self.readable if name[:2] == (space, group)} for group in (0, 1)]
            expected = tuple(
                b"".join([keys[at : at + 32] for at in range(0, len(keys), 32) if keys[at : at + 32] in of])
                for of in held
            )
            assert present == (expected if any(tier.state == "ready" for tier in self.tiers) else ())


@given(st.integers(1, 3), st.sampled_from([2, 8, 1 << 20]), st.booleans(), walks(120))
@examples(30)
def test_consumers_end_with_what_the_tiers_hold_together(
    tiers: int, limit: int, resyncs: bool, walk: list[Dice]
) -> None:
    world = World(tiers, limit)
    try:
        for number, dice in enumerate(walk):
            world.act(dice, resyncs)
            if number % 50 == 49:
                world.check()
        world.check()
        assert world.bus.errors == {}
    finally:
        world.bus.close()


def test_without_tiers_nothing_is_published() -> None:
    world = World(0, 100)
    assert not world.events.step()
    world.events.clear(b"")
    assert world.events.present(SPACES[0], 1, NAMES[0].key) == ()
    assert world.bus.status().published == 0
    world.bus.close()


def test_changes_of_one_turn_are_one_event() -> None:
    world = World(1, 1000)
    world.check()
    before = world.bus.status().published_types["L2Stored"]
    for name in NAMES[:4]:
        world.tiers[0].put(name)
    world.check()
    assert world.bus.status().published_types["L2Stored"] == before + 1
    world.bus.close()


def test_what_a_put_stored_is_published_before_a_message_can_evict_it_from_l1() -> None:
    """The turn that ends the put goes on with messages, whose stores publish evictions at once; L1's description would be lost."""
    bus, tier = Bus([Counting()], 100), ListedTier()
    events = L2Events([tier], bus)  # type: ignore[list-item]
    events.step()
    storage: Any = SimpleNamespace(tiers=SimpleNamespace(complete=lambda: tier.put(NAMES[0])), _events=events)
    TieredStorage.complete(storage)
    assert bus.published["L2Stored"] == 1
