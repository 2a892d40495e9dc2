"""Who leaves L1 first.

The contract of a policy:
- `track(chunk)`: from now on it may be a victim. REQUIRES: not queued. Sets `chunk.queued`.
- `victim()`: the chunk that should leave, taken out of the policy, or None if all are held. It must
  never return a chunk that is detached, leased or pinned.
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

    def reset(self) -> None: ...


class LeastRecentlyUsed:
    """Exact LRU by `chunk.last_used`, repaired lazily.

    A use only writes `last_used`, which never falls while an entry stands (but to 0: evict first). The heap may hold an
    older value; an entry that proves stale when it reaches the top is put back with the present one.
    So the top whose value is current is the true minimum.
    """

    name = "lru"

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Chunk]] = []
        self._serial = 0  # breaks ties, so that chunks are never compared

    def track(self, chunk: Chunk) -> None:
        assert not chunk.queued
        chunk.queued = True
        self._serial += 1
        heapq.heappush(self._heap, (chunk.last_used, self._serial, chunk))

    def victim(self) -> Chunk | None:
        while self._heap:
            last_used, serial, chunk = self._heap[0]
            if chunk.detached or chunk.leases or chunk.pins:
                heapq.heappop(self._heap)
                chunk.queued = False
            elif chunk.last_used > last_used:
                heapq.heapreplace(self._heap, (chunk.last_used, serial, chunk))
            else:
                heapq.heappop(self._heap)
                chunk.queued = False
                return chunk
        return None

    def reset(self) -> None:
        for _, _, chunk in self._heap:
            chunk.queued = False
        self._heap.clear()


POLICIES: dict[str, type[EvictionPolicy]] = {"lru": LeastRecentlyUsed}
