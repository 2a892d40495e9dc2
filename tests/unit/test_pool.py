"""The pages of L1."""

from __future__ import annotations

import random
from array import array

import pytest

from kvserver.pool import MAX_PAGE_BYTES, MIN_PAGE_BYTES, PagePool, page_bytes_for

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30


def test_fresh_pages_come_in_address_order() -> None:
    pool = PagePool(16 * 4096, 4096)
    assert list(pool.take(3) or ()) == [0, 1, 2]
    assert list(pool.take(2) or ()) == [3, 4]


def test_a_slot_that_does_not_fit_takes_nothing() -> None:
    pool = PagePool(4 * 4096, 4096)
    assert pool.take(5) is None
    assert pool.free_pages == 4


def test_the_rest_of_l1_that_is_no_whole_page_is_left_out() -> None:
    pool = PagePool(4096 * 3 + 4095, 4096)
    assert pool.pages == pool.free_pages == 3


@pytest.mark.parametrize(("slot_bytes", "pages"), [(1, 1), (4096, 1), (4097, 2), (10 * 4096, 10), (10 * 4096 + 1, 11)])
def test_a_slot_is_rounded_up_to_pages(slot_bytes: int, pages: int) -> None:
    assert PagePool(MiB, 4096).pages_for(slot_bytes) == pages


@pytest.mark.parametrize("seed", range(5))
def test_no_page_is_ever_in_two_slots(seed: int) -> None:
    rng = random.Random(seed)
    pool = PagePool(200 * 4096, 4096)
    slots: list[array[int]] = []
    for _ in range(3000):
        if slots and rng.random() < 0.5:
            pool.give(slots.pop(rng.randrange(len(slots))))
        elif (slot := pool.take(rng.randint(1, 20))) is not None:
            slots.append(slot)
        held = [page for slot in slots for page in slot]
        assert len(held) == len(set(held)) == pool.used_pages
        assert pool.free_pages + pool.used_pages == pool.pages == 200
        assert all(0 <= page < 200 for page in held)


def test_giving_back_more_than_was_taken_is_noticed() -> None:
    pool = PagePool(8 * 4096, 4096)
    slot = pool.take(4)
    assert slot is not None
    again = slot[:]
    pool.give(slot)
    with pytest.raises(AssertionError):
        pool.give(again)


@pytest.mark.parametrize("l1_bytes", [1, MiB, 64 * MiB, 256 * MiB, GiB, 3 * GiB, 20 * GiB, 4096 * GiB])
def test_page_sizes_are_powers_of_two_within_bounds(l1_bytes: int) -> None:
    page = page_bytes_for(l1_bytes)
    assert MIN_PAGE_BYTES <= page <= MAX_PAGE_BYTES
    assert page & (page - 1) == 0


def test_a_larger_l1_never_gets_smaller_pages() -> None:
    sizes = [page_bytes_for(1 << shift) for shift in range(20, 45)]
    assert sizes == sorted(sizes)
