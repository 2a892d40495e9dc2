"""Which chunks leave L1 for a store, and which never do."""

from __future__ import annotations

import pytest

from kvserver.cache import Cache
from kvserver.protocol import ErrorCode, KVServerError
from unit.cache.small_cache import FOREVER, NS, OTHER, A, found, keys, make_cache, plan, store, which


class TestEviction:
    def test_the_least_recently_used_chunk_makes_room(self, cache: Cache) -> None:
        for name in "abcdefghij":
            store(cache, name)
        assert found(cache, "a") == 1
        store(cache, "k")
        assert which(cache, "abcdefghijk") == "acdefghijk"
        assert cache.space.evicted_chunks == 1
        cache.audit()

    def test_a_load_counts_as_a_use(self, cache: Cache) -> None:
        for name in "abcdefghij":
            store(cache, name)
        cache.finish_load(cache.plan_load(NS, keys("a")), copied=True)
        store(cache, "k")
        assert which(cache, "ab") == "a"

    def test_store_evicts_as_many_chunks_as_it_needs(self, cache: Cache) -> None:
        for name in "abcdefghij":
            store(cache, name)
        store(cache, "x", namespace=OTHER, pages=4)
        assert which(cache, "abcdefghij") == "efghij"
        assert cache.pool.unused_pages == 0
        cache.audit()

    def test_no_chunk_is_evicted_while_unpinned_pages_are_free(self, cache: Cache) -> None:
        cache.pool.mark_pinned(4)
        for name in "abcdefghij":
            store(cache, name)
        assert (cache.space.evicted_chunks, cache.pool.unused_pages) == (0, 0)
        assert which(cache, "abcdefghij") == "abcdefghij"
        store(cache, "k")
        assert which(cache, "abk") == "bk"
        cache.audit()

    def test_a_chunk_lies_half_in_pinned_pages_rather_than_evict_another(self, cache: Cache) -> None:
        cache.pool.mark_pinned(4)
        store(cache, "ab", pages=3)  # one pinned page is left, and three others
        store(cache, "c", pages=4)
        assert which(cache, "abc") == "abc"
        assert (cache.space.evicted_chunks, cache.pool.unused_pages) == (0, 0)

    def test_later_chunks_of_a_prefix_leave_before_earlier_ones(self, cache: Cache) -> None:
        store(cache, "abcdefghij")
        store(cache, "x", namespace=OTHER, pages=3)
        assert which(cache, "abcdefghij") == "abcdefg"

    def test_later_chunks_leave_first_after_a_lookup(self, cache: Cache) -> None:
        for name in "jihgfedcba":
            store(cache, name)
        assert found(cache, "abcdefghij") == 10
        store(cache, "x", namespace=OTHER, pages=3)
        assert which(cache, "abcdefghij") == "abcdefg"

    def test_later_chunks_leave_first_after_a_load(self, cache: Cache) -> None:
        for name in "jihgfedcba":
            store(cache, name)
        cache.finish_load(cache.plan_load(NS, keys("abcdefghij")), copied=True)
        store(cache, "x", namespace=OTHER, pages=3)
        assert which(cache, "abcdefghij") == "abcdefg"

    def test_later_chunks_leave_first_after_a_duplicate_store(self, cache: Cache) -> None:
        store(cache, "abcdefghij")
        assert plan(cache, "abcdefghij").skipped == 10
        store(cache, "x", namespace=OTHER, pages=3)
        assert which(cache, "abcdefghij") == "abcdefg"

    def test_the_chunks_a_store_adds_leave_before_the_prefix_it_found(self, cache: Cache) -> None:
        store(cache, "abcd")
        store(cache, "xyz", namespace=OTHER)
        extended = plan(cache, "abcdefg")
        assert extended.skipped == 4
        cache.finish_store(extended, copied=True)
        store(cache, "v", namespace=OTHER, pages=5)  # the three of the other model, then two of ours
        assert which(cache, "abcdefg") == "abcde"

    def test_incomplete_chunks_leave_first(self) -> None:
        cache = make_cache(6)
        store(cache, "a", rank=0, world=2)
        store(cache, "a", rank=1, world=2)
        store(cache, "b", rank=0, world=2)  # rank 1 stores nothing
        found(cache, "a")
        store(cache, "vwxyz"[:3], namespace=OTHER)
        store(cache, "v", namespace=b"p" * 32)
        assert which(cache, "ab") == "a"
        assert cache.index.chunk_count == 5

    def test_a_repeated_store_of_one_rank_does_not_protect_an_incomplete_chunk(self) -> None:
        cache = make_cache(3)
        store(cache, "a", rank=0, world=2)
        store(cache, "a", rank=1, world=2)
        store(cache, "b", rank=0, world=2)
        assert plan(cache, "b", rank=0, world=2).skipped == 1
        store(cache, "c", namespace=OTHER)
        assert which(cache, "a") == "a", "a whole chunk was evicted although an incomplete one was there"

    def test_leased_and_pinned_chunks_are_never_evicted(self, cache: Cache) -> None:
        store(cache, "abcdefghij")
        assert cache.lookup(NS, keys("abc"), A, FOREVER).hit_chunks == 3
        loading = cache.plan_load(NS, keys("de"))
        filling = plan(cache, "x", namespace=OTHER, pages=5)
        assert len(filling.chunks) == 1
        assert plan(cache, "y", namespace=OTHER).no_space == 1
        assert which(cache, "abcdefghij") == "abcde"
        cache.finish_load(loading, copied=True)
        assert plan(cache, "y", namespace=OTHER).no_space == 0

    def test_a_store_that_finds_no_room_for_all_keeps_the_first_ones(self, cache: Cache) -> None:
        store(cache, "abcdefgh")
        cache.lookup(NS, keys("abcdefgh"), A, FOREVER)
        starving = plan(cache, "vwxyz", namespace=OTHER)
        assert (starving.positions, starving.no_space) == ([0, 1], 3)
        assert cache.finish_store(starving, copied=True) == 2
        assert found(cache, "vwxyz", OTHER) == 2
        cache.audit()

    def test_a_store_never_evicts_its_own_chunks(self, cache: Cache) -> None:
        store(cache, "abcde")
        cache.lookup(NS, keys("abcde"), A, FOREVER)
        starving = plan(cache, "vwxyzu", namespace=OTHER)
        assert (len(starving.chunks), starving.no_space) == (5, 1)

    def test_store_evicts_chunks_of_others_and_not_its_own_prefix(self, cache: Cache) -> None:
        store(cache, "abcd")
        store(cache, "uvwxyz", namespace=OTHER)
        cache.finish_store(plan(cache, "abcdef"), copied=True)
        assert found(cache, "abcdef") == 6

    def test_making_room_for_one_rank_does_not_evict_the_other_ranks_bytes(self) -> None:
        cache = make_cache(3)
        store(cache, "a", rank=0, world=2, pages=2)
        starving = plan(cache, "a", rank=1, world=2, pages=2)
        assert starving.no_space == 1
        cache.audit()
        store(cache, "b", rank=0, world=2, pages=2)  # chunk a may be evicted afterwards
        assert cache.space.evicted_chunks == 1
        cache.audit()

    def test_a_chunk_larger_than_l1_names_both_sizes(self, cache: Cache) -> None:
        with pytest.raises(KVServerError, match=r"needs 11 pages .* L1 has 10") as caught:
            plan(cache, "a", pages=11)
        assert caught.value.code is ErrorCode.TOO_LARGE
        assert cache.pool.used_pages == 0
