"""What each model has in L1: exact sums, of a bounded number of names."""

from __future__ import annotations

import pytest
from hypothesis import given
from support.properties import Dice, examples, walks
from support.turns import repeat
from support.worker import make_keys

from kvserver.cache import POLICIES, Cache, PagePool, one_group
from kvserver.config import Placement, Settings
from kvserver.protocol.measurements import MOST_MODELS, OTHER
from kvserver.server.status import l1_status

PAGE = 4096
A, B = b"a" * 32, b"b" * 32


def make_cache() -> Cache:
    return Cache(PagePool(10 * PAGE, PAGE), POLICIES[Settings().eviction_policy]())


cache = pytest.fixture(make_cache)


def store(
    cache: Cache, model_name: str, namespace: bytes, keys: list[bytes], pages: int = 1, copied: bool = True
) -> None:
    plan = cache.plan_store(namespace, one_group(1), b"".join(keys), pages * PAGE, model_name=model_name)
    cache.finish_store(plan, copied)


def models(cache: Cache) -> dict[str, tuple[int, int, int]]:
    """(pages, chunks, evicted chunks) by name."""
    shown = l1_status(cache, Placement()).models
    return {name: (of.used_bytes // PAGE, of.chunks, of.evictions) for name, of in shown.items()}


def test_each_model_has_what_its_engines_stored(cache: Cache) -> None:
    store(cache, "a", A, make_keys(3))
    store(cache, "b", B, make_keys(2), pages=2)
    assert models(cache) == {"a": (3, 3, 0), "b": (4, 2, 0)}


def test_an_eviction_counts_for_the_model_that_lost_the_chunk(cache: Cache) -> None:
    store(cache, "a", A, make_keys(8))
    store(cache, "b", B, make_keys(2), pages=2)
    assert models(cache) == {"a": (6, 6, 2), "b": (4, 2, 0)}
    cache.audit()


def test_a_store_in_flight_counts_and_one_that_failed_does_not(cache: Cache) -> None:
    plan = cache.plan_store(A, one_group(1), b"".join(make_keys(3)), PAGE, model_name="a")
    assert models(cache) == {"a": (3, 3, 0)}
    cache.finish_store(plan, copied=False)
    assert models(cache) == {"a": (0, 0, 0)}


def test_cleared_chunks_leave_at_once_and_their_memory_when_it_is_free(cache: Cache) -> None:
    store(cache, "a", A, make_keys(4))
    store(cache, "b", B, make_keys(1))
    cache.clear_namespaces(A)
    assert models(cache) == {"a": (4, 0, 0), "b": (1, 1, 0)}
    repeat(cache.step)
    assert models(cache) == {"a": (0, 0, 0), "b": (1, 1, 0)}


def test_engines_that_share_a_namespace_have_one_model(cache: Cache) -> None:
    """The name is the one that the engine serves it under: two engines may share KV and call it differently."""
    store(cache, "a", A, make_keys(2))
    store(cache, "the same, by another name", A, make_keys(3))
    assert models(cache) == {"a": (5, 5, 0)}


def never_loaded(cache: Cache) -> dict[str, int]:
    return {name: of.never_loaded for name, of in l1_status(cache, Placement()).models.items()}


def load(cache: Cache, namespace: bytes, keys: list[bytes], copied: bool = True) -> None:
    cache.finish_load(cache.plan_load(namespace, b"".join(keys)), copied)


def test_a_chunk_that_was_never_loaded_counts_when_it_is_evicted(cache: Cache) -> None:
    old, new = make_keys(10), make_keys(10, "new")
    store(cache, "a", A, old)
    load(cache, A, old[:4])
    load(cache, A, old[4:6], copied=False)
    store(cache, "b", B, new)
    assert models(cache) == {"a": (0, 0, 10), "b": (10, 10, 0)}
    assert never_loaded(cache) == {"a": 6, "b": 0}
    store(cache, "a", A, old)
    assert never_loaded(cache) == {"a": 6, "b": 10}
    store(cache, "b", B, new)
    assert never_loaded(cache) == {"a": 16, "b": 10}, "a load of an earlier residence does not count"


def test_incomplete_and_cleared_chunks_do_not_count_as_never_loaded(cache: Cache) -> None:
    plan = cache.plan_store(A, one_group(2), b"".join(make_keys(4)), PAGE, model_name="a")
    cache.finish_store(plan, copied=True)  # one rank of two
    store(cache, "b", B, make_keys(10, "all of L1"))
    assert models(cache)["a"] == (0, 0, 4)
    cache.clear_namespaces()
    repeat(cache.step)
    assert never_loaded(cache) == {"a": 0, "b": 0}


def test_models_beyond_the_bound_share_one_series() -> None:
    cache = Cache(PagePool(4 * MOST_MODELS * PAGE, PAGE), POLICIES[Settings().eviction_policy]())
    for number in range(3 * MOST_MODELS):
        store(cache, f"model {number}", number.to_bytes(32, "big"), make_keys(1))
    shown = models(cache)
    assert len(shown) == MOST_MODELS + 1
    assert shown["model 0"] == (1, 1, 0)
    assert shown[OTHER] == (2 * MOST_MODELS, 2 * MOST_MODELS, 0)
    cache.audit()


@given(steps=walks(100))
@examples(20)
def test_the_sums_of_all_models_are_those_of_l1(steps: list[Dice]) -> None:
    cache, keys = make_cache(), make_keys(12, "walk")
    open_plans = []
    for rng in steps:
        namespace, model, ranks = rng.choice([(A, "a", 1), (B, "b", 2), (b"c" * 32, "a", 1)])
        match rng.randrange(6):
            case 0 | 1 | 2:
                chosen = b"".join(rng.sample(keys, rng.randint(1, 5)))
                size = (2 if namespace == A else 1) * PAGE
                steps, rank = rng.choice([1, 5, 1000]), rng.randrange(ranks)
                plan = cache.plan_store(
                    namespace,
                    one_group(ranks),
                    chosen,
                    size,
                    slots=range(rank, rank + 1),
                    steps=steps,
                    model_name=model,
                )
                open_plans.append(plan)
            case 3 if open_plans:
                plan = open_plans.pop(rng.randrange(len(open_plans)))
                cache.finish_store(plan, plan.complete and rng.random() < 0.7)
            case 4 if rng.random() < 0.2:
                cache.clear_namespaces(rng.choice([b"", A, B]))
            case _:
                cache.step(rng.randint(1, 3))
        sums = [sum(column) for column in zip(*models(cache).values(), strict=True)] or [0, 0, 0]
        assert sums == [cache.pool.used_pages, cache.index.chunk_count, cache.space.evicted_chunks]
    for plan in open_plans:
        cache.finish_store(plan, copied=False)
    repeat(cache.step)
    cache.audit()
