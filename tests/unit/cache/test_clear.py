"""A clear hides everything at once; memory is freed in slices, and when the last copy ends."""

from __future__ import annotations

import gc
import hashlib

import pytest
from support.slots import pages_of
from support.turns import repeat

from kvserver.cache import Cache, Chunk, one_group
from kvserver.cache.pages import extents
from kvserver.protocol import KEY_BYTES
from unit.cache.small_cache import NS, OTHER, PAGE, found, free_all, keys, make_cache, plan, store


class TestClear:
    def test_clear_hides_everything_at_once_and_frees_in_slices(self, cache: Cache) -> None:
        store(cache, "abcdefghij")
        assert cache.clear_namespaces() == 10
        assert found(cache, "abcdefghij") == 0
        assert cache.index.chunk_count == 0
        assert cache.pool.used_pages == 10
        assert cache.step(4)
        assert cache.pool.used_pages == 6
        assert cache.step(4)
        assert not cache.step(4)
        assert cache.pool.used_pages == 0
        cache.audit()

    def test_chunks_that_are_neighbours_in_l1_are_freed_one_after_the_other(self) -> None:
        cache = make_cache(4000)
        for first in range(0, 4000, 500):
            names = b"".join(number.to_bytes(KEY_BYTES, "big") for number in range(first, first + 500))
            cache.finish_store(cache.plan_store(NS, one_group(1), names, PAGE), copied=True)
        cache.clear_namespaces()
        assert cache.step(2000)
        assert cache.pool.unused_pages == 2000
        half = cache.pool.allocate_pages(1900)
        assert half is not None
        assert len(list(extents(half))) < 20, "in any order they would be more than 1000"
        cache.pool.free_pages(half)
        repeat(cache.step)
        cache.audit()

    def test_chunks_that_are_read_are_removed_once_in_any_order(self) -> None:
        cache, names = make_cache(40), "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMN"
        for _ in range(10):  # the table's order is another one each time
            store(cache, names)
            loading = cache.plan_load(NS, keys(names[::2]))
            cache.clear_namespaces()
            repeat(lambda: cache.step(1))
            assert cache.pool.used_pages == 20
            cache.finish_load(loading, copied=True)
            assert cache.pool.used_pages == 0
            cache.audit()

    def test_clear_of_one_model_leaves_the_others(self, cache: Cache) -> None:
        store(cache, "abc")
        store(cache, "abc", namespace=OTHER)
        assert cache.clear_namespaces(NS) == 3
        free_all(cache)
        assert found(cache, "abc") == 0
        assert found(cache, "abc", OTHER) == 3
        cache.audit()

    def test_what_is_being_read_is_freed_when_the_reader_ends(self, cache: Cache) -> None:
        store(cache, "abc")
        loading = cache.plan_load(NS, keys("ab"))
        cache.clear_namespaces()
        free_all(cache)
        assert cache.pool.used_pages == 2
        store(cache, "xyz")
        used = {page for chunk in loading for page in pages_of(chunk.slot(0))}
        fresh = {page for chunk in cache.index for page in pages_of(chunk.slot(0))}
        assert len(used) == 2
        assert len(fresh) == 3
        assert not used & fresh, "pages under a reader were allocated again"
        cache.finish_load(loading, copied=True)
        assert cache.pool.used_pages == 3
        cache.audit()

    def test_two_readers_of_a_cleared_chunk_both_keep_it(self, cache: Cache) -> None:
        store(cache, "a")
        first, second = cache.plan_load(NS, keys("a")), cache.plan_load(NS, keys("a"))
        cache.clear_namespaces()
        free_all(cache)
        cache.finish_load(first, copied=True)
        assert cache.pool.used_pages == 1
        cache.finish_load(second, copied=True)
        assert cache.pool.used_pages == 0
        cache.audit()

    @pytest.mark.parametrize("copied", [True, False])
    def test_a_store_that_ends_after_a_clear_publishes_nothing(self, cache: Cache, copied: bool) -> None:
        filling = plan(cache, "ab")
        cache.clear_namespaces()
        free_all(cache)
        assert cache.pool.used_pages == 2
        assert cache.finish_store(filling, copied) == 0
        assert found(cache, "ab") == 0
        assert cache.pool.used_pages == 0
        cache.audit()

    def test_a_store_that_began_before_a_clear_does_not_fill_the_chunk_made_after_it(self, cache: Cache) -> None:
        before = plan(cache, "a", 0, 2)
        cache.clear_namespaces()
        after = plan(cache, "a", 1, 2)
        assert cache.finish_store(before, copied=True) == 0
        assert cache.finish_store(after, copied=True) == 0
        assert found(cache, "a") == 0, "one rank's bytes are from before the clear"
        free_all(cache)
        cache.audit()

    def test_an_incomplete_chunk_with_a_writer_is_freed_when_the_writer_ends(self, cache: Cache) -> None:
        store(cache, "a", 0, 2)
        filling = plan(cache, "a", 1, 2)
        cache.clear_namespaces()
        free_all(cache)
        assert cache.pool.used_pages == 2
        cache.finish_store(filling, copied=True)
        assert cache.pool.used_pages == 0
        cache.audit()

    def test_a_store_reuses_pages_of_cleared_chunks_before_it_evicts(self, cache: Cache) -> None:
        store(cache, "abcde", namespace=OTHER)
        store(cache, "vwxyz")
        cache.clear_namespaces(NS)
        assert store(cache, "abcde") == 5
        assert cache.space.evicted_chunks == 0
        assert found(cache, "abcde", OTHER) == 5

    def test_clear_while_an_earlier_clear_is_being_freed(self, cache: Cache) -> None:
        store(cache, "abcde")
        cache.clear_namespaces()
        cache.step(2)
        store(cache, "fg")
        assert cache.clear_namespaces() == 2
        free_all(cache)
        assert cache.pool.used_pages == 0
        cache.audit()

    def test_clear_of_nothing_is_no_error(self, cache: Cache) -> None:
        assert cache.clear_namespaces() == 0
        assert cache.clear_namespaces(NS) == 0
        assert not cache.step()

    def test_clearing_one_model_again_and_again_leaves_no_chunks_in_memory(self) -> None:
        cache = make_cache(4000)
        store(cache, "k", namespace=OTHER)
        for turn in range(20):
            names = [f"{turn}-{i}" for i in range(1000)]
            raw = b"".join(hashlib.sha256(name.encode()).digest() for name in names)
            cache.finish_store(cache.plan_store(NS, one_group(1), raw, PAGE), copied=True)
            cache.clear_namespaces(NS)
            free_all(cache)
        del raw, names
        gc.collect()
        alive = sum(isinstance(thing, Chunk) and thing.namespace.id == NS for thing in gc.get_objects())
        assert alive < 4000
