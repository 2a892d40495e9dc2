"""Which chunk is evicted first, against a list that is searched from end to end."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from support.properties import examples

from kvserver.cache import POLICIES, Cache, Chunk, Index, PagePool, one_group
from kvserver.cache.eviction import EvictionPolicy

NUMBERS = st.integers(0, 1000)


class Shelf(RuleBasedStateMachine):
    """Chunks are used, filled, leased, pinned and freed; two lists have those that may be evicted, the oldest first."""

    def __init__(self) -> None:
        super().__init__()
        self.policy: EvictionPolicy = POLICIES["lru"]()
        self.index = Index(self.policy.make_chunk)
        self.chunks: list[Chunk] = []
        self.incomplete: list[Chunk] = []
        self.used: list[Chunk] = []
        self.keys = itertools.count()

    def track(self, chunks: list[Chunk]) -> None:
        self.policy.track(chunks)
        for chunk in chunks:
            if not chunk.leases and not chunk.pins and (chunk.ready or not chunk.detached):
                self.forget(chunk)
                (self.used if chunk.ready else self.incomplete).append(chunk)

    def forget(self, chunk: Chunk) -> None:
        self.incomplete, self.used = (
            [each for each in order if each is not chunk] for order in (self.incomplete, self.used)
        )

    def untrack(self, chunk: Chunk) -> None:
        self.policy.untrack(chunk)
        self.forget(chunk)

    def chosen(self, number: int) -> Chunk:
        return self.chunks[number % len(self.chunks)]

    @rule(ready=st.sampled_from([True, True, False]))
    def store(self, ready: bool) -> None:
        chunk = self.index.add_chunk(
            self.index.find_or_make_namespace(b"n", one_group(1)), next(self.keys).to_bytes(32, "big")
        )
        chunk.ready = ready
        self.chunks.append(chunk)
        self.track([chunk])

    @precondition(lambda self: self.chunks)
    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=5))
    def use(self, numbers: list[int]) -> None:
        self.track([self.chosen(number) for number in numbers])

    @precondition(lambda self: self.chunks)
    @rule(number=NUMBERS)
    def fill(self, number: int) -> None:
        chunk = self.chosen(number)
        if not chunk.detached:
            chunk.ready = True
            self.track([chunk])

    @precondition(lambda self: self.chunks)
    @rule(number=NUMBERS, by=st.sampled_from(["leases", "pins"]))
    def keep_or_release(self, number: int, by: str) -> None:
        chunk = self.chosen(number)
        self.untrack(chunk)
        setattr(chunk, by, 1 - getattr(chunk, by))
        self.track([chunk])

    @precondition(lambda self: self.chunks)
    @rule(number=NUMBERS)
    def clear(self, number: int) -> None:
        """Leased or not; the end of its last lease uses it once more."""
        chunk = self.chosen(number)
        if not chunk.detached:
            self.index.detach_chunk(chunk)
            self.untrack(chunk)
            chunk.ready = False

    @rule()
    def evict(self) -> None:
        order = self.incomplete or self.used
        chunk = self.policy.pop_chunk()
        assert chunk is (order.pop(0) if order else None)

    @invariant()
    def what_is_tracked_may_be_evicted(self) -> None:
        for chunk in self.chunks:
            assert self.policy.tracks(chunk) == (chunk in self.incomplete or chunk in self.used)
        for order in (self.incomplete, self.used):
            for chunk, younger in itertools.zip_longest(order, order[1:]):
                assert self.policy.younger(chunk) is younger

    def teardown(self) -> None:
        while self.incomplete or self.used:
            self.evict()
        self.evict()


@pytest.mark.hypothesis
def test_the_least_recently_used_is_evicted_first_and_what_is_incomplete_before_it() -> None:
    run_state_machine_as_test(Shelf, settings=examples(100))


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

    def track(self, chunks: Iterable[Chunk], before: Chunk | None = None) -> None:
        for chunk in chunks:
            assert isinstance(chunk, self.Numbered)
            if chunk.leases or chunk.pins or (chunk.detached and not chunk.ready):
                continue
            if not hasattr(chunk, "number"):
                chunk.number = self._next = self._next + 1
            self._tracked[chunk.number] = chunk

    def pop_chunk(self) -> Chunk | None:
        return self._tracked.pop(max(self._tracked), None) if self._tracked else None

    def younger(self, chunk: Chunk) -> Chunk | None:
        return None

    def untrack(self, chunk: Chunk) -> None:
        self._tracked.pop(getattr(chunk, "number", 0), None)

    def tracks(self, chunk: Chunk) -> bool:
        return getattr(chunk, "number", 0) in self._tracked


def test_the_cache_evicts_by_any_policy_that_keeps_the_contract() -> None:
    cache = Cache(PagePool(3 * 4096, 4096), LastInFirstOut())
    for key in (b"a", b"b", b"c"):
        cache.finish_store(cache.plan_store(b"n", one_group(1), key.ljust(32), 4096), copied=True)
    assert cache.lookup(b"n", b"a".ljust(32), ("engine", "request"), 1.0).hit_chunks == 1
    cache.end_lease(("engine", "request"))  # a use, which changes nothing here
    plan = cache.plan_store(b"n", one_group(1), b"d".ljust(32), 4096)
    cache.finish_store(plan, copied=True)
    assert [key.strip() for _, key in plan.evicted] == [b"c"]
    cache.audit()
