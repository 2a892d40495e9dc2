"""Frequency with ageing (LFU-DA, Arlitt et al. 2000): what was used often leaves L1 late, unless that was long ago.

A chunk's rank is its uses, MOST_USES at most, above the rank of the chunk that was evicted last when it was used last. So the time in which a
use counts is measured in evictions: a chunk that was used n times outlasts about n times as many new chunks as one that was only stored. Among
equal ranks the least recently used chunk leaves first. Every use of a chunk is one of its prefix, so no chunk is evicted before the
chunks behind it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from kvserver.cache.chunk import Chunk, Namespace
from kvserver.cache.eviction.rings import NOWHERE, Place, RingChunk, Rings, empty_ring, oldest

MOST_USES = 8


class _CountedChunk(RingChunk):
    """`uses` counts its store, too."""

    __slots__ = ("uses",)

    def __init__(self, namespace: Namespace, key: bytes) -> None:
        super().__init__(namespace, key)
        self.uses = 1


class LeastFrequentlyUsed(Rings):
    """A ring for each rank from `_evicted_rank` on."""

    name = "lfu"
    make_chunk = _CountedChunk

    def __init__(self) -> None:
        super().__init__()
        self._ranks = [empty_ring() for _ in range(MOST_USES + 1)]  # rank r is number r modulo their number
        self._evicted_rank = 0

    def track(self, chunks: Iterable[Chunk], before: Chunk | None = None) -> None:
        place: Place | None = None
        if before is not None and before.ready and self.tracks(before):
            place = cast(RingChunk, before)
        ranks, lowest = self._ranks, self._evicted_rank
        for chunk in cast(Iterable[_CountedChunk], chunks):  # runs for each chunk of each lookup: no calls in this loop
            if chunk.leases or chunk.pins:
                continue
            if chunk.ready:
                end = place or ranks[(lowest + chunk.uses) % (MOST_USES + 1)]
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

    def use(self, chunks: Iterable[Chunk]) -> None:
        used = list(cast(Iterable[_CountedChunk], chunks))
        for chunk in used:
            if chunk.uses < MOST_USES:
                chunk.uses += 1
        self.track(used)

    def pop_chunk(self) -> Chunk | None:
        chunk = None
        for rank in range(self._evicted_rank, self._evicted_rank + MOST_USES + 1):
            if chunk is not None:
                break
            if (chunk := oldest(self._ranks[rank % (MOST_USES + 1)])) is not None:
                self._evicted_rank = rank
        if chunk is not None:
            self.untrack(chunk)
        return chunk
