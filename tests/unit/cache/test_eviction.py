"""The order of each eviction policy, against lists that are searched from end to end; and the cache under another policy."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from support.properties import examples

from kvserver.cache import POLICIES, Cache, Chunk, Index, PagePool, one_group
from kvserver.cache.eviction import EvictionPolicy
from kvserver.cache.eviction.slru import PROTECTED_SHARE

NUMBERS = st.integers(0, 1000)


class PlainLru:
    """The least recently used first; `orders[0]` has the incomplete ones."""

    def __init__(self) -> None:
        self.orders: list[list[Chunk]] = [[], [], []]

    def order_of(self, chunk: Chunk) -> list[Chunk] | None:
        return next((order for order in self.orders if chunk in order), None)

    def forget(self, chunk: Chunk) -> None:
        if (order := self.order_of(chunk)) is not None:
            order.remove(chunk)

    def track(self, chunks: list[Chunk], before: Chunk | None = None) -> None:
        for chunk in chunks:
            if chunk.leases or chunk.pins or (chunk.detached and not chunk.ready):
                continue
            self.forget(chunk)
            place = self.order_of(before) if before is not None and before.ready and chunk.ready else None
            if place is not None and before is not None:
                place.insert(place.index(before), chunk)
                self.placed(chunk, place)
            else:
                self.orders[self.number(chunk) if chunk.ready else 0].append(chunk)

    def placed(self, chunk: Chunk, place: list[Chunk]) -> None:
        """It was put before another one."""

    def number(self, chunk: Chunk) -> int:
        """Of the order that a READY chunk belongs to."""
        return 1

    def append(self, chunks: list[Chunk], protected: bool) -> None:
        for chunk in chunks:
            self.orders[self.number(chunk)].insert(0, chunk)

    def youngest_first(self) -> list[tuple[list[Chunk], bool]]:
        return [(self.orders[1][::-1], False)]

    def use(self, chunks: list[Chunk]) -> None:
        self.track(chunks)

    def pop_incomplete(self) -> Chunk | None:
        return self.orders[0].pop(0) if self.orders[0] else None

    def pop_chunk(self) -> Chunk | None:
        return next((order.pop(0) for order in self.orders[1:] if order), None)


class PlainSlru(PlainLru):
    """orders[1] is probation, orders[2] the protected segment."""

    def __init__(self) -> None:
        super().__init__()
        self.used: list[Chunk] = []

    def number(self, chunk: Chunk) -> int:
        return 2 if chunk in self.used else 1

    def placed(self, chunk: Chunk, place: list[Chunk]) -> None:
        self.used = [each for each in self.used if each is not chunk]
        if place is self.orders[2] or (place is self.orders[0] and place[place.index(chunk) + 1] in self.used):
            self.used.append(chunk)

    def append(self, chunks: list[Chunk], protected: bool) -> None:
        self.used += chunks if protected else []
        super().append(chunks, protected)

    def youngest_first(self) -> list[tuple[list[Chunk], bool]]:
        return [(self.orders[2][::-1], True), (self.orders[1][::-1], False)]

    def use(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            if chunk not in self.used:
                self.used.append(chunk)
                self.forget(chunk)
        self.track(chunks)

    def demote(self) -> None:
        _, probation, protected = self.orders
        for _ in range(2):
            if len(protected) - PROTECTED_SHARE * (len(probation) + len(protected)) >= 1:
                probation.append(protected.pop(0))
                self.used.remove(probation[-1])

    def pop_chunk(self) -> Chunk | None:
        self.demote()
        return super().pop_chunk()


class Shelf(RuleBasedStateMachine):
    """Chunks are used, filled, leased, pinned and freed; the plain order does the same with lists."""

    policy: EvictionPolicy
    plain: PlainLru

    def __init__(self) -> None:
        super().__init__()
        self.index = Index(self.policy.make_chunk)
        self.chunks: list[Chunk] = []
        self.keys = itertools.count()

    def track(self, chunks: list[Chunk], use: bool = False) -> None:
        if use:
            self.policy.use(chunks)
            self.plain.use(chunks)
        else:
            self.policy.track(chunks)
            self.plain.track(chunks)

    def untrack(self, chunk: Chunk) -> None:
        self.policy.untrack(chunk)
        self.plain.forget(chunk)

    def chosen(self, number: int) -> Chunk:
        return self.chunks[number % len(self.chunks)]

    @rule(ready=st.sampled_from([True, True, False]), use=st.booleans())
    def store(self, ready: bool, use: bool) -> None:
        """A new chunk, or one that is stored again soon after its eviction."""
        namespace = self.index.find_or_make_namespace(b"n", one_group(1))
        chunk = self.index.add_chunk(namespace, next(self.keys).to_bytes(32, "big"))
        chunk.ready = ready
        self.chunks.append(chunk)
        self.track([chunk], use)

    @rule(count=st.integers(1, 5), protected=st.booleans())
    def adopt(self, count: int, protected: bool) -> None:
        """New chunks that are older than all others."""
        namespace = self.index.find_or_make_namespace(b"n", one_group(1))
        chunks = [self.index.add_chunk(namespace, next(self.keys).to_bytes(32, "big")) for _ in range(count)]
        for chunk in chunks:
            chunk.ready = True
        self.chunks += chunks
        self.policy.append(chunks, protected)
        self.plain.append(chunks, protected)

    @precondition(lambda self: self.chunks)
    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=5), before=NUMBERS)
    def store_blocks_behind(self, numbers: list[int], before: int) -> None:
        """Single blocks leave before the chunk that they follow."""
        chunks, place = list(dict.fromkeys(map(self.chosen, numbers))), self.chosen(before)
        chunks = [chunk for chunk in chunks if chunk is not place]
        self.policy.track(chunks, place)
        self.plain.track(chunks, place)

    @precondition(lambda self: self.chunks)
    @rule(numbers=st.lists(NUMBERS, min_size=1, max_size=5), use=st.booleans())
    def look_at_or_use(self, numbers: list[int], use: bool) -> None:
        self.track(list(dict.fromkeys(map(self.chosen, numbers))), use)

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
        self.track([chunk], use=by == "leases")

    @precondition(lambda self: self.chunks)
    @rule(number=NUMBERS)
    def clear(self, number: int) -> None:
        """Leased or not; the end of its last lease uses it once more."""
        chunk = self.chosen(number)
        if not chunk.detached:
            self.index.detach_chunk(chunk)
            self.untrack(chunk)
            chunk.ready = False

    @rule(count=st.integers(1, 5))
    def evict(self, count: int) -> None:
        for _ in range(count):
            assert self.policy.pop_chunk() is self.plain.pop_chunk()

    @rule()
    def evict_incomplete(self) -> None:
        assert self.policy.pop_incomplete() is self.plain.pop_incomplete()

    @invariant()
    def what_is_tracked_may_be_evicted(self) -> None:
        for chunk in self.chunks:
            assert self.policy.tracks(chunk) == (self.plain.order_of(chunk) is not None)
        for order in self.plain.orders:
            for chunk, younger in itertools.zip_longest(order, order[1:]):
                assert self.policy.younger(chunk) is younger

    @invariant()
    def order_is_that_of_the_lists(self) -> None:
        assert self.policy.youngest_first() == self.plain.youngest_first()

    def teardown(self) -> None:
        while any(self.plain.orders):
            self.evict(1)
            self.evict_incomplete()
        self.evict(1)


@pytest.mark.hypothesis
@pytest.mark.parametrize(("name", "plain"), [("lru", PlainLru), ("slru", PlainSlru)])
def test_a_policy_evicts_in_the_order_of_its_plain_lists(name: str, plain: type[PlainLru]) -> None:
    class PolicyShelf(Shelf):
        def __init__(self) -> None:
            self.policy, self.plain = POLICIES[name](), plain()
            super().__init__()

    run_state_machine_as_test(PolicyShelf, settings=examples(100))


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

    def use(self, chunks: Iterable[Chunk]) -> None:
        self.track(chunks)

    def track(self, chunks: Iterable[Chunk], before: Chunk | None = None) -> None:
        for chunk in chunks:
            assert isinstance(chunk, self.Numbered)
            if chunk.leases or chunk.pins or (chunk.detached and not chunk.ready):
                continue
            if not hasattr(chunk, "number"):
                chunk.number = self._next = self._next + 1
            self._tracked[chunk.number] = chunk

    def pop_incomplete(self) -> Chunk | None:
        return None

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
