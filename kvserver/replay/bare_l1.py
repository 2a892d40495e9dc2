"""L1 of one machine without its bytes: the daemon's own cache, in which a block is one page. A shared L2 is one, too.

A request begins and ends at its timestamp. Its lookup leases what it finds, its load reads it, its store writes the whole prompt,
its end ends the lease, and only then comes the next request. In a daemon a lease delays evictions for as long as its request
runs. A trace does not state when a request ended, so here no lease delays an eviction for another request.

Owns: the order in which a request's lookup, fill, load, store and end reach the cache. Refuses to know: traces, other machines.
"""

from __future__ import annotations

from typing import NamedTuple

from kvserver.cache import POLICIES, Cache, Chunk, PagePool, SessionKey, one_group
from kvserver.protocol import KEY_BYTES

_NAMESPACE = bytes(KEY_BYTES)
_PAGE_BYTES = 4096  # of a block
_LEASE_SECONDS = 60.0
_OWNER = ("replay", "request")


class Served(NamedTuple):
    """Blocks of one prompt: found in L1, read from L2, and how many from the first on are resident afterwards."""

    l1: int
    l2: int
    resident: int


class BareL1:
    """L1 of one machine. `blocks`: the capacity, at least 1."""

    def __init__(self, blocks: int, policy: str) -> None:
        self._cache = Cache(PagePool(blocks * _PAGE_BYTES, _PAGE_BYTES), POLICIES[policy]())
        self._groups = one_group(1)

    def find(self, keys: bytes) -> list[Chunk]:
        """The resident blocks before the first absent one. Nothing becomes younger by it."""
        namespace = self._cache.index.find_namespace(_NAMESPACE)
        return namespace.chunks.find_leading(keys) if namespace is not None else []

    def store(self, keys: bytes, session: SessionKey | None = None, *, shares: bool = True) -> tuple[int, int]:
        """Store the blocks from the first on that fit, and make all of these young. Returns how many were stored, and are resident.

        `shares`: not so of a fill, as in the daemon.
        """
        if not keys:
            return 0, 0
        plan = self._cache.plan_store(_NAMESPACE, self._groups, keys, _PAGE_BYTES, session=session, shares=shares)
        return self._cache.finish_store(plan, copied=True), len(plan.prefix)

    def serve(self, keys: bytes, now: float, l2: BareL1 | None = None, session_id: str = "") -> Served:
        """Find the prompt's blocks, read from `l2` those that follow, and store the whole prompt. `now` never decreases."""
        cache, filled = self._cache, 0
        session = SessionKey(_NAMESPACE, b"", session_id) if session_id else None
        found = self._lookup(keys, now, session)
        if l2 is not None and (more := len(l2.find(keys[found * KEY_BYTES :]))):
            filled, _ = self.store(keys[: (found + more) * KEY_BYTES], shares=False)
            found = cache.lookup(_NAMESPACE, keys, _OWNER, now + _LEASE_SECONDS, shares=False).hit_chunks
        if found:
            cache.finish_load(cache.plan_load(_NAMESPACE, keys[: found * KEY_BYTES]), copied=True)
        _, resident = self.store(keys, session)
        cache.end_lease(_OWNER)
        return Served(found - filled, filled, resident)

    def delete(self, session_id: str) -> None:
        """A harness ends the session."""
        sessions = self._cache.sessions
        if (session := sessions.session(SessionKey(_NAMESPACE, b"", session_id))) is not None:
            sessions.delete(session)

    def _lookup(self, keys: bytes, now: float, session: SessionKey | None) -> int:
        return self._cache.lookup(_NAMESPACE, keys, _OWNER, now + _LEASE_SECONDS, session, now=now).hit_chunks
