"""Parts of L1 that are kept for models, so that a busy model cannot push out another.

A model's share is a minimum: no store of another model leaves it with less. What the model does not use of its share, others may.
Pages count as in `ModelUse.pages`: all object groups, single blocks and namespaces of the model, and pages that are leased,
filled or not yet freed. Beyond their shares models compete by the eviction policy alone.

A spared chunk leaves the policy's order until its next use. So an eviction looks at each chunk once, not again and again at those
that it must not touch. Spared chunks were next to be evicted: once their model has more than its share, they are the first READY
ones to leave.

Owns: which chunks an eviction spares, and their order. Refuses to know: pages of a pool, and what is evicted for whom.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from kvserver.cache.chunk import Chunk, ModelUse
from kvserver.cache.eviction import RingChunk, empty_ring, link, oldest, unlink, youngest_first


class Shares:
    """Shares by model, in `pages`. REQUIRES: if there are any, chunks are RingChunks, as those of all policies of `--eviction-policy` are."""

    def __init__(self, pages: Mapping[ModelUse, int]) -> None:
        self._spared = {model: empty_ring() for model in pages}
        for model, share in pages.items():
            model.share_pages = share

    def spares(self, chunk: Chunk, first: bool) -> bool:
        """True if the chunk stays: without it its model would have less than its share. REQUIRES: the policy has popped it.

        An incomplete chunk is of no use to a model and is not spared. `first`: the chunk is the first spared one to leave.
        """
        model = chunk.namespace.model
        if not model.share_pages or not chunk.ready or model.pages - chunk.page_count >= model.share_pages:
            return False
        ring = self._spared[model]
        link(cast(RingChunk, chunk), ring.younger if first else ring)
        return True

    def pop_released(self) -> Chunk | None:
        """The oldest chunk of a model that was spared and need not be any more, or None."""
        for model, spared in self._spared.items():
            if model.pages > model.share_pages:
                chunk = oldest(spared)
                if chunk is not None and model.pages - chunk.page_count >= model.share_pages:
                    unlink(chunk)
                    return chunk
        return None

    def pop_own(self, model: ModelUse) -> Chunk | None:
        """The model's oldest spared chunk: for a store of the model itself, when it can have no other space."""
        chunk = oldest(self._spared[model]) if model in self._spared else None
        if chunk is not None:
            unlink(chunk)
        return chunk

    def spared(self) -> list[Chunk]:
        """The chunks that are in the order of no policy, the youngest of each model first."""
        return [chunk for ring in self._spared.values() for chunk in youngest_first(ring)]
