"""How long a lookup's lease delays the eviction of what it found."""

from __future__ import annotations

import pytest

from kvserver.cache import Cache
from kvserver.protocol import KVServerError
from unit.cache.small_cache import FOREVER, NS, OTHER, A, B, free_all, keys, plan, store, which


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
