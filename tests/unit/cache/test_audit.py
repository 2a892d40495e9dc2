"""The accounting of L1 balances, and an audit finds what does not."""

from __future__ import annotations

import pytest

from kvserver.cache import Cache
from unit.cache.small_cache import NS, keys, plan, store


class TestAccounting:
    def test_pins_are_those_of_open_plans(self, cache: Cache) -> None:
        filling = plan(cache, "abc")
        assert cache.space.pins == 3
        cache.finish_store(filling, copied=True)
        loading = cache.plan_load(NS, keys("ab"))
        assert cache.space.pins == 2
        cache.audit()
        cache.finish_load(loading, copied=True)
        assert cache.space.pins == 0
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
