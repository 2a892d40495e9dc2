"""Of a lookup all tokens behind the first missing chunk counted under that chunk's reason: one chunk evicted and 39 never stored
were 40 chunks that a larger L1 would have had. And of a large L1 what was evicted was soon forgotten."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from support.daemon import wait_until
from support.turns import repeat
from support.worker import Worker, make_keys

from kvserver.cache import POLICIES, Cache, MissReason, PagePool, one_group
from kvserver.cache.misses import EvictedKeys

NS, OTHER, PAGE = b"n" * 32, b"o" * 32, 4096


def store(cache: Cache, keys: list[bytes], namespace: bytes = NS, copied: bool = True) -> None:
    plan = cache.plan_store(namespace, one_group(1), b"".join(keys), PAGE)
    if copied:
        cache.finish_store(plan, copied=True)


def evicted(cache: Cache, keys: list[bytes]) -> None:
    """They were stored, and others had to be evicted for them alone."""
    store(cache, keys)
    store(cache, make_keys(cache.pool.pages), b"x" * 32)
    assert cache.index.find_namespace(NS) is None
    cache.clear_namespaces(b"x")
    repeat(cache.step)


def reasons(cache: Cache, keys: list[bytes], first: int = 0) -> dict[MissReason, int]:
    outcome = cache.lookup(NS, b"".join(keys), ("engine", "request"), 1e9)
    assert outcome.hit_chunks == first
    return dict(outcome.missed)


@pytest.fixture
def cache() -> Cache:
    return Cache(PagePool(64 * PAGE, PAGE), POLICIES["lru"]())


def test_a_chunk_counts_under_its_own_reason(cache: Cache) -> None:
    keys = make_keys(40)
    evicted(cache, keys[:1])
    assert reasons(cache, keys) == {MissReason.EVICTED: 1, MissReason.NEVER_STORED: 39}


def test_each_reason_is_found_in_one_lookup(cache: Cache) -> None:
    keys = make_keys(10)
    evicted(cache, keys[1:3])
    store(cache, keys[:1])
    store(cache, keys[3:6], copied=False)
    store(cache, keys[6:8], OTHER)
    assert reasons(cache, keys, first=1) == {
        MissReason.EVICTED: 2, MissReason.FILLING: 3, MissReason.OTHER_NAMESPACE: 2, MissReason.NEVER_STORED: 2,
    }  # fmt: skip


def test_a_ready_chunk_behind_a_hole_counts_under_the_reason_of_the_hole(cache: Cache) -> None:
    keys = make_keys(6)
    evicted(cache, keys[:2])
    store(cache, keys[2:5])
    assert reasons(cache, keys) == {MissReason.EVICTED: 5, MissReason.NEVER_STORED: 1}


def test_evicted_chunks_behind_a_never_stored_chunk_count_as_never_stored(cache: Cache) -> None:
    keys = make_keys(6)
    evicted(cache, keys[3:])
    assert reasons(cache, keys) == {MissReason.NEVER_STORED: 6}


@pytest.mark.parametrize("removed", [0, 1, 127, 5000, 16384])
def test_of_very_many_chunks_the_shares_are_right_and_none_is_lost(removed: int) -> None:
    cache = Cache(PagePool(16384 * PAGE, PAGE), POLICIES["lru"]())
    keys = make_keys(16384, "many")
    if removed:
        evicted(cache, keys[:removed])
    found = reasons(cache, keys)
    assert sum(found.values()) == 16384
    assert abs(found.get(MissReason.EVICTED, 0) - removed) <= 128, (
        "more than the distance between two that are looked at"
    )


def test_evicted_key_that_was_forgotten_counts_as_the_key_behind_it() -> None:
    """Of a full memory up to one in a hundred is lost. The first one looked at once made all behind it chunks that were never stored."""
    cache = Cache(PagePool(16384 * PAGE, PAGE), POLICIES["lru"]())
    keys = make_keys(32_768)
    for half in (keys[:16384], keys[16384:]):
        evicted(cache, half)
    remembered = [(NS, key) in cache.space.evicted_keys for key in keys]
    lost = [at for at, (one, behind) in enumerate(itertools.pairwise(remembered)) if behind and not one]
    assert len(lost) > 20
    for at in lost:
        assert reasons(cache, keys[at : at + 2]) == {MissReason.EVICTED: 2}


@pytest.mark.parametrize("chunks", [1, 100_000, 300_000])
def test_as_many_evicted_keys_are_remembered_as_l1_has_chunks(chunks: int) -> None:
    remembered = EvictedKeys()
    source = random.Random(1)
    keys = [source.randbytes(32) for _ in range(2 * chunks + 40_000)]
    for key in keys:
        remembered.add(NS, key, chunks)
    last = keys[-max(chunks, 32_768) :]
    assert sum((NS, key) in remembered for key in last) > 0.97 * len(last)
    strangers = [source.randbytes(32) for _ in range(20_000)]
    assert sum((NS, key) in remembered for key in strangers) < 5
    assert remembered.bytes <= max(1 << 20, 17 * chunks)


def test_operators_see_each_reason(make_daemon: Any, make_worker: Callable[..., Worker]) -> None:
    daemon = make_daemon(l1_size="1MiB")
    worker = make_worker(daemon)
    keys, tokens = make_keys(40), worker.chunk_blocks * 16
    worker.store(keys[:1], worker.blocks_for(1))
    wait_until(
        lambda: worker.store(make_keys(1), worker.blocks_for(1)) and daemon.status()["l1"]["evictions"],
        what="an eviction",
    )
    assert worker.lookup(keys) == 0
    (instance,) = daemon.status()["instances"]
    missed = {reason: count for reason, count in instance["requests"]["missed_tokens"].items() if count}
    assert missed == {"evicted": tokens, "never_stored": 39 * tokens}
