"""Least recently used: the chunk whose last use is longest ago leaves L1 first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias, cast

from kvserver.cache.chunk import Chunk, Namespace


class _End:
    """The end of a ring: its `younger` is the oldest chunk, its `older` the youngest."""

    __slots__ = ("older", "younger")
    older: _Place
    younger: _Place


class _LruChunk(Chunk):
    """A chunk and its neighbours in a ring, or NOWHERE. The rings run through the chunks: no chunk has a second object."""

    __slots__ = ("older", "younger")
    older: _Place
    younger: _Place

    def __init__(self, namespace: Namespace, key: bytes) -> None:
        super().__init__(namespace, key)
        self.older = self.younger = NOWHERE


_Place: TypeAlias = _End | _LruChunk
NOWHERE = _End()


class LeastRecentlyUsed:
    """Two rings. The first has the incomplete chunks that no store fills: they are evicted before all others."""

    name = "lru"
    make_chunk = _LruChunk

    def __init__(self) -> None:
        self._incomplete = _empty_ring()
        self._used = _empty_ring()

    def track(self, chunks: Iterable[Chunk], before: Chunk | None = None) -> None:
        used: _Place = self._used
        if before is not None and before.ready and self.tracks(before):
            used = cast(_LruChunk, before)
        for chunk in cast(Iterable[_LruChunk], chunks):  # runs for each chunk of each lookup: no calls in this loop
            if chunk.leases or chunk.pins:
                continue
            if chunk.ready:
                end: _Place = used
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

    def pop_chunk(self) -> Chunk | None:
        for end in (self._incomplete, self._used):
            if isinstance(oldest := end.younger, _LruChunk):
                assert oldest.older is not NOWHERE, "a chunk that is not tracked is in a ring"
                self.untrack(oldest)
                return oldest
        return None

    def younger(self, chunk: Chunk) -> Chunk | None:
        younger = cast(_LruChunk, chunk).younger
        return younger if isinstance(younger, _LruChunk) else None

    def untrack(self, chunk: Chunk) -> None:
        chunk = cast(_LruChunk, chunk)
        if chunk.older is not NOWHERE:
            chunk.older.younger, chunk.younger.older = chunk.younger, chunk.older
            chunk.older = chunk.younger = NOWHERE

    def tracks(self, chunk: Chunk) -> bool:
        return cast(_LruChunk, chunk).older is not NOWHERE


def _empty_ring() -> _End:
    end = _End()
    end.older = end.younger = end
    return end
