"""Who leaves L1 first.

The contract of a policy:
- `track(chunk)`: from now on it may be a victim. REQUIRES: not queued. Sets `chunk.queued`.
- `victim()`: the chunk that should leave, taken out of the policy, or None if all are held. It must
  never return a chunk that is detached, leased or pinned.
- `forget(chunk)`: it was detached, and is never tracked again. REQUIRES: queued.
- `reset()`: forget all.
A chunk that is held when its turn comes is dropped from the policy (`queued` = False); the cache
tracks it again when the last hold ends.

Owns: the order. Refuses to know: pages and leases' owners.
"""

from __future__ import annotations

import heapq
from typing import Protocol

from kvserver.index import Chunk


class EvictionPolicy(Protocol):
    name: str

    def track(self, chunk: Chunk) -> None: ...

    def victim(self) -> Chunk | None: ...

    def forget(self, chunk: Chunk) -> None: ...

    def reset(self) -> None: ...

    def __len__(self) -> int:
        """Chunks that it keeps in memory, at most about twice those that may be victims."""
        ...


class LeastRecentlyUsed:
    """Exact LRU by `chunk.last_used`, repaired lazily.

    A use only writes `last_used`, which never falls while an entry stands (but to 0: evict first). The heap is ordered
    by `queued_at`, which may be an older value; an entry that proves stale when it reaches the top is put back with the
    present one. So the top whose value is current is the true minimum. Ticks are unique; what was never used has
    negative ones of this class's own, in the order it was tracked.
    """

    name = "lru"

    def __init__(self) -> None:
        self._heap: list[Chunk] = []
        self._unused = _FIRST
        self._forgotten = 0  # entries of forgotten chunks; their `queued` is False

    def track(self, chunk: Chunk) -> None:
        assert not chunk.queued
        chunk.queued = True
        chunk.queued_at = chunk.last_used
        if not chunk.last_used:
            self._unused += 1
            chunk.queued_at = self._unused
        heapq.heappush(self._heap, chunk)

    def victim(self) -> Chunk | None:
        while self._heap:
            chunk = self._heap[0]
            if not chunk.queued:
                heapq.heappop(self._heap)
                self._forgotten -= 1
            elif chunk.detached or chunk.leases or chunk.pins:
                heapq.heappop(self._heap)
                chunk.queued = False
            elif chunk.last_used and chunk.last_used != chunk.queued_at:
                chunk.queued_at = chunk.last_used
                heapq.heapreplace(self._heap, chunk)
            else:
                heapq.heappop(self._heap)
                chunk.queued = False
                return chunk
        return None

    def forget(self, chunk: Chunk) -> None:
        chunk.queued = False
        self._forgotten += 1
        # Its entry goes with the next sweep, which costs as much as what was forgotten since the last one.
        if self._forgotten > _SWEEP and self._forgotten > len(self._heap) // 2:
            self._heap = [chunk for chunk in self._heap if chunk.queued]
            heapq.heapify(self._heap)
            self._forgotten = 0

    def reset(self) -> None:
        for chunk in self._heap:
            chunk.queued = False
        self._heap.clear()
        self._forgotten = 0

    def __len__(self) -> int:
        return len(self._heap)


_FIRST = -(1 << 62)  # before every tick
_SWEEP = 1024  # forgotten entries below which a sweep is not worth it

POLICIES: dict[str, type[EvictionPolicy]] = {"lru": LeastRecentlyUsed}
