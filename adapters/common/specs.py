"""One load and one store, as an engine's scheduler describes them to its workers.

Refuses to know: how they are chosen or carried out.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from kvserver._native import unpack_blocks
from kvserver.protocol import ChunkContents


@dataclass(slots=True)
class LoadSpec:
    """Fill `block_ids` from the chunks `keys`, leaving out the first `skip_blocks` positions of the first chunk.

    Ids, here and in a store, are [position][KV cache group], packed by pack_blocks(); a null block of a load is
    left out. `load_id` and `store_id` are of one count: no two copies of an engine have the same.
    """

    load_id: int
    request_id: str
    variant: str
    chunk_blocks: int
    keys: bytes
    block_ids: bytes
    skip_blocks: int


@dataclass(slots=True)
class StoreSpec:
    """Copy whole chunks out after this step's forward."""

    store_id: int
    request_id: str
    variant: str
    chunk_blocks: int
    keys: bytes
    block_ids: bytes
    contents: ChunkContents | None = None  # sent by rank 0


def ids_of(spec: LoadSpec | StoreSpec) -> list[int]:
    return array("I", unpack_blocks(spec.block_ids, 1 << 32)).tolist()
