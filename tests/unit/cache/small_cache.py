"""A cache of few pages, whose chunks are each named by a character."""

from __future__ import annotations

import hashlib

from support.turns import repeat

from kvserver.cache import POLICIES, Cache, PagePool, StorePlan, one_group
from kvserver.config import Settings

PAGE = 4096
NS, OTHER = b"n" * 32, b"o" * 32
FOREVER = 1e9
A, B = ("engine", "request-a"), ("engine", "request-b")


def keys(names: str) -> bytes:
    """One key per character."""
    return b"".join(hashlib.sha256(name.encode()).digest() for name in names)


def make_cache(pages: int) -> Cache:
    return Cache(PagePool(pages * PAGE, PAGE), POLICIES[Settings().eviction_policy]())


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
