"""One load and one store, as an engine's scheduler describes them to its workers.

Refuses to know: how they are chosen or carried out.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvserver.protocol import ChunkContents


@dataclass(slots=True)
class LoadSpec:
    """Fill `block_ids` from the chunks `keys`, leaving out the first `skip_blocks` positions of the first chunk.

    Ids, here and in a store, are [position][KV cache group]; a null block of a load is left out.
    """

    load_id: int
    request_id: str
    variant: str
    chunk_blocks: int
    keys: bytes
    block_ids: list[int]
    skip_blocks: int


@dataclass(slots=True)
class StoreSpec:
    """Copy whole chunks out after this step's forward."""

    store_id: int
    request_id: str
    variant: str
    chunk_blocks: int
    keys: bytes
    block_ids: list[int]
    contents: ChunkContents | None = None  # sent by rank 0
