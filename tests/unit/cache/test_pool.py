"""The pages of L1."""

from __future__ import annotations

import tracemalloc
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.properties import examples
from support.slots import pages_of

from kvserver.cache import PagePool, page_bytes_for
from kvserver.cache.pages import MAX_PAGES, extents, granularity

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30


def test_fresh_pages_come_in_address_order() -> None:
    pool = PagePool(16 * 4096, 4096)
    assert pages_of(pool.allocate_pages(3) or b"") == [0, 1, 2]
    assert pages_of(pool.allocate_pages(2) or b"") == [3, 4]


def test_the_rest_of_l1_that_is_no_whole_page_is_left_out() -> None:
    pool = PagePool(4096 * 3 + 4095, 4096)
    assert pool.pages == pool.unused_pages == 3


@pytest.mark.parametrize("l1_bytes", [0, 1, 4095])
def test_an_l1_without_a_page_has_no_slot(l1_bytes: int) -> None:
    assert PagePool(l1_bytes, 4096).allocate_pages(1) is None


@pytest.mark.parametrize(("slot_bytes", "pages"), [(1, 1), (4096, 1), (4097, 2), (10 * 4096, 10), (10 * 4096 + 1, 11)])
def test_a_slot_is_rounded_up_to_pages(slot_bytes: int, pages: int) -> None:
    assert PagePool(MiB, 4096).pages_for(slot_bytes) == pages


@pytest.mark.parametrize("pages", [1, 31, 32, 63, 64, 65, 100, 127, 128, 129, 1000, 8191, 8192, 8193, 1 << 20])
def test_a_large_slot_is_rounded_up_to_its_granularity_and_by_less_than_a_thirty_second(pages: int) -> None:
    taken = PagePool(MiB, 4096).pages_for(pages * 4096)
    assert taken % granularity(pages) == 0
    assert 0 <= (taken - pages) * 32 < max(pages, 32)


@given(choices=st.lists(st.integers(0, 1000), max_size=200))
@examples(50)
def test_slots_of_one_size_are_one_extent_each_whatever_was_freed(choices: list[int]) -> None:
    pool = PagePool(1007 * 4096, 4096)
    slots = [pool.allocate_pages(48) or b"" for _ in range(20)]
    for choice in choices:
        if slots and choice % 2:
            pool.free_pages(slots.pop(choice % len(slots)))
        elif (slot := pool.allocate_pages(48)) is not None:
            assert len(list(extents(slot))) == 1
            slots.append(slot)


def test_a_slot_of_several_extents_uses_the_largest_there_are() -> None:
    pool = PagePool(100 * 4096, 4096)
    slots = [pool.allocate_pages(count) or b"" for count in (5, 1, 20, 1, 10, 63)]
    for free in (0, 2, 4):
        pool.free_pages(slots[free])
    assert [count for _, count in extents(pool.allocate_pages(32) or b"")] == [20, 10, 2]


def test_a_large_slot_has_no_extent_smaller_than_its_granularity_while_larger_ones_are_free() -> None:
    pool = PagePool(4096 * 4096, 4096)
    kept = []
    while pool.unused_pages:  # free extents of 63 and of 1 pages, one page between each two
        for count in (63, 1, 1, 1):
            slot = pool.allocate_pages(min(count, pool.unused_pages)) if pool.unused_pages else None
            kept.append((count, slot or b""))
    for number, (_, slot) in enumerate(kept):
        if number % 2 == 0:
            pool.free_pages(slot)
    assert granularity(512) == 16
    assert all(count % 16 == 0 for _, count in extents(pool.allocate_pages(512) or b""))


def test_freeing_a_slot_twice_is_noticed() -> None:
    pool = PagePool(8 * 4096, 4096)
    slot = pool.allocate_pages(4)
    assert slot is not None
    again = slot[:]
    pool.free_pages(slot)
    with pytest.raises(AssertionError):
        pool.free_pages(again)


def test_the_pool_of_a_very_large_l1_uses_no_memory_before_its_first_slot() -> None:
    tracemalloc.start()
    try:
        pool = PagePool(512 * GiB, page_bytes_for(512 * GiB))
        assert pool.pages == 512 * GiB // 4096
        assert tracemalloc.get_traced_memory()[1] < 64 * KiB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("l1_bytes", [3 * 4096, MiB, 64 * MiB, 256 * MiB, GiB, 3 * GiB, 20 * GiB, 4096 * GiB, 1 << 50])
def test_page_sizes_are_powers_of_two_and_every_page_has_a_number(l1_bytes: int) -> None:
    page = page_bytes_for(l1_bytes)
    assert page & (page - 1) == 0
    pool = PagePool(l1_bytes, page)
    assert pool.pages == l1_bytes // page <= MAX_PAGES
    slots = [pool.allocate_pages(count) or b"" for count in (1, pool.pages - 2, 1)]
    assert list(extents(b"".join(slots))) == [(0, 1), (1, pool.pages - 2), (pool.pages - 1, 1)]


def test_a_larger_l1_never_gets_smaller_pages() -> None:
    sizes = [page_bytes_for(1 << shift) for shift in range(20, 60)]
    assert sizes == sorted(sizes)


# ---- what is pinned, and what is not yet --------------------------------------------------------


def test_a_slot_is_gathered_from_pinned_pages_before_an_unpinned_one_is_used() -> None:
    pool = PagePool(100 * 4096, 4096)
    slots = [pool.allocate_pages(10) or b"" for _ in range(5)]
    pool.mark_pinned(50)
    pool.free_pages(slots[0])
    pool.free_pages(slots[2])
    assert list(extents(pool.allocate_pages(15) or b"")) == [(20, 10), (0, 5)]
    assert list(extents(pool.allocate_pages(15) or b"")) == [(50, 15)], "only 5 pinned pages are free"
    assert list(extents(pool.allocate_pages(5) or b"")) == [(5, 5)]


def test_a_new_slot_spans_both_parts_only_if_neither_holds_it() -> None:
    pool = PagePool(40 * 4096, 4096)
    pool.mark_pinned(20)
    assert list(extents(pool.allocate_pages(40) or b"")) == [(0, 20), (20, 20)]


def test_a_large_slot_has_no_small_pinned_extent_while_large_unpinned_ones_are_free() -> None:
    pool = PagePool(2000 * 4096, 4096)
    slots = [pool.allocate_pages(1) or b"" for _ in range(10)]  # a pinned shred at every other page
    pool.mark_pinned(10)
    for slot in slots[::2]:
        pool.free_pages(slot)
    kept = pool.allocate_pages(1000)  # one of 990 pages is left, and the shreds
    assert list(extents(kept or b"")) == [(10, 1000)]
    assert granularity(992) == 16
    taken = [count for _, count in extents(pool.allocate_pages(992) or b"")]
    assert taken[0] == 976
    assert sum(taken) == 992


def test_pinning_never_goes_back_or_past_the_end() -> None:
    pool = PagePool(100 * 4096, 4096)
    pool.mark_pinned(50)
    for pages in (49, 101):
        with pytest.raises(AssertionError, match="first on"):
            pool.mark_pinned(pages)
    assert pool.pinned_pages == 50


def test_a_slot_that_pinning_reached_into_is_freed_once() -> None:
    pool = PagePool(100 * 4096, 4096)
    slot = pool.allocate_pages(20) or b""
    pool.mark_pinned(10)
    pool.free_pages(slot)
    with pytest.raises(AssertionError, match="twice"):
        pool.free_pages(slot)


def test_withheld_pages_are_neither_free_nor_used() -> None:
    pool = PagePool(20 * 4096, 4096, withheld=True)
    assert (pool.unused_pages, pool.used_pages, pool.withheld_pages) == (0, 0, 20)
    assert pool.allocate_pages(1) is None


def test_withheld_pages_are_allocated_once_they_are_released_and_freed_once_they_are_used() -> None:
    pool = PagePool(20 * 4096, 4096, withheld=True)
    pool.release_pages(4, 16)
    assert pages_of(pool.allocate_pages(16) or b"") == list(range(4, 20))
    adopted = array("I", [0, 1, 2, 2]).tobytes()
    assert pool.use_withheld(adopted) == 3
    assert (pool.unused_pages, pool.used_pages, pool.withheld_pages) == (0, 19, 1)
    pool.free_pages(adopted)
    assert pages_of(pool.allocate_pages(3) or b"") == [2, 3, 0]


class Model:
    """The same by its definition: a set of free pages, looked through from end to end."""

    def __init__(self, pages: int) -> None:
        self.free = set(range(pages))
        self.pages = pages
        self.pinned = 0

    def runs(self, pinned: bool) -> list[int]:
        """The sizes of the free extents of one part."""
        part = range(self.pinned) if pinned else range(self.pinned, self.pages)
        sizes, size = [], 0
        for page in part:
            size = size + 1 if page in self.free else 0
            if size == 1:
                sizes.append(0)
            if size:
                sizes[-1] = size
        return sizes

    def check_allocation(self, count: int, slot: bytes | None) -> None:
        """Check that `slot` may be allocated now, then allocate it in the model."""
        near, far = self.runs(pinned=True), self.runs(pinned=False)
        if slot is None:
            assert sum(near) + sum(far) < count
            return
        pages = pages_of(slot)
        assert len(pages) == len(set(pages)) == count
        assert self.free.issuperset(pages)
        if granularity(count) == 1:
            self.check_place(count, slot, near, far)
        self.free.difference_update(pages)

    def check_place(self, count: int, slot: bytes, near: list[int], far: list[int]) -> None:
        """Check that it is the best fit of the pinned extents `near`, else of the others, `far`."""
        pages = pages_of(slot)
        whole = len(list(extents(slot))) == 1
        if sum(near) >= count:
            assert max(pages) < self.pinned
            assert whole == (max(near) >= count)
        elif max(far, default=0) >= count:
            assert min(pages) >= self.pinned
            assert whole
        else:
            assert sum(page < self.pinned for page in pages) > 0 or not near
        if whole:
            part = near if pages[0] < self.pinned else far
            assert self.extent_of(pages[0]) == min(size for size in part if size >= count), "not the best fit"

    def extent_of(self, page: int) -> int:
        """Pages of the free extent that begins with `page`."""
        limit = self.pinned if page < self.pinned else self.pages
        assert page in (0, self.pinned) or page - 1 not in self.free
        return next((last for last in range(page, limit) if last not in self.free), limit) - page


class Slots(RuleBasedStateMachine):
    """Slots are allocated and freed, and pages pinned, at any moment. The twins: nothing of one is pinned, all of the other."""

    @initialize(pages=st.sampled_from([20, 60, 300, 1000]))
    def start(self, pages: int) -> None:
        self.pool, *self.twins = (PagePool(pages * 4096, 4096) for _ in range(3))
        self.twins[1].mark_pinned(pages)
        self.model = Model(pages)
        self.slots: list[tuple[bytes, bytes]] = []

    @rule(count=st.integers(1, 50) | st.sampled_from([100, 300]))
    def allocate(self, count: int) -> None:
        slot, *twins = (pool.allocate_pages(count) for pool in (self.pool, *self.twins))
        self.model.check_allocation(count, slot)
        assert twins[0] == twins[1]
        assert (slot is None) == (twins[0] is None)
        if slot is not None and twins[0] is not None:
            self.slots.append((slot, twins[0]))

    @precondition(lambda self: self.slots)
    @rule(chosen=st.lists(st.integers(0, 1000), min_size=1, max_size=3))
    def free(self, chosen: list[int]) -> None:
        freed = [self.slots.pop(number % len(self.slots)) for number in chosen[: len(self.slots)]]
        slots, twins = (b"".join(each) for each in zip(*freed, strict=True))
        self.pool.free_pages(slots)
        for twin in self.twins:
            twin.free_pages(twins)
        self.model.free.update(pages_of(slots))

    @rule(more=st.integers(0, 100))
    def pin(self, more: int) -> None:
        self.model.pinned = min(self.model.pages, self.model.pinned + more * self.model.pages // 500)
        self.pool.mark_pinned(self.model.pinned)

    @invariant()
    def counts_agree(self) -> None:
        assert self.pool.unused_pages == self.twins[0].unused_pages == len(self.model.free)
        assert self.pool.unused_pages + self.pool.used_pages == self.pool.pages == self.model.pages

    def teardown(self) -> None:
        while self.slots:
            self.free([0])
        self.pool.mark_pinned(self.pool.pages)
        assert list(extents(self.pool.allocate_pages(self.pool.pages) or b"")) == [(0, self.pool.pages)], "some is lost"


@pytest.mark.hypothesis
def test_slots_agree_with_the_plain_model_whatever_is_allocated_freed_and_pinned() -> None:
    run_state_machine_as_test(Slots, settings=examples(60, steps=100))


def test_pinning_a_large_l1_piece_by_piece_leaves_one_extent() -> None:
    pool = PagePool(20 * GiB, 4096)
    slots = [pool.allocate_pages(rng) or b"" for rng in (100_000, 300_000, 1_000_000)]
    for end in range(GiB // 4096, pool.pages + 1, GiB // 4096):
        pool.mark_pinned(end)
    pool.free_pages(b"".join(slots))
    assert list(extents(pool.allocate_pages(pool.pages) or b"")) == [(0, pool.pages)]
