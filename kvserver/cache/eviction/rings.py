"""Rings that run through the chunks themselves: no chunk needs a second object for its place in an order.

Owns: a chunk's neighbours. Refuses to know: which ring means what. A chunk is in one ring at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, cast

from kvserver.cache.chunk import Chunk, Namespace


class End:
    """End of a ring: its `younger` is the oldest chunk, its `older` the youngest."""

    __slots__ = ("older", "younger")
    older: Place
    younger: Place


class RingChunk(Chunk):
    """A chunk and its neighbours in a ring, or NOWHERE."""

    __slots__ = ("older", "younger")
    older: Place
    younger: Place

    def __init__(self, namespace: Namespace, key: bytes) -> None:
        super().__init__(namespace, key)
        self.older = self.younger = NOWHERE


Place: TypeAlias = End | RingChunk
NOWHERE = End()


def empty_ring() -> End:
    end = End()
    end.older = end.younger = end
    return end


def oldest(ring: End) -> RingChunk | None:
    return cast(RingChunk, ring.younger) if ring.younger is not ring else None


def youngest_first(ring: End) -> list[Chunk]:
    chunks: list[Chunk] = []
    place = ring.older
    while place is not ring:
        chunks.append(cast(RingChunk, place))
        place = place.older
    return chunks


def link(chunk: RingChunk, younger: Place) -> None:
    """Make the chunk the next older one of `younger`; of an end: the youngest of its ring. REQUIRES: it is in no ring."""
    older = younger.older
    chunk.older, chunk.younger = older, younger
    older.younger = younger.older = chunk


def link_oldest(chunks: Sequence[Chunk], ring: End) -> None:
    """Make them the oldest of the ring, the last one the oldest. REQUIRES: they are in no ring."""
    younger = ring.younger
    for chunk in cast(Sequence[RingChunk], chunks):
        chunk.younger = younger
        younger.older = chunk
        younger = chunk
    younger.older = ring
    ring.younger = younger


def unlink(chunk: RingChunk) -> None:
    """REQUIRES: it is in a ring."""
    older, younger = chunk.older, chunk.younger
    older.younger, younger.older = younger, older
    chunk.older = chunk.younger = NOWHERE


class Rings:
    """Operations common to all policies that order chunks in rings. A chunk in any ring is tracked, also in one of the shares."""

    def __init__(self) -> None:
        self._incomplete = empty_ring()

    def pop_incomplete(self) -> Chunk | None:
        chunk = oldest(self._incomplete)
        if chunk is not None:
            self.untrack(chunk)
        return chunk

    def untrack(self, chunk: Chunk) -> None:
        chunk = cast(RingChunk, chunk)
        if chunk.older is not NOWHERE:
            unlink(chunk)

    def tracks(self, chunk: Chunk) -> bool:
        return cast(RingChunk, chunk).older is not NOWHERE

    def younger(self, chunk: Chunk) -> Chunk | None:
        younger = cast(RingChunk, chunk).younger
        return younger if isinstance(younger, RingChunk) else None
