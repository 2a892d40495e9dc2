"""The L1 of one machine without its bytes: the daemon's own cache, in which a block is one page.

Owns: the order in which a request's lookup, load, store and end reach the cache. Refuses to know: traces, other machines.

A request begins and ends at its timestamp: its lookup leases what it finds, its load reads it, its store writes the whole
prompt, its end ends the lease, and only then comes the next request. A trace does not state when a request ended, so no lease of
one request delays the eviction of its blocks for another, as it does in a daemon for as long as the first one runs.
"""

from __future__ import annotations

from kvserver.cache import POLICIES, Cache, Chunk, PagePool, one_group
from kvserver.protocol import KEY_BYTES

_NAMESPACE = bytes(KEY_BYTES)
_PAGE_BYTES = 4096  # of a block
_LEASE_SECONDS = 60.0
_OWNER = ("replay", "request")


class BareL1:
    """`blocks`: the capacity, at least 1."""

    def __init__(self, blocks: int, policy: str) -> None:
        self._cache = Cache(PagePool(blocks * _PAGE_BYTES, _PAGE_BYTES), POLICIES[policy]())
        self._groups = one_group(1)

    def find(self, keys: bytes) -> list[Chunk]:
        """The resident blocks before the first absent one. Nothing becomes younger by it."""
        namespace = self._cache.index.find_namespace(_NAMESPACE)
        return namespace.chunks.find_leading(keys) if namespace is not None else []

    def serve(self, keys: bytes, now: float) -> int:
        """How many of the prompt's blocks, from the first on, are found; all of them are stored then. `now` never decreases."""
        cache = self._cache
        cache.expire_leases(now)
        found = cache.lookup(_NAMESPACE, keys, _OWNER, now + _LEASE_SECONDS).hit_chunks
        if found:
            cache.finish_load(cache.plan_load(_NAMESPACE, keys[: found * KEY_BYTES]), copied=True)
        if keys:
            plan = cache.plan_store(_NAMESPACE, self._groups, keys, _PAGE_BYTES)
            cache.finish_store(plan, copied=True)
        cache.end_lease(_OWNER)
        return found
