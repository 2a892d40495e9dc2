"""S3-FIFO (Yang et al., SOSP 2023): two queues in the order of stores; a use moves nothing, it is counted.

New chunks enter the small queue. At its end, what was used moves on to the main queue, and the rest is evicted. At the end of the main queue
what was used begins anew, with one use less. What is stored again soon after its eviction enters the main queue at once.

Here one use is enough to move on, where the paper wants two: a prompt's first chunks are older than what other requests store
behind them, and would be evicted before it. Even so a chunk may leave before the chunks behind it, which no lookup finds then.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from kvserver.cache.chunk import Chunk, Namespace
from kvserver.cache.eviction.rings import NOWHERE, RingChunk, Rings, empty_ring, link, oldest, unlink

SMALL_SHARE = 0.1  # of the chunks in both queues
MOST_USES = 3
_NONE, _SMALL, _MAIN = 0, 1, 2
_MOVES = 128  # at most, of one pop_chunk(); then the oldest one leaves, used or not


class _QueueChunk(RingChunk):
    """`queue`: the one that counts the chunk now."""

    __slots__ = ("queue", "uses")

    def __init__(self, namespace: Namespace, key: bytes) -> None:
        super().__init__(namespace, key)
        self.queue = _NONE
        self.uses = 0


class S3Fifo(Rings):
    name = "s3-fifo"
    make_chunk = _QueueChunk

    def __init__(self) -> None:
        super().__init__()
        self._ends = [self._incomplete, empty_ring(), empty_ring()]  # by queue; the incomplete ones have none
        self._counts = [0, 0, 0]

    def track(self, chunks: Iterable[Chunk], before: Chunk | None = None) -> None:
        place = cast(_QueueChunk | None, before)
        if place is not None and not place.queue:
            place = None
        for chunk in cast(Iterable[_QueueChunk], chunks):
            if chunk.queue or chunk.leases or chunk.pins:
                continue
            if not chunk.ready and chunk.detached:
                continue
            if chunk.older is not NOWHERE:
                unlink(chunk)
                self._counts[_NONE] -= 1
            if not chunk.ready:
                queue = _NONE
            elif place is not None:
                queue = place.queue
            else:
                queue = _MAIN if chunk.uses else _SMALL
            link(chunk, self._ends[queue] if place is None or not queue else place)
            chunk.queue = queue
            self._counts[queue] += 1

    def use(self, chunks: Iterable[Chunk]) -> None:
        used = list(cast(Iterable[_QueueChunk], chunks))
        for chunk in used:
            if chunk.uses < MOST_USES:
                chunk.uses += 1
        self.track(used)

    def pop_chunk(self) -> Chunk | None:
        chunk = None
        moves = 0
        while chunk is None and moves < _MOVES and (self._counts[_SMALL] or self._counts[_MAIN]):
            chunk = self._next()
            moves += 1
        chunk = chunk or oldest(self._ends[_SMALL]) or oldest(self._ends[_MAIN])
        if chunk is not None:
            self.untrack(chunk)
        return chunk

    def untrack(self, chunk: Chunk) -> None:
        chunk = cast(_QueueChunk, chunk)
        if chunk.older is not NOWHERE:
            unlink(chunk)
            self._counts[chunk.queue] -= 1
            chunk.queue = _NONE

    def _next(self) -> RingChunk | None:
        """The chunk at the end of a queue if it was not used, else None: it moves on, in the order of the queue."""
        _, small, main = self._counts
        queue = _SMALL if small and (not main or small > SMALL_SHARE * (small + main)) else _MAIN
        chunk = cast(_QueueChunk | None, oldest(self._ends[queue]))
        if chunk is None or not chunk.uses:
            return chunk
        chunk.uses = 0 if queue == _SMALL else chunk.uses - 1
        unlink(chunk)
        link(chunk, self._ends[_MAIN])
        self._counts[queue] -= 1
        self._counts[_MAIN] += 1
        chunk.queue = _MAIN
        return None
