"""A store of more chunks than L1 has room for was refused with TOO_LARGE, so nothing of a long prompt was kept; and a store that
found its first chunks in L1 evicted them to make room for its last ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.slots import pages_of
from support.turns import complete_plan
from support.worker import Worker, make_keys

from kvserver.cache import POLICIES, Cache, PagePool, one_group
from kvserver.protocol import Retrieved, Stored

NS, PAGE = b"n" * 32, 4096
ROOM = 10


def make_cache(pages: int = ROOM) -> Cache:
    return Cache(PagePool(pages * PAGE, PAGE), POLICIES["lru"]())


def store(cache: Cache, keys: list[bytes], rank: int = 0, ranks: int = 1, steps: int = 1 << 30) -> tuple[int, int, int]:
    """`(filled, skipped, starved)`"""
    plan = cache.plan_store(NS, one_group(ranks), b"".join(keys), PAGE, slots=range(rank, rank + 1), steps=steps)
    complete_plan(cache, plan, steps)
    cache.finish_store(plan, copied=True)
    cache.audit()
    return len(plan.chunks), plan.skipped, plan.no_space


def hits(cache: Cache, keys: list[bytes]) -> int:
    found = cache.lookup(NS, b"".join(keys), ("e", "r"), 1e9).hit_chunks
    cache.end_lease(("e", "r"))
    return found


def test_the_prefix_that_fits_is_kept() -> None:
    cache = make_cache()
    keys = make_keys(25)
    assert store(cache, keys) == (ROOM, 0, 15)
    assert hits(cache, keys) == ROOM


def test_the_prefix_that_was_there_is_kept() -> None:
    cache = make_cache()
    keys = make_keys(25)
    store(cache, keys[:4])
    store(cache, make_keys(6))  # of other prompts
    assert store(cache, keys) == (6, 4, 15)
    assert hits(cache, keys) == ROOM


def test_a_plan_in_slices_keeps_what_it_found() -> None:
    cache = make_cache()
    keys = make_keys(25)
    store(cache, make_keys(6))
    store(cache, keys[:4])
    assert store(cache, keys, steps=1) == (6, 4, 15)
    assert hits(cache, keys) == ROOM


def test_all_ranks_keep_the_same_prefix() -> None:
    cache = make_cache()
    keys = make_keys(25)
    assert [store(cache, keys, rank, ranks=2) for rank in (0, 1)] == [(5, 0, 20), (5, 0, 20)]
    assert hits(cache, keys) == 5


def test_a_rank_does_not_evict_what_the_ranks_before_it_stored_for_the_same_chunks() -> None:
    cache = make_cache()
    keys = make_keys(10)
    for first in (0, 5):
        store(cache, keys[first : first + 5], rank=0, ranks=2)
    store(cache, keys[:5], rank=1, ranks=2)
    assert hits(cache, keys) == 5


def test_pages_of_a_prefix_are_its_own() -> None:
    cache = make_cache()
    keys = make_keys(25)
    store(cache, keys)
    chunks = cache.plan_load(NS, b"".join(keys[:ROOM]))
    assert sorted(page for chunk in chunks for page in pages_of(chunk.slot(0))) == list(range(ROOM))
    cache.finish_load(chunks, copied=True)


def test_an_engine_loads_the_prefix_of_a_prompt_larger_than_l1(
    make_daemon: Any, make_worker: Callable[..., Worker]
) -> None:
    daemon = make_daemon(l1_size="128KiB")
    worker = make_worker(daemon)
    keys = make_keys(8)
    blocks = worker.blocks_for(8)
    content = worker.memory.blocks(blocks)
    stored = worker.store(keys, blocks)
    assert stored == Stored(stored=stored.stored, skipped=0, starved=8 - stored.stored)
    assert 0 < stored.stored < 8
    assert daemon.status()["instances"][0]["requests"]["starved_chunks"] == stored.starved
    assert worker.lookup(keys) == stored.stored
    worker.memory.fill()
    fitting = stored.stored * worker.chunk_blocks
    assert worker.load(keys[: stored.stored], blocks[:fitting]) == Retrieved(chunks=stored.stored)
    assert worker.memory.blocks(blocks[:fitting]) == content[:fitting]
