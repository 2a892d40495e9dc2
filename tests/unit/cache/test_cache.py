"""The decisions of L1, without a byte being copied."""

from __future__ import annotations

import gc
import hashlib

import pytest
from support.slots import pages_of
from support.turns import repeat

from kvserver.cache import POLICIES, Cache, Chunk, PagePool, StorePlan, one_group
from kvserver.cache.pages import extents, page_count
from kvserver.protocol import KEY_BYTES, ErrorCode, KVServerError

PAGE = 4096
NS, OTHER = b"n" * 32, b"o" * 32
FOREVER = 1e9
A, B = ("engine", "request-a"), ("engine", "request-b")


def keys(names: str) -> bytes:
    """One key per character."""
    return b"".join(hashlib.sha256(name.encode()).digest() for name in names)


def make_cache(pages: int) -> Cache:
    return Cache(PagePool(pages * PAGE, PAGE), POLICIES["lru"]())


@pytest.fixture
def cache() -> Cache:
    return make_cache(10)


def plan(cache: Cache, names: str, rank: int = 0, world: int = 1, namespace: bytes = NS, pages: int = 1) -> StorePlan:
    return cache.plan_store(namespace, one_group(world), keys(names), pages * PAGE, slots=range(rank, rank + 1))


def store(
    cache: Cache, names: str, rank: int = 0, world: int = 1, namespace: bytes = NS, pages: int = 1, copied: bool = True
) -> int:
    return cache.finish_store(plan(cache, names, rank, world, namespace, pages), copied)


def found(cache: Cache, names: str, namespace: bytes = NS) -> int:
    """The number of hits; no lease stays."""
    hits = cache.lookup(namespace, keys(names), ("probe", "probe"), FOREVER).hit_chunks
    cache.end_lease(("probe", "probe"))
    return hits


def is_there(cache: Cache, name: str, namespace: bytes = NS) -> bool:
    """Whether the chunk is READY; unlike found(), this is no use of it."""
    space = cache.index.find_namespace(namespace)
    chunk = space.chunks.get(keys(name)) if space is not None else None
    return chunk is not None and chunk.ready


def which(cache: Cache, names: str) -> str:
    return "".join(name for name in names if is_there(cache, name))


def free_all(cache: Cache) -> None:
    repeat(cache.step)


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
        assert cache.pins == 0
        loading = cache.plan_load(NS, keys("ab"))
        assert cache.pins == 2
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


class TestEviction:
    def test_the_least_recently_used_chunk_makes_room(self, cache: Cache) -> None:
        for name in "abcdefghij":
            store(cache, name)
        assert found(cache, "a") == 1
        store(cache, "k")
        assert which(cache, "abcdefghijk") == "acdefghijk"
        assert cache.evicted_chunks == 1
        cache.audit()

    def test_a_load_counts_as_a_use(self, cache: Cache) -> None:
        for name in "abcdefghij":
            store(cache, name)
        cache.finish_load(cache.plan_load(NS, keys("a")), copied=True)
        store(cache, "k")
        assert which(cache, "ab") == "a"

    def test_as_many_leave_as_the_new_one_needs(self, cache: Cache) -> None:
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
        assert (cache.evicted_chunks, cache.pool.unused_pages) == (0, 0)
        assert which(cache, "abcdefghij") == "abcdefghij"
        store(cache, "k")
        assert which(cache, "abk") == "bk"
        cache.audit()

    def test_a_chunk_lies_half_in_pinned_pages_rather_than_evict_another(self, cache: Cache) -> None:
        cache.pool.mark_pinned(4)
        store(cache, "ab", pages=3)  # one pinned page is left, and three others
        store(cache, "c", pages=4)
        assert which(cache, "abc") == "abc"
        assert (cache.evicted_chunks, cache.pool.unused_pages) == (0, 0)

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

    def test_a_store_makes_room_elsewhere_than_in_its_own_prefix(self, cache: Cache) -> None:
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
        assert cache.evicted_chunks == 1
        cache.audit()

    def test_a_chunk_larger_than_l1_names_both_sizes(self, cache: Cache) -> None:
        with pytest.raises(KVServerError, match=r"needs 11 pages .* L1 has 10") as caught:
            plan(cache, "a", pages=11)
        assert caught.value.code is ErrorCode.TOO_LARGE
        assert cache.pool.used_pages == 0


class TestLeases:
    def test_a_chunk_stays_until_its_last_lease_ends(self, cache: Cache) -> None:
        store(cache, "abcdefghij")
        cache.lookup(NS, keys("ab"), A, FOREVER)
        cache.lookup(NS, keys("a"), B, FOREVER)
        cache.end_lease(A)
        filling = plan(cache, "x", namespace=OTHER, pages=9)
        assert len(filling.chunks) == 1
        assert which(cache, "ab") == "a"
        assert plan(cache, "y", namespace=OTHER).no_space == 1
        cache.end_lease(B)
        assert plan(cache, "y", namespace=OTHER).no_space == 0

    def test_a_second_lookup_of_an_owner_replaces_its_first(self, cache: Cache) -> None:
        store(cache, "abcdefghij")
        cache.lookup(NS, keys("abcdefgh"), A, FOREVER)
        cache.lookup(NS, keys("ab"), A, FOREVER)
        assert cache.lease_count == 1
        cache.audit()
        plan(cache, "x", namespace=OTHER, pages=8)
        assert which(cache, "abcdefghij") == "ab"

    def test_a_second_lookup_that_finds_nothing_ends_the_first(self, cache: Cache) -> None:
        store(cache, "ab")
        cache.lookup(NS, keys("ab"), A, FOREVER)
        assert cache.lookup(NS, keys("z"), A, FOREVER).hit_chunks == 0
        assert cache.lease_count == 0
        cache.audit()

    def test_leases_expire_at_their_deadline_and_not_before(self, cache: Cache) -> None:
        store(cache, "ab")
        cache.lookup(NS, keys("ab"), A, 10.0)
        cache.lookup(NS, keys("ab"), B, 20.0)
        left = []
        for now in (9.99, 10.0, 30.0):
            cache.expire_leases(now)
            free_all(cache)
            left.append(cache.lease_count)
        assert left == [2, 1, 0]
        cache.audit()

    def test_the_end_of_an_engine_ends_its_leases_only(self, cache: Cache) -> None:
        store(cache, "ab")
        cache.lookup(NS, keys("ab"), A, FOREVER)
        cache.lookup(NS, keys("ab"), B, FOREVER)
        cache.lookup(NS, keys("ab"), ("other", "r"), FOREVER)
        cache.end_leases_of("engine")
        free_all(cache)
        assert cache.lease_count == 1
        cache.audit()

    def test_ending_a_lease_twice_is_harmless(self, cache: Cache) -> None:
        store(cache, "ab")
        cache.lookup(NS, keys("ab"), A, FOREVER)
        cache.end_lease(A)
        cache.end_lease(A)
        cache.audit()

    def test_a_lease_guarantees_nothing_after_a_clear(self, cache: Cache) -> None:
        store(cache, "ab")
        cache.lookup(NS, keys("ab"), A, FOREVER)
        cache.clear_namespaces()
        with pytest.raises(KVServerError):
            cache.plan_load(NS, keys("ab"))
        free_all(cache)
        assert cache.pool.used_pages == 0, "a lease does not keep memory that no lookup can find"
        cache.end_lease(A)
        cache.audit()

    def test_a_key_looked_up_twice_in_one_lookup_is_released_twice(self, cache: Cache) -> None:
        store(cache, "a")
        assert cache.lookup(NS, keys("aa"), A, FOREVER).hit_chunks == 2
        cache.end_lease(A)
        cache.audit()


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
        assert cache.evicted_chunks == 0
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


class TestAccounting:
    def test_pins_are_those_of_open_plans(self, cache: Cache) -> None:
        filling = plan(cache, "abc")
        assert cache.pins == 3
        cache.finish_store(filling, copied=True)
        loading = cache.plan_load(NS, keys("ab"))
        assert cache.pins == 2
        cache.audit()
        cache.finish_load(loading, copied=True)
        assert cache.pins == 0
        cache.audit()

    def test_an_audit_fails_while_garbage_is_left(self, cache: Cache) -> None:
        store(cache, "a")
        cache.clear_namespaces()
        with pytest.raises(AssertionError, match="cleared chunks"):
            cache.audit()

    def test_an_audit_finds_a_lost_page(self, cache: Cache) -> None:
        store(cache, "a")
        cache.pool.allocate_pages(1)
        with pytest.raises(AssertionError, match="pages"):
            cache.audit()

    def test_an_audit_finds_a_lost_lease(self, cache: Cache) -> None:
        store(cache, "a")
        next(iter(cache.index)).leases += 1
        with pytest.raises(AssertionError, match="leases"):
            cache.audit()

    def test_an_audit_finds_a_lost_pin(self, cache: Cache) -> None:
        store(cache, "a")
        next(iter(cache.index)).pins += 1
        with pytest.raises(AssertionError, match="pins"):
            cache.audit()

    def test_an_audit_finds_a_wrong_chunk_count(self, cache: Cache) -> None:
        store(cache, "a")
        cache.index.chunk_count += 1
        with pytest.raises(AssertionError, match="chunks"):
            cache.audit()

    def test_an_audit_finds_a_ready_chunk_that_is_not_whole(self, cache: Cache) -> None:
        store(cache, "a", 0, 2)
        next(iter(cache.index)).ready = True
        with pytest.raises(AssertionError, match="READY"):
            cache.audit()

    def test_an_audit_finds_a_chunk_that_could_never_be_evicted(self, cache: Cache) -> None:
        store(cache, "a")
        cache.policy.untrack(next(iter(cache.index)))
        with pytest.raises(AssertionError, match="eviction"):
            cache.audit()


def test_keys_have_the_size_of_the_wire() -> None:
    assert len(keys("a")) == KEY_BYTES
