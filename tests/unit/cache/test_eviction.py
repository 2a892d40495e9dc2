"""Which chunk is evicted first, against a list that is searched from end to end."""

from __future__ import annotations

import random

import pytest

from kvserver.cache import POLICIES, Chunk, Index
from kvserver.cache.eviction import EvictionPolicy


@pytest.fixture
def policy() -> EvictionPolicy:
    return POLICIES["lru"]()


class Shelf:
    """Chunks, and the order in which the policy names them."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.index = Index()
        self.made = 0

    def chunk(self, ready: bool = True) -> Chunk:
        self.made += 1
        chunk = self.index.add_chunk(self.index.find_or_make_namespace(b"n", 1), self.made.to_bytes(8, "big"))
        chunk.ready = ready
        self.policy.track([chunk])
        return chunk

    def chunks(self, count: int) -> list[Chunk]:
        return [self.chunk() for _ in range(count)]

    def order(self) -> list[Chunk]:
        """All, the oldest first; the policy has none of them afterwards."""
        found = []
        while (chunk := self.policy.oldest_chunk()) is not None:
            self.policy.untrack(chunk)
            found.append(chunk)
        return found


def test_the_least_recently_used_leaves_first(policy: EvictionPolicy) -> None:
    shelf = Shelf(policy)
    chunks = shelf.chunks(4)
    assert policy.oldest_chunk() is chunks[0]
    assert shelf.order() == chunks


def test_a_use_moves_a_chunk_to_the_end_of_the_queue(policy: EvictionPolicy) -> None:
    shelf = Shelf(policy)
    first, second, third = shelf.chunks(3)
    policy.track([first])
    policy.track([first])  # the first is the youngest already
    assert shelf.order() == [second, third, first]


def test_chunks_that_are_used_together_age_in_the_order_given(policy: EvictionPolicy) -> None:
    shelf = Shelf(policy)
    first, second, third, fourth = shelf.chunks(4)
    policy.track([third, first, second])
    assert shelf.order() == [fourth, third, first, second]


def test_a_chunk_that_is_not_ready_leaves_before_all_others(policy: EvictionPolicy) -> None:
    shelf = Shelf(policy)
    ready, early, late = shelf.chunk(), shelf.chunk(ready=False), shelf.chunk(ready=False)
    assert shelf.order() == [early, late, ready]


def test_one_that_became_ready_leaves_with_the_others(policy: EvictionPolicy) -> None:
    shelf = Shelf(policy)
    became, ready = shelf.chunk(ready=False), shelf.chunk()
    became.ready = True
    policy.track([became])
    assert shelf.order() == [ready, became]


def test_leased_and_pinned_chunks_are_left_out_and_tracked_later(policy: EvictionPolicy) -> None:
    shelf = Shelf(policy)
    leased, pinned, free = shelf.chunks(3)
    for chunk in (leased, pinned):
        policy.untrack(chunk)
    leased.leases = pinned.pins = 1
    policy.track([leased, pinned])
    assert not leased.tracked
    assert not pinned.tracked
    leased.leases = pinned.pins = 0
    policy.track([pinned, leased])
    assert shelf.order() == [free, pinned, leased]


def test_what_was_freed_is_never_tracked_again(policy: EvictionPolicy) -> None:
    shelf = Shelf(policy)
    removed, alive = shelf.chunks(2)
    shelf.index.detach_chunk(removed)
    policy.untrack(removed)
    removed.ready = False
    policy.track([removed])  # as the end of its last lease does
    assert shelf.order() == [alive]


@pytest.mark.parametrize("seed", range(20))
def test_random_traces_agree_with_a_list(policy: EvictionPolicy, seed: int) -> None:
    rng = random.Random(seed)
    shelf = Shelf(policy)
    used: list[Chunk] = []
    incomplete: list[Chunk] = []
    for step in range(3000):
        chance = rng.random()
        if chance < 0.25:
            chunk = shelf.chunk(ready=rng.random() < 0.9)
            (used if chunk.ready else incomplete).append(chunk)
        elif chance < 0.6 and used:
            together = rng.sample(used, min(len(used), rng.randint(1, 5)))
            policy.track(together)
            used = [chunk for chunk in used if chunk not in together] + together
        elif chance < 0.65 and incomplete:
            chunk = incomplete.pop(rng.randrange(len(incomplete)))
            chunk.ready = True
            policy.track([chunk])
            used.append(chunk)
        elif chance < 0.75 and used:
            chunk = used.pop(rng.randrange(len(used)))
            policy.untrack(chunk)
            assert not chunk.tracked
        elif used or incomplete:
            expected = (incomplete or used).pop(0)
            assert policy.oldest_chunk() is expected, f"seed {seed} step {step}"
            policy.untrack(expected)
    assert shelf.order() == incomplete + used
