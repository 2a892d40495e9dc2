"""The space of fills in L1: their bound, and that nothing is read for which there is no space."""

from __future__ import annotations

import pytest
from support.daemon import wait_until
from support.filling import FULL, WINDOW, filling, store_hybrid
from support.memory import two_groups
from support.server import L1_BYTES, PAGE_BYTES
from support.worker import make_keys

from kvserver.cache import Cache
from kvserver.tiering.fill_room import memory_bound


def test_fills_beyond_the_bound_wait_for_their_turn() -> None:
    with filling(l1_bytes=L1_BYTES) as f:
        bound = memory_bound(L1_BYTES)
        keys = [make_keys(10, seed=number) for number in range(4)]
        for each in keys:
            f.write(each)
        size = sum(len(raw) for _, raw in f.tier.objects.values()) // 4
        fitting = bound // size
        assert 1 <= fitting < 4, "the test needs fills of which some but not all fit"
        f.forget_l1()
        numbers = [f.begin(each, f"request-{place}") for place, each in enumerate(keys)]
        for place in range(fitting):
            assert f.reply(numbers[place]).hit_chunks == 10
        assert 0 < f.bytes() <= bound
        assert {name.key for name in f.gets()} == {key for each in keys[:fitting] for key in each}
        for place in range(4):
            assert place < fitting or f.reply(numbers[place]).hit_chunks == 10
            if place % 2:
                f.worker.end_request(f"request-{place}")
            else:
                f.loaded(keys[place], f"request-{place}")
        wait_until(lambda: f.bytes() == 0)
        f.audit()


def test_a_fill_that_never_fits_is_cut() -> None:
    with filling(l1_bytes=L1_BYTES) as f:
        keys = make_keys(40)
        f.only_in_l2(keys)
        wait_until(lambda: not f.running.call(lambda: f.running.parts.cache.pool.used_pages))
        assert f.lookup(keys).fill_chunks == 40
        found = f.fill(keys)
        assert 0 < found < 40
        assert f.bytes() <= memory_bound(L1_BYTES)


def test_nothing_is_read_before_there_is_space_for_all_of_it() -> None:
    """L1 has space for a part: the hit is cut to it, and no read is wasted on the rest."""
    with filling(l1_bytes=L1_BYTES) as f:
        keys = make_keys(15)
        f.write(keys)
        size = sum(len(raw) for _, raw in f.tier.objects.values()) // 15
        f.forget_l1()
        cache = f.running.parts.cache
        held = f.running.call(lambda: _occupy(cache, keep=5 * size))
        found = f.fill(keys)
        assert 0 < found <= 5
        assert [name.key for name in f.gets()] == keys[:found]
        f.running.call(lambda: cache.pool.free_pages(held))


def _occupy(cache: Cache, keep: int) -> bytes:
    """All pages but so many bytes, as pinned chunks would."""
    while cache.step():
        pass
    pages = cache.pool.allocate_pages(cache.pool.unused_pages - keep // PAGE_BYTES)
    assert pages is not None
    return pages


@pytest.mark.parametrize(
    ("l1", "bound"),
    [(64 << 20, 48 << 20), (256 << 20, 192 << 20), (1 << 30, 256 << 20), (2 << 30, 256 << 20), (64 << 30, 8 << 30)],
)
def test_the_bound_is_an_eighth_of_l1_and_three_quarters_of_a_small_one(l1: int, bound: int) -> None:
    assert memory_bound(l1) == bound


def test_chunks_read_by_a_fill_are_not_evicted_before_its_last_read() -> None:
    """Other stores may not evict it meanwhile."""
    with filling(l1_bytes=L1_BYTES) as f:
        keys = make_keys(20)
        f.only_in_l2(keys)
        f.tier.stopped, f.tier.kept_waiting = True, {keys[19]}
        number = f.begin(keys, wait_ms=10_000)
        wait_until(lambda: len(f.tier.waiting) == 20)
        f.tier.release()
        wait_until(lambda: len(f.tier.waiting) == 1)
        evicted = f.running.parts.cache.space
        while f.running.call(lambda: evicted.evicted_chunks) < 40:
            f.store(make_keys(15))
        f.tier.kept_waiting = set()
        f.tier.release()
        assert f.reply(number).hit_chunks == 20
        f.worker.end_request()
        f.audit()


def test_a_hit_with_windows_is_cut_to_a_boundary_that_fits_and_nothing_is_read_for_another() -> None:
    with filling(l1_bytes=L1_BYTES, geometry=two_groups(), groups=(FULL, WINDOW)) as f:
        keys = make_keys(12)
        store_hybrid(f, keys, [4, 10])
        sizes = {name.group: -(-len(raw) // PAGE_BYTES) * PAGE_BYTES for name, (_, raw) in f.tier.objects.items()}
        cache = f.running.parts.cache
        held = f.running.call(lambda: _occupy(cache, keep=6 * sizes[0] + sizes[1]))
        assert f.fill(keys) == 4
        assert [(name.group, name.key) for name in f.gets()] == [(1, keys[3]), *((0, key) for key in keys[:4])]
        f.running.call(lambda: cache.pool.free_pages(held))
        f.worker.end_request()
        f.audit()
