"""The pages of L1."""

from __future__ import annotations

import random
import struct
import tracemalloc

import pytest
from support.slots import pages_of

from kvserver.cache import PagePool, page_bytes_for
from kvserver.cache.pages import MAX_PAGES, extents, granularity

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30


def test_fresh_pages_come_in_address_order() -> None:
    pool = PagePool(16 * 4096, 4096)
    assert pages_of(pool.allocate_pages(3) or b"") == [0, 1, 2]
    assert pages_of(pool.allocate_pages(2) or b"") == [3, 4]


def test_an_allocation_that_does_not_fit_changes_nothing() -> None:
    pool = PagePool(4 * 4096, 4096)
    assert pool.allocate_pages(5) is None
    assert pool.unused_pages == 4


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


@pytest.mark.parametrize("seed", range(5))
def test_no_page_is_ever_in_two_slots(seed: int) -> None:
    rng = random.Random(seed)
    pool = PagePool(200 * 4096, 4096)
    slots: list[bytes] = []
    for _ in range(3000):
        if slots and rng.random() < 0.5:
            pool.free_pages(slots.pop(rng.randrange(len(slots))))
        elif (slot := pool.allocate_pages(rng.randint(1, 20))) is not None:
            slots.append(slot)
        held = [page for slot in slots for page in pages_of(slot)]
        assert len(held) == len(set(held)) == pool.used_pages
        assert pool.unused_pages + pool.used_pages == pool.pages == 200
        assert all(0 <= page < 200 for page in held)


@pytest.mark.parametrize("seed", range(5))
def test_a_slot_is_refused_only_when_too_few_pages_are_free(seed: int) -> None:
    rng = random.Random(seed)
    pool = PagePool(1000 * 4096, 4096)
    slots: list[bytes] = []
    for _ in range(5000):
        count = rng.choice([1, 3, 40, 100, 300])
        slot = pool.allocate_pages(count)
        assert (slot is None) == (sum(len(pages_of(s)) for s in slots) + count > 1000)
        if slot is not None:
            assert len(pages_of(slot)) == count
            slots.append(slot)
        else:
            pool.free_pages(slots.pop(rng.randrange(len(slots))))


def test_what_is_free_side_by_side_is_one_extent_again() -> None:
    pool = PagePool(100 * 4096, 4096)
    slots = [pool.allocate_pages(10) or b"" for _ in range(10)]
    random.Random(1).shuffle(slots)
    for slot in slots:
        pool.free_pages(slot)
    assert list(extents(pool.allocate_pages(100) or b"")) == [(0, 100)]


def test_slots_may_be_freed_together() -> None:
    pool = PagePool(100 * 4096, 4096)
    pool.free_pages(b"".join(pool.allocate_pages(7) or b"" for _ in range(14)))
    assert pool.unused_pages == 100


def test_slots_of_one_size_are_one_extent_each_whatever_was_freed() -> None:
    rng = random.Random(1)
    pool = PagePool(10_007 * 4096, 4096)
    slots = []
    while (slot := pool.allocate_pages(48)) is not None:
        slots.append(slot)
    for _ in range(20_000):
        if slots and rng.random() < 0.5:
            pool.free_pages(slots.pop(rng.randrange(len(slots))))
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


@pytest.mark.parametrize("l1_bytes", [1, MiB, 64 * MiB, 256 * MiB, GiB, 3 * GiB, 20 * GiB, 4096 * GiB, 1 << 50])
def test_page_sizes_are_powers_of_two_and_every_page_has_a_number(l1_bytes: int) -> None:
    page = page_bytes_for(l1_bytes)
    assert page & (page - 1) == 0
    assert l1_bytes // page <= MAX_PAGES
    struct.pack("=I", MAX_PAGES)


def test_a_larger_l1_never_gets_smaller_pages() -> None:
    sizes = [page_bytes_for(1 << shift) for shift in range(20, 60)]
    assert sizes == sorted(sizes)


# ---- what is pinned, and what is not yet --------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_a_pool_that_is_all_pinned_allocates_like_one_that_never_is(seed: int) -> None:
    rng = random.Random(seed)
    pools = [PagePool(1000 * 4096, 4096) for _ in range(2)]
    pools[1].mark_pinned(1000)
    slots: list[bytes] = []
    for _ in range(3000):
        if slots and rng.random() < 0.45:
            slot = slots.pop(rng.randrange(len(slots)))
            for pool in pools:
                pool.free_pages(slot)
            continue
        count = rng.choice([1, 7, 48, 200])
        first, second = (pool.allocate_pages(count) for pool in pools)
        assert first == second
        slots += [first] if first else []
    assert pools[0].pinned_pages == 0


def test_pages_that_are_not_pinned_are_used_last() -> None:
    pool = PagePool(100 * 4096, 4096)
    pool.mark_pinned(30)
    taken = [list(extents(pool.allocate_pages(10) or b"")) for _ in range(5)]
    assert taken == [[(0, 10)], [(10, 10)], [(20, 10)], [(30, 10)], [(40, 10)]]


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


def test_free_pages_are_one_extent_again_once_pinning_has_passed_them() -> None:
    pool = PagePool(100 * 4096, 4096)
    slots = [pool.allocate_pages(10) or b"" for _ in range(10)]
    pool.mark_pinned(35)
    for slot in slots:
        pool.free_pages(slot)  # one slot spans both parts
    for pages in (36, 36, 99, 100):
        pool.mark_pinned(pages)
    assert pool.pinned_pages == pool.pages
    assert list(extents(pool.allocate_pages(100) or b"")) == [(0, 100)]


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
        self.free.difference_update(pages)

    def extent_of(self, page: int) -> int:
        """Pages of the free extent that begins with `page`."""
        limit = self.pinned if page < self.pinned else self.pages
        assert page in (0, self.pinned) or page - 1 not in self.free
        return next((last for last in range(page, limit) if last not in self.free), limit) - page


@pytest.mark.parametrize("seed", range(8))
def test_a_long_run_with_pinning_at_any_moment_agrees_with_the_plain_model(seed: int) -> None:
    rng = random.Random(seed)
    pages = rng.choice([60, 300])
    pool, model = PagePool(pages * 4096, 4096), Model(pages)
    slots: list[bytes] = []
    for _ in range(1500):
        chance = rng.random()
        if chance < 0.01:
            model.pinned = rng.randint(model.pinned, min(pages, model.pinned + pages // 5))
            pool.mark_pinned(model.pinned)
        elif slots and chance < 0.5:
            slot = slots.pop(rng.randrange(len(slots)))
            pool.free_pages(slot)
            model.free.update(pages_of(slot))
        else:
            count = rng.choice([1, 2, 5, 13, 40])
            slot_or_none = pool.allocate_pages(count)
            model.check_allocation(count, slot_or_none)
            slots += [slot_or_none] if slot_or_none else []
        assert pool.unused_pages == len(model.free)
        assert pool.unused_pages + pool.used_pages == pool.pages == pages
    for slot in slots:
        pool.free_pages(slot)
    pool.mark_pinned(pages)
    assert list(extents(pool.allocate_pages(pages) or b"")) == [(0, pages)], "nothing is lost"


def test_pinning_a_large_l1_piece_by_piece_leaves_one_extent() -> None:
    pool = PagePool(20 * GiB, 4096)
    slots = [pool.allocate_pages(rng) or b"" for rng in (100_000, 300_000, 1_000_000)]
    for end in range(GiB // 4096, pool.pages + 1, GiB // 4096):
        pool.mark_pinned(end)
    pool.free_pages(b"".join(slots))
    assert list(extents(pool.allocate_pages(pool.pages) or b"")) == [(0, pool.pages)]
