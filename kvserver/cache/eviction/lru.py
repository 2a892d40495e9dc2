"""Least recently used: the chunk whose last use is longest ago leaves L1 first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from kvserver.cache.chunk import Chunk
from kvserver.cache.eviction.rings import (
    NOWHERE,
    Place,
    RingChunk,
    Rings,
    empty_ring,
    link_oldest,
    oldest,
    youngest_first,
)


class LeastRecentlyUsed(Rings):
    name = "lru"
    make_chunk = RingChunk

    def __init__(self) -> None:
        super().__init__()
        self._used = empty_ring()

    def track(self, chunks: Iterable[Chunk], before: Chunk | None = None) -> None:
        used: Place = self._used
        if before is not None and before.ready and self.tracks(before):
            used = cast(RingChunk, before)
        for chunk in cast(Iterable[RingChunk], chunks):  # runs for each chunk of each lookup: no calls in this loop
            if chunk.leases or chunk.pins:
                continue
            if chunk.ready:
                end: Place = used
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
        self.track(chunks)

    def pop_chunk(self) -> Chunk | None:
        chunk = oldest(self._used)
        if chunk is not None:
            self.untrack(chunk)
        return chunk

    def youngest_first(self) -> list[tuple[list[Chunk], bool]]:
        return [(youngest_first(self._used), False)]

    def append(self, chunks: Sequence[Chunk], protected: bool) -> None:
        link_oldest(chunks, self._used)
