"""Who leaves L1 first, against a list that is searched from end to end."""

from __future__ import annotations

import random

import pytest

from kvserver.eviction import POLICIES, EvictionPolicy
from kvserver.index import Chunk, Index


@pytest.fixture
def policy() -> EvictionPolicy:
    return POLICIES["lru"]()


class Shelf:
    """Chunks and the clock that stamps their uses."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.index = Index()
        self.tick = 0
        self.made = 0

    def chunk(self, used: bool = True) -> Chunk:
        self.made += 1
        chunk = self.index.add(self.index.find_or_make(b"n", 1), self.made.to_bytes(8, "big"))
        if used:
            self.use(chunk)
        self.policy.track(chunk)
        return chunk

    def use(self, chunk: Chunk) -> None:
        self.tick += 1
        chunk.last_used = self.tick


def test_the_least_recently_used_leaves_first(policy: EvictionPolicy) -> None:
    shelf = Shelf(policy)
    chunks = [shelf.chunk() for _ in range(4)]
    assert [policy.victim() for _ in range(5)] == [*chunks, None]


def test_a_use_moves_a_chunk_to_the_end_of_the_queue(policy: EvictionPolicy) -> None:
    shelf = Shelf(policy)
    first, second, third = (shelf.chunk() for _ in range(3))
    shelf.use(first)
    assert [policy.victim() for _ in range(3)] == [second, third, first]


def test_a_chunk_that_was_never_used_leaves_before_all_others(policy: EvictionPolicy) -> None:
    shelf = Shelf(policy)
    shelf.chunk()
    unused = shelf.chunk(used=False)
    assert policy.victim() is unused


def test_a_held_chunk_is_passed_over_until_it_is_tracked_again(policy: EvictionPolicy) -> None:
    shelf = Shelf(policy)
    leased, pinned, free = (shelf.chunk() for _ in range(3))
    leased.leases = pinned.pins = 1
    assert policy.victim() is free
    assert policy.victim() is None
    assert not leased.queued
    assert not pinned.queued
    leased.leases = pinned.pins = 0
    policy.track(pinned)
    policy.track(leased)
    assert [policy.victim(), policy.victim()] == [leased, pinned]


def test_a_detached_chunk_is_never_a_victim(policy: EvictionPolicy) -> None:
    shelf = Shelf(policy)
    removed, cleared = shelf.chunk(), shelf.chunk()
    shelf.index.remove(removed)
    shelf.index.clear(cleared.namespace.id)
    alive = shelf.chunk()
    assert [policy.victim(), policy.victim()] == [alive, None]


def test_reset_forgets_all(policy: EvictionPolicy) -> None:
    shelf = Shelf(policy)
    chunk = shelf.chunk()
    policy.reset()
    assert policy.victim() is None
    policy.track(chunk)  # and it may be tracked anew
    assert policy.victim() is chunk


@pytest.mark.parametrize("seed", range(20))
def test_random_traces_agree_with_a_search_of_everything(policy: EvictionPolicy, seed: int) -> None:
    rng = random.Random(seed)
    shelf = Shelf(policy)
    tracked: list[Chunk] = []  # in the order they were last handed to the policy: what breaks a tie
    loose: list[Chunk] = []  # held when their turn came
    for step in range(3000):
        chance = rng.random()
        if chance < 0.25:
            tracked.append(shelf.chunk(used=rng.random() < 0.9))
        elif chance < 0.6 and tracked:
            shelf.use(rng.choice(tracked))
        elif chance < 0.68 and tracked:
            chunk = rng.choice(tracked)
            if rng.random() < 0.5:
                chunk.pins += 1
            else:
                chunk.leases += 1
        elif chance < 0.8 and (held := [c for c in tracked + loose if c.pins or c.leases]):
            chunk = rng.choice(held)
            chunk.pins = chunk.leases = 0
            shelf.use(chunk)
            if not chunk.queued:
                loose.remove(chunk)
                policy.track(chunk)
                tracked.append(chunk)
        elif chance < 0.83 and tracked:
            chunk = rng.choice(tracked)
            tracked.remove(chunk)
            shelf.index.remove(chunk)
            policy.forget(chunk)
        elif tracked:
            free = [chunk for chunk in tracked if not chunk.pins and not chunk.leases]
            expected = min(free, key=lambda chunk: chunk.last_used, default=None)
            victim = policy.victim()
            assert victim is expected, f"seed {seed} step {step}"
            loose += [chunk for chunk in tracked if not chunk.queued and chunk is not victim]
            tracked = [chunk for chunk in tracked if chunk.queued]
            if victim is not None:
                shelf.index.remove(victim)


def test_forgotten_chunks_do_not_pile_up_in_the_policy(policy: EvictionPolicy) -> None:
    shelf = Shelf(policy)
    kept = shelf.chunk()
    for _ in range(20):
        for chunk in [shelf.chunk() for _ in range(1000)]:
            shelf.index.remove(chunk)
            policy.forget(chunk)
    assert len(policy) < 3000
    assert [policy.victim(), policy.victim()] == [kept, None]
