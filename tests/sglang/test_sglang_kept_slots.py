"""Slots that a load may still write, over SGLang's own allocator and no model."""

from __future__ import annotations

import os

import pytest
import torch
from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

from kvserver.adapters.sglang.kept_slots import Allocator, KeptSlots

PAGE, PAGES = 16, 8
STRICT = "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE"


class NoKV:
    """A KV cache of which the allocator needs nothing."""


@pytest.fixture
def allocator() -> PagedTokenToKVPoolAllocator:
    return PagedTokenToKVPoolAllocator(
        PAGE * PAGES, page_size=PAGE, dtype=torch.float32, device="cpu", kvcache=NoKV(), need_sort=False
    )


def all_free(allocator: PagedTokenToKVPoolAllocator) -> set[int]:
    """Allocate whatever is free, and free it again."""
    slots = allocator.alloc(allocator.available_size())
    found = set(slots.tolist())
    allocator.free(slots)
    return found


def test_kept_slots_are_not_allocated_after_a_flush_until_they_are_released(
    allocator: PagedTokenToKVPoolAllocator,
) -> None:
    kept_slots = KeptSlots()
    slots = allocator.alloc(3 * PAGE)
    kept = set(slots.tolist())
    kept_slots.keep([1], [(Allocator(allocator, PAGE), slots)])
    assert all_free(allocator) & kept == set()
    kept_slots.flushed()
    allocator.clear()
    kept_slots.hold_back()
    assert all_free(allocator) & kept == set()
    assert allocator.available_size() == (PAGES - 3) * PAGE
    kept_slots.release([True])
    assert allocator.available_size() == PAGES * PAGE
    assert kept < all_free(allocator)


def test_slots_released_between_a_flush_and_the_next_pass_are_free_once(allocator: PagedTokenToKVPoolAllocator) -> None:
    kept_slots = KeptSlots()
    kept_slots.keep([1], [(Allocator(allocator, PAGE), allocator.alloc(2 * PAGE))])
    kept_slots.flushed()
    allocator.clear()
    kept_slots.release([True])
    assert allocator.available_size() == PAGES * PAGE
    assert len(all_free(allocator)) == PAGES * PAGE


def test_kept_states_are_not_allocated_after_a_flush_until_they_are_released() -> None:
    states, kept_slots = MambaSlotAllocator(size=4, device="cpu"), KeptSlots()
    kept = states.alloc(1)
    kept_slots.keep([1, 2], [(Allocator(states, 1), kept)])
    kept_slots.flushed()
    states.clear()
    kept_slots.hold_back()
    assert sorted(states.free_slots.tolist()) == [2, 3, 4]
    kept_slots.release([True])
    assert sorted(states.free_slots.tolist()) == [1, 2, 3, 4]


@pytest.mark.parametrize("before", [None, "true"])
def test_the_idle_check_only_warns_while_slots_are_kept(
    allocator: PagedTokenToKVPoolAllocator, before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if before is None:
        monkeypatch.delenv(STRICT, raising=False)
    else:
        monkeypatch.setenv(STRICT, before)
    kept_slots = KeptSlots()
    kept_slots.keep([1], [(Allocator(allocator, PAGE), allocator.alloc(PAGE))])
    kept_slots.keep([2], [(Allocator(allocator, PAGE), allocator.alloc(PAGE))])
    kept_slots.release([True, False])
    assert os.environ[STRICT] == "false"
    assert kept_slots.copies == [(2,)]
    kept_slots.release([True])
    assert os.environ.get(STRICT) == before
