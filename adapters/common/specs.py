"""One load and one store, as an engine's scheduler describes them to its workers.

Refuses to know: how they are chosen or carried out.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import ClassVar

from kvserver._native import unpack_blocks
from kvserver.protocol import ChunkContents


@dataclass(slots=True)
class CopySpec:
    """Block ids are [position][KV cache group], packed by pack_blocks(). No two copies of an engine have the same `copy_id`."""

    kind: ClassVar[str]
    copy_id: int
    request_id: str
    variant: str
    chunk_blocks: int
    keys: bytes
    block_ids: bytes


@dataclass(slots=True)
class LoadSpec(CopySpec):
    """Fill `block_ids`, but for null blocks, from the chunks `keys`; skip the first `skip_blocks` positions of the first chunk."""

    kind = "load"
    skip_blocks: int


@dataclass(slots=True)
class StoreSpec(CopySpec):
    """Copy whole chunks out after this step's forward."""

    kind = "store"
    contents: ChunkContents | None = None  # sent by rank 0


def ids_of(spec: CopySpec) -> list[int]:
    return array("I", unpack_blocks(spec.block_ids, 1 << 32)).tolist()
