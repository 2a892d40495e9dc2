"""Which chunk is evicted first, against a list that is searched from end to end."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from kvserver.cache import POLICIES, Cache, Chunk, Index, PagePool
from kvserver.cache.eviction import EvictionPolicy


@pytest.fixture
def policy() -> EvictionPolicy:
    return POLICIES["lru"]()


class Shelf:
    """Chunks, and the order in which the policy names them."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.index = Index(policy.make_chunk)
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
        while (chunk := self.policy.pop_chunk()) is not None:
            assert not self.policy.tracks(chunk)
            found.append(chunk)
        return found


def test_the_least_recently_used_leaves_first(policy: EvictionPolicy) -> None:
    shelf = Shelf(policy)
    chunks = shelf.chunks(4)
    assert all(map(policy.tracks, chunks))
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
    assert not policy.tracks(leased)
    assert not policy.tracks(pinned)
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
            assert not policy.tracks(chunk)
        elif used or incomplete:
            expected = (incomplete or used).pop(0)
            assert policy.pop_chunk() is expected, f"seed {seed} step {step}"
    assert shelf.order() == incomplete + used


class LastInFirstOut:
    """Another policy, with other state: the number of each chunk's first store."""

    name = "lifo"

    class Numbered(Chunk):
        __slots__ = ("number",)
        number: int

    make_chunk = Numbered

    def __init__(self) -> None:
        self._tracked: dict[int, Chunk] = {}
        self._next = 0

    def track(self, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            assert isinstance(chunk, self.Numbered)
            if chunk.leases or chunk.pins or (chunk.detached and not chunk.ready):
                continue
            if not hasattr(chunk, "number"):
                chunk.number = self._next = self._next + 1
            self._tracked[chunk.number] = chunk

    def pop_chunk(self) -> Chunk | None:
        return self._tracked.pop(max(self._tracked), None) if self._tracked else None

    def untrack(self, chunk: Chunk) -> None:
        self._tracked.pop(getattr(chunk, "number", 0), None)

    def tracks(self, chunk: Chunk) -> bool:
        return getattr(chunk, "number", 0) in self._tracked


def test_the_cache_evicts_by_any_policy_that_keeps_the_contract() -> None:
    cache = Cache(PagePool(3 * 4096, 4096), LastInFirstOut())
    for key in (b"a", b"b", b"c"):
        cache.finish_store(cache.plan_store(b"n", 1, 0, key.ljust(32), 4096), copied=True)
    assert cache.lookup(b"n", b"a".ljust(32), ("engine", "request"), 1.0).hit_chunks == 1
    cache.end_lease(("engine", "request"))  # a use, which changes nothing here
    plan = cache.plan_store(b"n", 1, 0, b"d".ljust(32), 4096)
    cache.finish_store(plan, copied=True)
    assert [key.strip() for _, key in plan.evicted] == [b"c"]
    cache.audit()
