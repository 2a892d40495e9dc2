"""Parts of L1 that are kept for owners, which are models and tenants: a busy one cannot push out another.

An owner's share is a minimum: no store of another owner leaves it with less. What the owner does not use of its share, others may.
Pages count as in `ModelUse.pages`: all object groups, single blocks and namespaces of the owner, and pages that are leased,
filled or not yet freed. Beyond their shares owners compete by the eviction policy alone.

A chunk belongs to the tenant whose store or fill brought it to L1, if that has a share, else to its model. Who reads it changes
nothing.

A spared chunk leaves the policy's order until its next use. So an eviction looks at each chunk once, not again and again at those
that it must not touch. Spared chunks were next to be evicted: once their owner has more than its share, they are the first READY
ones to leave.

Owns: which chunks an eviction spares, and their order. Refuses to know: pages of a pool, and what is evicted for whom.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from kvserver.cache.chunk import Chunk, ModelUse
from kvserver.cache.eviction import RingChunk, empty_ring, link, oldest, unlink, youngest_first


class Shares:
    """Shares by owner, in `pages`. REQUIRES: if there are any, chunks are RingChunks, as those of all policies of `--eviction-policy` are."""

    def __init__(self, pages: Mapping[ModelUse, int]) -> None:
        self._spared = {owner: empty_ring() for owner in pages}
        for owner, share in pages.items():
            owner.share_pages = share

    def spares(self, chunk: Chunk, first: bool) -> bool:
        """True if the chunk stays: without it its owner would have less than its share. REQUIRES: the policy has popped it.

        An incomplete chunk is of no use to its owner and is not spared. `first`: the chunk is the first spared one to leave.
        """
        owner = chunk.namespace.owner
        if not owner.share_pages or not chunk.ready or owner.pages - chunk.page_count >= owner.share_pages:
            return False
        ring = self._spared[owner]
        link(cast(RingChunk, chunk), ring.younger if first else ring)
        return True

    def pop_released(self) -> Chunk | None:
        """The oldest chunk of an owner that was spared and need not be any more, or None."""
        for owner, spared in self._spared.items():
            if owner.pages > owner.share_pages:
                chunk = oldest(spared)
                if chunk is not None and owner.pages - chunk.page_count >= owner.share_pages:
                    unlink(chunk)
                    return chunk
        return None

    def pop_own(self, owner: ModelUse) -> Chunk | None:
        """The owner's oldest spared chunk: for a store of the owner itself, when it can have no other space."""
        chunk = oldest(self._spared[owner]) if owner in self._spared else None
        if chunk is not None:
            unlink(chunk)
        return chunk

    def spared(self) -> list[Chunk]:
        """The chunks that are in the order of no policy, the youngest of each owner first."""
        return [chunk for ring in self._spared.values() for chunk in youngest_first(ring)]
