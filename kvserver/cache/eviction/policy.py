"""The contract of an eviction policy: which chunk leaves L1 next.

Owns: the order of eviction. Refuses to know: pages, and the owners of leases.

No call costs more than the chunks that it is given, so one turn of the loop stays bounded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from kvserver.cache.index import Chunk


class EvictionPolicy(Protocol):
    name: str

    def track(self, chunks: Iterable[Chunk]) -> None:
        """Make each chunk a candidate and the youngest one, in this order.

        Leased and pinned chunks are left out: the cache tracks them when their last lease or pin ends. Freed chunks
        are left out, too.
        """

    def oldest_chunk(self) -> Chunk | None:
        """The chunk to evict next; None if no chunk is tracked.

        The chunk may have been leased or pinned since it was tracked. Then the cache untracks it, and tracks it again
        when its last lease or pin ends.
        """

    def untrack(self, chunk: Chunk) -> None:
        """Remove the chunk from the order. REQUIRES: tracked."""
