"""Chunk lifetimes in L1: each number by hand, with times that the test sets."""

from __future__ import annotations

import random

import pytest

from kvserver.events import (
    ChunksEvicted,
    ChunksLoaded,
    ChunksStored,
    InstanceDisconnected,
    InstanceRegistered,
    L1Cleared,
)
from kvserver.protocol import DEPARTED_SECONDS, MOST_DEPARTED, Buckets
from kvserver.protocol.measurements import MOST_MODELS
from kvserver.protocol.measurements import OTHER as OTHERS
from kvserver.telemetry import ChunkLifecycle
from kvserver.telemetry.chunk_lifecycle import L1_SECONDS

SECOND = 1_000_000_000
RESIDENCY = "kvserver_l1_chunk_residency_seconds"
IDLE = "kvserver_l1_chunk_idle_before_evict_seconds"
GAP = "kvserver_l1_chunk_reuse_gap_seconds"
AGE = "kvserver_l1_hit_age_seconds"
NS, OTHER = b"n" * 32, b"o" * 32


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def keys(*numbers: int) -> bytes:
    return b"".join(map(key, numbers))


class World:
    """One tracker and a clock in seconds."""

    def __init__(self, rate: float = 1.0) -> None:
        self.now = 1000.0
        self.tracker = ChunkLifecycle(rate, clock=lambda: self.ns)
        self.registered("i")

    @property
    def ns(self) -> int:
        return int(self.now * SECOND)

    def registered(self, instance: str, model: str = "m") -> None:
        self.tracker.handle(InstanceRegistered(self.ns, instance, model, "x", 100))

    def disconnected(self, instance: str, model: str = "m") -> None:
        self.tracker.handle(InstanceDisconnected(self.ns, instance, model, True))

    def stored(self, *numbers: int, instance: str = "i", namespace: bytes = NS, model: str = "m") -> None:
        self.tracker.handle(ChunksStored(self.ns, instance, model, namespace, keys(*numbers)))

    def loaded(self, *numbers: int, instance: str = "i", namespace: bytes = NS) -> None:
        self.tracker.handle(ChunksLoaded(self.ns, instance, "m", namespace, keys(*numbers)))

    def evicted(self, *numbers: int, namespace: bytes = NS) -> None:
        self.tracker.handle(ChunksEvicted(self.ns, namespace, keys(*numbers)))

    def histogram(self, name: str) -> dict[str, tuple[int, float]]:
        """{instance: (count, sum)} of one histogram."""
        found = {}
        for family in self.tracker.families():
            for (instance, model), buckets in family.points:
                assert model == "m"
                assert isinstance(buckets, Buckets)
                if family.name == name:
                    found[instance] = (sum(buckets.counts), pytest.approx(buckets.sum))
        return found


def test_families_exist_before_anything_happened() -> None:
    families = ChunkLifecycle(1.0).families()
    assert [family.name for family in families] == [RESIDENCY, IDLE, GAP, AGE]
    assert all(family.bounds == L1_SECONDS and not family.points for family in families)


def test_residency_is_from_ready_to_eviction_and_idle_from_the_last_load() -> None:
    world = World()
    world.stored(1)
    world.now += 5
    world.loaded(1)
    world.now += 2
    world.evicted(1)
    assert world.histogram(RESIDENCY) == {"i": (1, 7.0)}
    assert world.histogram(IDLE) == {"i": (1, 2.0)}


def test_a_chunk_that_was_never_loaded_was_idle_all_its_lifetime() -> None:
    world = World()
    world.stored(1)
    world.now += 3
    world.evicted(1)
    assert world.histogram(IDLE) == world.histogram(RESIDENCY) == {"i": (1, 3.0)}
    assert world.histogram(GAP) == {}


def test_each_gap_is_observed_when_it_happens_the_first_from_ready() -> None:
    world = World()
    world.stored(1)
    for pause in (1, 10, 100):
        world.now += pause
        world.loaded(1)
    assert world.histogram(GAP) == {"i": (3, 111.0)}
    assert world.histogram(AGE) == {"i": (3, 1 + 11 + 111.0)}


def test_a_lifetime_counts_for_the_instance_that_stored_and_a_use_for_the_one_that_loaded() -> None:
    world = World()
    world.registered("j")
    world.stored(1)
    world.now += 4
    world.loaded(1, instance="j")
    world.now += 4
    world.evicted(1)
    assert world.histogram(GAP) == {"j": (1, 4.0)}
    assert world.histogram(RESIDENCY) == {"i": (1, 8.0)}


def test_a_clear_ends_lifetimes_without_evictions() -> None:
    world = World()
    world.stored(1, 2)
    world.stored(3, namespace=OTHER)
    world.tracker.handle(L1Cleared(world.ns, NS[:16]))
    assert world.tracker.tracked == 1
    world.evicted(1, 2)
    assert world.histogram(RESIDENCY) == {}
    world.tracker.handle(L1Cleared(world.ns, b""))
    assert world.tracker.tracked == 0


def test_a_chunk_stored_again_has_a_fresh_lifetime() -> None:
    world = World()
    world.stored(1)
    world.now += 50
    world.evicted(1)
    world.stored(1)
    world.now += 1
    world.loaded(1)
    assert world.histogram(GAP) == {"i": (1, 1.0)}


def test_namespaces_do_not_mix() -> None:
    world = World()
    world.stored(1)
    world.now += 1
    world.stored(1, namespace=OTHER)
    world.now += 1
    world.evicted(1)
    assert world.histogram(RESIDENCY) == {"i": (1, 2.0)}
    assert world.tracker.tracked == 1


def test_series_end_five_minutes_after_the_instance_and_later_lifetimes_have_no_instance() -> None:
    world = World()
    world.stored(1, 2)
    world.evicted(1)
    world.disconnected("i")
    world.now += DEPARTED_SECONDS - 1
    assert set(world.histogram(RESIDENCY)) == {"i"}
    world.now += 2
    assert world.histogram(RESIDENCY) == {}
    world.evicted(2)
    assert set(world.histogram(RESIDENCY)) == {""}


def test_an_instance_that_comes_back_in_time_goes_on_counting() -> None:
    world = World()
    world.stored(1)
    world.evicted(1)
    world.disconnected("i")
    world.now += DEPARTED_SECONDS - 1
    world.registered("i")
    world.now += DEPARTED_SECONDS
    assert world.histogram(RESIDENCY)["i"][0] == 1


def test_a_sample_is_of_lifetimes_and_of_the_right_size() -> None:
    world, rate, chunks = World(0.1), 0.1, 20_000
    order = random.Random(1).sample(range(chunks), chunks)
    for number in order:
        world.stored(number)
    sampled = world.tracker.tracked
    deviation = (chunks * rate * (1 - rate)) ** 0.5
    assert abs(sampled - chunks * rate) < 6 * deviation
    world.now += 1
    world.evicted(*order)
    assert world.histogram(RESIDENCY) == {"i": (sampled, float(sampled))}
    assert world.tracker.tracked == 0


def test_clients_cannot_choose_which_chunks_are_sampled() -> None:
    """The hash is keyed: the same keys at the same times give another sample to another tracker."""
    picks = []
    for _ in range(2):
        world = World(0.5)
        picked = []
        for number in range(200):
            before = world.tracker.tracked
            world.stored(number)
            picked.append(world.tracker.tracked > before)
        picks.append(picked)
    assert picks[0] != picks[1]


def series(world: World, name: str) -> list[tuple[str, ...]]:
    (family,) = (family for family in world.tracker.families() if family.name == name)
    return [labels for labels, _ in family.points]


def test_any_number_of_instances_has_series_within_bounds() -> None:
    world = World()
    for number in range(2 * MOST_MODELS):
        world.now += 0.001
        world.registered(f"i{number}", f"m{number}")
        world.stored(number, instance=f"i{number}", model=f"m{number}")
        world.disconnected(f"i{number}", f"m{number}")
    world.evicted(*range(2 * MOST_MODELS))
    shown = series(world, RESIDENCY)
    assert sum(instance != "" for instance, _ in shown) == MOST_DEPARTED
    assert sum(instance == "" for instance, _ in shown) == MOST_MODELS + 1
    assert ("", OTHERS) in shown
    assert (f"i{2 * MOST_MODELS - 1}", f"m{2 * MOST_MODELS - 1}") in shown, "the newest are shown"
