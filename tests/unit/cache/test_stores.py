"""When a chunk is READY, and what a store does not copy again; without a byte being copied."""

from __future__ import annotations

import pytest

from kvserver.cache import Cache
from kvserver.cache.pages import page_count
from kvserver.protocol import KEY_BYTES, ErrorCode, KVServerError
from unit.cache.small_cache import NS, OTHER, found, free_all, keys, plan, store, which


class TestReady:
    def test_a_chunk_is_found_only_after_its_copy_was_whole(self, cache: Cache) -> None:
        filling = plan(cache, "abc")
        assert found(cache, "abc") == 0
        assert cache.finish_store(filling, copied=True) == 3
        assert found(cache, "abc") == 3

    def test_a_failed_copy_leaves_nothing(self, cache: Cache) -> None:
        assert store(cache, "abc", copied=False) == 0
        assert found(cache, "abc") == 0
        assert cache.index.chunk_count == 0
        assert cache.pool.used_pages == 0
        cache.audit()

    def test_a_chunk_is_found_only_when_every_rank_was_copied(self, cache: Cache) -> None:
        assert store(cache, "a", rank=0, world=3) == 0
        assert store(cache, "a", rank=2, world=3) == 0
        assert found(cache, "a") == 0
        assert store(cache, "a", rank=1, world=3) == 1
        assert found(cache, "a") == 1
        cache.audit()

    def test_one_rank_that_failed_keeps_the_chunk_hidden_until_it_succeeds(self, cache: Cache) -> None:
        first, second = plan(cache, "a", 0, 2), plan(cache, "a", 1, 2)
        assert cache.finish_store(first, copied=False) == 0
        assert cache.finish_store(second, copied=True) == 0
        assert found(cache, "a") == 0
        assert cache.pool.used_pages == 1, "the failed rank's pages are free"
        assert store(cache, "a", rank=0, world=2) == 1
        cache.audit()

    def test_a_lookup_stops_at_the_first_chunk_that_is_missing(self, cache: Cache) -> None:
        store(cache, "abde")
        assert found(cache, "abcde") == 2
        assert found(cache, "cab") == 0

    def test_models_do_not_see_each_other(self, cache: Cache) -> None:
        store(cache, "ab")
        assert found(cache, "ab", OTHER) == 0

    def test_a_load_pins_all_its_chunks_or_none(self, cache: Cache) -> None:
        store(cache, "ab")
        with pytest.raises(KVServerError) as caught:
            cache.plan_load(NS, keys("abc"))
        assert caught.value.code is ErrorCode.NOT_FOUND
        assert cache.space.pins == 0
        loading = cache.plan_load(NS, keys("ab"))
        assert cache.space.pins == 2
        cache.finish_load(loading, copied=True)
        cache.audit()

    def test_a_load_of_a_chunk_that_is_being_filled_is_refused(self, cache: Cache) -> None:
        filling = plan(cache, "a")
        with pytest.raises(KVServerError):
            cache.plan_load(NS, keys("a"))
        cache.finish_store(filling, copied=True)

    def test_a_load_of_an_unknown_model_is_refused(self, cache: Cache) -> None:
        with pytest.raises(KVServerError) as caught:
            cache.plan_load(OTHER, keys("abc"))
        assert caught.value.code is ErrorCode.NOT_FOUND
        assert "3 of 3" in caught.value.message

    def test_slots_hold_what_the_ranks_need(self, cache: Cache) -> None:
        store(cache, "a", rank=0, world=2, pages=2)
        store(cache, "a", rank=1, world=2, pages=3)
        (chunk,) = cache.plan_load(NS, keys("a"))
        assert [page_count(chunk.slot(rank)) for rank in (0, 1)] == [2, 3]
        cache.finish_load([chunk], copied=True)


class TestDuplicates:
    def test_a_store_of_what_is_there_copies_nothing(self, cache: Cache) -> None:
        store(cache, "ab")
        again = plan(cache, "abc")
        assert again.skipped == 2
        assert again.positions == [2]
        assert cache.finish_store(again, copied=True) == 1
        assert cache.pool.used_pages == 3

    def test_a_store_of_what_is_being_copied_copies_nothing(self, cache: Cache) -> None:
        first = plan(cache, "ab")
        second = plan(cache, "ab")
        assert second.chunks == []
        assert second.skipped == 2
        cache.finish_store(first, copied=True)
        assert found(cache, "ab") == 2

    def test_a_key_named_twice_in_one_store_is_copied_once(self, cache: Cache) -> None:
        twice = plan(cache, "aa")
        assert (len(twice.chunks), twice.skipped) == (1, 1)
        cache.finish_store(twice, copied=True)
        assert cache.pool.used_pages == 1
        cache.audit()

    def test_two_ranks_fill_one_chunk_side_by_side(self, cache: Cache) -> None:
        first, second = plan(cache, "a", 0, 2), plan(cache, "a", 1, 2)
        assert first.chunks == second.chunks
        assert cache.finish_store(second, copied=True) == 0
        assert cache.finish_store(first, copied=True) == 1

    def test_after_a_failed_store_the_next_one_copies(self, cache: Cache) -> None:
        store(cache, "a", copied=False)
        assert store(cache, "a") == 1

    def test_an_object_without_one_ranks_bytes_is_dropped_unless_a_store_fills_it(self, cache: Cache) -> None:
        store(cache, "a", 0, 2)
        store(cache, "b", 0, 2)
        store(cache, "b", 1, 2)
        under_way = plan(cache, "c", 0, 2)
        cache.drop_incomplete(NS, 0, keys("abc"))
        assert cache.pool.used_pages == 3
        assert cache.finish_store(under_way, copied=True) == 0
        assert store(cache, "c", 1, 2) == 1
        assert which(cache, "abc") == "bc"
        cache.audit()


def test_keys_have_the_size_of_the_wire() -> None:
    assert len(keys("a")) == KEY_BYTES


class TestParts:
    """The first objects of a store count while the others are copied."""

    def test_the_first_objects_are_found_before_the_store_has_ended(self, cache: Cache) -> None:
        filling = plan(cache, "abcd")
        cache.publish_part(filling, 1)
        assert found(cache, "abcd") == 1
        cache.publish_part(filling, 3)
        assert found(cache, "abcd") == 3
        assert [chunk.key for chunk in filling.ready] == [keys(name) for name in "abc"], "each once"
        assert cache.finish_store(filling, copied=True) == 4
        assert found(cache, "abcd") == 4
        cache.audit()

    def test_a_store_that_fails_keeps_what_was_published_and_nothing_else(self, cache: Cache) -> None:
        filling = plan(cache, "abc")
        cache.publish_part(filling, 1)
        assert cache.finish_store(filling, copied=False) == 1
        assert which(cache, "abc") == "a"
        assert cache.pool.used_pages == 1
        cache.audit()

    def test_a_part_of_one_rank_counts_if_the_other_ranks_have_ended(self, cache: Cache) -> None:
        first, second = plan(cache, "abc", 0, 2), plan(cache, "abc", 1, 2)
        cache.publish_part(first, 1)
        cache.publish_part(second, 2)
        assert found(cache, "abc") == 0
        cache.finish_store(second, copied=True)
        assert cache.publish_part(first, 2) == [second.chunks[1]]
        assert which(cache, "abc") == "b"
        cache.finish_store(first, copied=False)
        assert which(cache, "abc") == "b"
        cache.audit()

    def test_what_was_published_and_cleared_is_freed_once_nobody_reads_it(self, cache: Cache) -> None:
        filling = plan(cache, "ab")
        cache.publish_part(filling, 1)
        loading = cache.plan_load(NS, keys("a"))
        cache.clear_namespaces(NS)
        cache.publish_part(filling, 2)
        cache.finish_store(filling, copied=True)
        free_all(cache)
        assert cache.pool.used_pages == 1, "a load still reads it"
        assert found(cache, "ab") == 0
        cache.finish_load(loading, copied=True)
        assert cache.pool.used_pages == 0
        cache.audit()

    def test_a_part_of_one_rank_is_not_dropped_by_a_fill_while_its_store_runs(self, cache: Cache) -> None:
        first, second = plan(cache, "ab", 0, 2), plan(cache, "ab", 1, 2)
        cache.publish_part(first, 1)
        cache.drop_incomplete(NS, 0, keys("a"))
        cache.finish_store(second, copied=True)
        assert cache.finish_store(first, copied=True) == 2
        assert found(cache, "ab") == 2
        cache.audit()
