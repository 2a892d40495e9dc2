"""Contract of an eviction policy: which chunk leaves L1 next.

The cost of a call is bounded by the chunks that it is given, so one turn of the loop stays bounded. A policy has no clock: it
measures age in evictions and by order. So its parameters hold for any size of L1 and any rate of requests.

Owns: the order of eviction, and what it must remember of each chunk. Refuses to know: pages, and the owners of leases.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from kvserver.cache.chunk import Chunk, Namespace


class EvictionPolicy(Protocol):
    """Order in which chunks are evicted. REQUIRES: every chunk that is passed to a policy was made by its make_chunk()."""

    name: str

    def make_chunk(self, namespace: Namespace, key: bytes) -> Chunk:
        """A new chunk, not tracked: of a subclass of Chunk whose further slots are the policy's own."""

    def track(self, chunks: Iterable[Chunk], before: Chunk | None = None) -> None:
        """Make chunks that were stored or read candidates, in this order; before the chunk `before`, if that is tracked.

        Leased and pinned chunks are left out: the cache tracks them when their last lease or pin ends. Freed chunks are left out,
        too.
        """

    def use(self, chunks: Iterable[Chunk]) -> None:
        """Track chunks that were used again, as track(): a request that had found them ended, or they are stored soon after their eviction."""

    def pop_incomplete(self) -> Chunk | None:
        """Pop a chunk that is not READY and that no store fills, as pop_chunk(). The cache evicts these before all others."""

    def pop_chunk(self) -> Chunk | None:
        """Untrack and return the READY chunk to evict next; None if none is tracked.

        The chunk may have been leased or pinned since it was tracked. Then the cache does not evict it, and tracks it
        again when its last lease or pin ends.
        """

    def younger(self, chunk: Chunk) -> Chunk | None:
        """A tracked chunk that was stored or used next after this one, if the policy knows it. The cache frees in this order."""

    def untrack(self, chunk: Chunk) -> None:
        """Remove the chunk from the order, if it is tracked."""

    def tracks(self, chunk: Chunk) -> bool: ...

    def youngest_first(self) -> list[tuple[list[Chunk], bool]]:
        """The READY chunks that are tracked, the next to evict last; True: the policy protects these."""

    def append(self, chunks: Sequence[Chunk], protected: bool) -> None:
        """Make READY chunks the oldest candidates, the last one the oldest, of those that are protected or of those that are not.

        REQUIRES: none is tracked.
        """
