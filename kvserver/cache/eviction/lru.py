"""Least recently used: the chunk whose last use is longest ago leaves L1 first."""

from __future__ import annotations

from collections.abc import Iterable

from kvserver.cache.index import NOWHERE, Chunk, RingNode


class LeastRecentlyUsed:
    """Two rings through the chunks themselves. A ring's end node is not a chunk: its `younger` is the oldest chunk.

    The first ring has the incomplete chunks that no store fills: they are evicted before all others.
    """

    name = "lru"

    def __init__(self) -> None:
        self._incomplete = _empty_ring()
        self._used = _empty_ring()

    def track(self, chunks: Iterable[Chunk]) -> None:
        used = self._used
        for chunk in chunks:  # runs for each chunk of each lookup: no calls in this loop
            if chunk.leases or chunk.pins:
                continue
            if chunk.ready:
                end = used
            elif chunk.detached:
                continue
            else:
                end = self._incomplete
            older = chunk.older
            if older is not NOWHERE:
                younger = chunk.younger
                older.younger = younger
                younger.older = older
            youngest = end.older
            chunk.older = youngest
            chunk.younger = end
            youngest.younger = chunk
            end.older = chunk

    def oldest_chunk(self) -> Chunk | None:
        for end in (self._incomplete, self._used):
            if isinstance(oldest := end.younger, Chunk):
                return oldest
        return None

    def untrack(self, chunk: Chunk) -> None:
        assert chunk.tracked
        chunk.older.younger, chunk.younger.older = chunk.younger, chunk.older
        chunk.older = chunk.younger = NOWHERE


def _empty_ring() -> RingNode:
    end = RingNode()
    end.older = end.younger = end
    return end
