"""Segmented LRU (SLRU, Karedla et al. 1994): chunks that were used again leave L1 after chunks that were only stored.

New chunks are on probation. A chunk that is used again joins the protected segment, which has at most PROTECTED_SHARE of the
chunks. Its least recently used ones go back to probation, as the youngest there. Each segment is an order of last use. Every use
of a chunk is a use of its prefix, so no chunk is evicted before the chunks behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from kvserver.cache.chunk import Chunk, Namespace
from kvserver.cache.eviction.rings import (
    NOWHERE,
    Place,
    RingChunk,
    Rings,
    empty_ring,
    link,
    link_oldest,
    oldest,
    unlink,
    youngest_first,
)

PROTECTED_SHARE = 0.4
_USED, _COUNTED = 1, 2
_PROBATION, _PROTECTED = _COUNTED, _COUNTED | _USED
_DEMOTED = 2  # at most, by one pop_chunk()


class _SegmentChunk(RingChunk):
    """`state`: bits. _USED: its segment is the protected one. _COUNTED: it is in its segment now."""

    __slots__ = ("state",)

    def __init__(self, namespace: Namespace, key: bytes) -> None:
        super().__init__(namespace, key)
        self.state = 0


class ProtectedSegment(Rings):
    name = "slru"
    make_chunk = _SegmentChunk

    def __init__(self) -> None:
        super().__init__()
        self._probation, self._protected = empty_ring(), empty_ring()
        self._counts = [0, 0, 0, 0]  # by state; those of chunks in no segment have no meaning

    def track(self, chunks: Iterable[Chunk], before: Chunk | None = None) -> None:
        place = cast(_SegmentChunk, before) if before is not None and before.ready and self.tracks(before) else None
        counts, probation, protected = self._counts, self._probation, self._protected
        end: Place
        for chunk in cast(Iterable[_SegmentChunk], chunks):  # runs for each chunk of each lookup: no calls in this loop
            if chunk.leases or chunk.pins:
                continue
            if chunk.ready:
                if place is not None:
                    end, state = place, place.state
                elif chunk.state & _USED:
                    end, state = protected, _PROTECTED
                else:
                    end, state = probation, _PROBATION
            elif chunk.detached:
                continue
            else:
                end, state = self._incomplete, chunk.state & _USED
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
            if chunk.state != state:
                counts[chunk.state] -= 1
                counts[state] += 1
                chunk.state = state

    def use(self, chunks: Iterable[Chunk]) -> None:
        used = list(cast(Iterable[_SegmentChunk], chunks))
        end = self._protected
        # As track(), for chunks that stay protected: the most common case, in half of its time.
        for number, chunk in enumerate(used):
            if chunk.state != _PROTECTED or not chunk.ready or chunk.leases or chunk.pins:
                del used[:number]
                break
            older, younger = chunk.older, chunk.younger
            older.younger = younger
            younger.older = older
            youngest = end.older
            chunk.older = youngest
            chunk.younger = end
            youngest.younger = chunk
            end.older = chunk
        else:
            return
        for chunk in used:
            if not chunk.state & _USED:
                self.untrack(chunk)
                chunk.state |= _USED
        self.track(used)

    def pop_chunk(self) -> Chunk | None:
        self._demote()
        chunk = oldest(self._probation) or oldest(self._protected)
        if chunk is not None:
            self.untrack(chunk)
        return chunk

    def untrack(self, chunk: Chunk) -> None:
        chunk = cast(_SegmentChunk, chunk)
        if chunk.older is not NOWHERE:
            unlink(chunk)
            self._counts[chunk.state] -= 1
            chunk.state &= _USED

    def youngest_first(self) -> list[tuple[list[Chunk], bool]]:
        return [(youngest_first(self._protected), True), (youngest_first(self._probation), False)]

    def append(self, chunks: Sequence[Chunk], protected: bool) -> None:
        ring, state = (self._protected, _PROTECTED) if protected else (self._probation, _PROBATION)
        for chunk in cast(Sequence[_SegmentChunk], chunks):
            chunk.state = state
        self._counts[state] += len(chunks)
        link_oldest(chunks, ring)

    def _demote(self) -> None:
        """Back to probation with what is too much in the protected segment, but with no more than _DEMOTED chunks.

        Nothing gives way before an eviction: until L1 is full, the number of chunks does not show how many it can have.
        """
        counts = self._counts
        excess = int(counts[_PROTECTED] - PROTECTED_SHARE * (counts[_PROBATION] + counts[_PROTECTED]))
        for _ in range(min(_DEMOTED, excess)):
            chunk = cast(_SegmentChunk, oldest(self._protected))
            self.untrack(chunk)
            link(chunk, self._probation)
            chunk.state = _PROBATION
            counts[_PROBATION] += 1
