"""Parts of L1 that are kept for models: what a busy model can take of them, and who may use what is not used."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal

import pytest
from support.worker import make_keys

from kvserver.cache import POLICIES, Cache, PagePool, one_group
from kvserver.protocol.measurements import MOST_MODELS

PAGE = 4096
NAMESPACES = {"a": b"a" * 32, "b": b"b" * 32, "c": b"c" * 32}
Make = Callable[..., Cache]


@pytest.fixture(params=POLICIES)
def make_cache(request: pytest.FixtureRequest) -> Make:
    def make(pages: int = 10, **shares: str) -> Cache:
        fractions = {model: Decimal(share) for model, share in shares.items()}
        return Cache(PagePool(pages * PAGE, PAGE), POLICIES[request.param](), fractions)

    return make


def store(cache: Cache, model: str, keys: list[bytes], steps: int = 1 << 30, tenant: str = "") -> int:
    """Returns how many found no space."""
    plan = cache.plan_store(
        NAMESPACES[model], one_group(1), b"".join(keys), PAGE, model_name=model, steps=steps, tenant=tenant
    )
    calls = 1
    while not plan.complete:
        cache.extend_plan(plan, steps)
        calls += 1
        assert calls < 1000, "a store that never ends"
    cache.finish_store(plan, copied=True)
    return plan.no_space


def pages(cache: Cache) -> dict[str, int]:
    tenants = {f"tenant:{name}": use for name, use in cache.index.tenants.items()}
    return {name: use.pages for name, use in (cache.index.models | tenants).items() if use.pages}


def found(cache: Cache, model: str, keys: list[bytes]) -> int:
    hits = cache.lookup(NAMESPACES[model], b"".join(keys), ("e", "r"), 1.0).hit_chunks
    cache.end_lease(("e", "r"))
    return hits


def test_a_busy_model_leaves_another_its_share(make_cache: Make) -> None:
    cache = make_cache(a="0.3")
    store(cache, "a", make_keys(8, "a"))
    for number in range(50):
        assert store(cache, "b", make_keys(1, number)) == 0
    assert pages(cache) == {"a": 3, "b": 7}
    kept = cache.lookup(NAMESPACES["a"], b"".join(make_keys(8, "a")), ("e", "r"), 1.0).hit_chunks
    assert kept == 3, "the beginning of the prompt stays, which is what can be found"
    cache.end_lease(("e", "r"))
    cache.audit()


def test_unused_share_serves_other_models_until_its_model_stores(make_cache: Make) -> None:
    cache = make_cache(a="0.5")
    store(cache, "b", make_keys(10, "b"))
    assert pages(cache) == {"b": 10}
    for number in range(5):
        assert store(cache, "a", make_keys(1, number)) == 0
    assert pages(cache) == {"a": 5, "b": 5}


def test_a_model_beyond_its_share_competes_by_the_policy(make_cache: Make) -> None:
    cache = make_cache(a="0.3")
    store(cache, "b", make_keys(3, "old"))
    store(cache, "a", make_keys(7, "a"))
    store(cache, "b", make_keys(3, "b"))  # its own are the oldest
    assert pages(cache) == {"a": 7, "b": 3}
    store(cache, "b", make_keys(3, "more of b"))
    assert pages(cache) == {"a": 4, "b": 6}


def test_model_replaces_its_own_chunks_where_shares_are_all_of_l1(make_cache: Make) -> None:
    cache = make_cache(a="0.3", b="0.7")
    store(cache, "a", make_keys(3, "a"))
    store(cache, "b", make_keys(7, "b"))
    for number in range(20):
        assert store(cache, "a", make_keys(2, number)) == 0
        assert store(cache, "b", make_keys(3, number)) == 0
    assert pages(cache) == {"a": 3, "b": 7}
    assert store(cache, "c", make_keys(1)) == 1, "nothing is left for others"
    assert pages(cache) == {"a": 3, "b": 7}


def test_chunks_spared_by_a_share_are_evicted_first_once_their_model_has_more(make_cache: Make) -> None:
    cache = make_cache(a="0.5")
    store(cache, "a", make_keys(5, "old"))
    for number in range(20):
        store(cache, "b", make_keys(1, number))
    store(cache, "a", make_keys(5, "new"))
    for number in range(100, 105):
        store(cache, "b", make_keys(1, number))
    assert pages(cache)["a"] == 5
    assert cache.lookup(NAMESPACES["a"], b"".join(make_keys(5, "new")), ("e", "r"), 1.0).hit_chunks == 5


def test_leases_come_before_shares(make_cache: Make) -> None:
    cache = make_cache(a="0.6")
    store(cache, "b", make_keys(10, "b"))
    assert cache.lookup(NAMESPACES["b"], b"".join(make_keys(10, "b")), ("e", "r"), 1.0).hit_chunks == 10
    assert store(cache, "a", make_keys(2, "a")) == 2
    cache.end_lease(("e", "r"))
    assert store(cache, "a", make_keys(2, "a")) == 0


def test_a_spared_chunk_that_is_leased_stays_and_is_in_order_again_afterwards(make_cache: Make) -> None:
    cache = make_cache(a="0.3")
    store(cache, "a", make_keys(3, "a"))
    for number in range(20):
        store(cache, "b", make_keys(1, number))
    assert cache.lookup(NAMESPACES["a"], b"".join(make_keys(3, "a")), ("e", "r"), 1.0).hit_chunks == 3
    store(cache, "a", make_keys(7, "more"))
    for number in range(20, 40):
        store(cache, "b", make_keys(1, number))
    assert cache.lookup(NAMESPACES["a"], b"".join(make_keys(3, "a")), ("e", "s"), 1.0).hit_chunks == 3
    for owner in ("r", "s"):
        cache.end_lease(("e", owner))
    for number in range(40, 100):
        store(cache, "b", make_keys(1, number))
    assert pages(cache) == {"a": 3, "b": 7}
    cache.audit()


def test_sparing_a_share_is_done_once_in_slices(make_cache: Make) -> None:
    """Each spared chunk is looked at by one eviction, and counts as a step of the store that looked at it."""
    cache = make_cache(pages=1000, a="0.9")
    store(cache, "a", make_keys(900, "a"))
    store(cache, "b", make_keys(100, "b"))
    plan = cache.plan_store(NAMESPACES["b"], one_group(1), make_keys(1, "one")[0], PAGE, model_name="b", steps=100)
    calls = 1
    while not plan.complete:
        cache.extend_plan(plan, 100)
        calls += 1
    assert 9 <= calls <= 11
    cache.finish_store(plan, copied=True)
    plan = cache.plan_store(NAMESPACES["b"], one_group(1), make_keys(1, "two")[0], PAGE, model_name="b", steps=100)
    assert plan.complete
    cache.finish_store(plan, copied=True)
    assert pages(cache) == {"a": 900, "b": 100}


def test_a_model_with_a_share_has_a_name_of_its_own_from_the_start(make_cache: Make) -> None:
    cache = make_cache(a="0.5")
    for number in range(MOST_MODELS + 5):
        plan = cache.plan_store(
            number.to_bytes(32, "big"), one_group(1), make_keys(1)[0], PAGE, model_name=f"m{number}"
        )
        cache.finish_store(plan, copied=True)
    store(cache, "a", make_keys(3))
    assert pages(cache)["a"] == 3


# ---- tenants --------------------------------------------------------------------------------------


def test_a_flood_of_one_tenant_leaves_another_its_share_of_the_same_model(make_cache: Make) -> None:
    cache = make_cache(**{"tenant:quiet": "0.3", "tenant:busy": "0.2"})
    prompt = make_keys(3, "quiet")
    store(cache, "a", prompt, tenant="quiet")
    for number in range(50):
        assert store(cache, "a", make_keys(1, number), tenant="busy") == 0
        assert store(cache, "a", make_keys(1, -number - 1)) == 0
    assert pages(cache)["tenant:quiet"] == 3
    assert found(cache, "a", prompt) == 3
    cache.audit()


def test_tenants_without_a_share_and_requests_without_a_tenant_share_the_rest(make_cache: Make) -> None:
    cache = make_cache(a="0.2", **{"tenant:t": "0.5"})
    store(cache, "a", make_keys(2, "a"), tenant="unknown")
    store(cache, "b", make_keys(3, "b"), tenant="unknown")
    assert pages(cache) == {"a": 2, "b": 3}, "the model's share is for tenants without one, too"
    assert cache.space.other_tenants == 2
    for number in range(20):
        store(cache, "b", make_keys(1, number), tenant=f"unknown {number}")
        store(cache, "c", make_keys(1, number), tenant="t")
    assert (pages(cache)["a"], sum(pages(cache).values())) == (2, 10)
    assert pages(cache)["tenant:t"] >= 5
    assert cache.index.tenants.keys() == {"t"}, "nothing is kept of other names"
    assert cache.space.other_tenants == 22
    cache.audit()


def test_a_chunk_stays_with_the_tenant_that_stored_it_first_and_serves_all(make_cache: Make) -> None:
    cache = make_cache(**{"tenant:t": "0.4", "tenant:u": "0.4"})
    prompt = make_keys(3, "shared")
    store(cache, "a", prompt, tenant="t")
    assert store(cache, "a", [*prompt, *make_keys(1, "more")], tenant="u") == 0
    assert found(cache, "a", prompt) == 3
    assert pages(cache) == {"tenant:t": 3, "tenant:u": 1}
    cache.clear_namespaces(NAMESPACES["a"])
    while cache.step():
        pass
    assert (pages(cache), found(cache, "a", prompt)) == ({}, 0)
    store(cache, "a", prompt, tenant="u")
    assert pages(cache) == {"tenant:u": 3}
    cache.audit()


def test_a_model_whose_name_begins_like_a_tenants_share_has_no_part_in_it(make_cache: Make) -> None:
    cache = make_cache(**{"tenant:t": "0.5"})
    plan = cache.plan_store(b"t" * 32, one_group(1), make_keys(1)[0], PAGE, model_name="tenant:t")
    cache.finish_store(plan, copied=True)
    assert cache.index.models["tenant:t"].pages == 1
    assert cache.index.tenants["t"].pages == 0
