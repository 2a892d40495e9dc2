"""A load and a store as an engine's scheduler describes them to its workers.

Refuses to know: how they are chosen or carried out.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import ClassVar

from kvserver._native import unpack_blocks
from kvserver.protocol import ChunkContents, Durability


@dataclass(slots=True)
class CopySpec:
    """Copy of objects of one group. Block ids are [position][member], packed by pack_blocks(). `copy_id` is unique within the engine."""

    kind: ClassVar[str]
    copy_id: int
    request_id: str
    variant: str
    chunk_blocks: int  # of an object
    keys: bytes
    block_ids: bytes


@dataclass(slots=True)
class LoadSpec(CopySpec):
    """Fill `block_ids`, but for null blocks, from the objects `keys`; skip the first `skip_blocks` positions of the first object."""

    kind = "load"
    skip_blocks: int
    group: int = 0
    tokens: int = 0  # that the engine need not compute when all copies of the load have ended
    copies: int = 1  # of the request's load
    durability: Durability = Durability.PROCESS  # of the variant


@dataclass(slots=True)
class StoreSpec(CopySpec):
    """Copy whole objects out. No step behind `step` computes any of their KV."""

    kind = "store"
    contents: ChunkContents | None = None  # sent by rank 0
    group: int = 0
    first_chunk: int = 0  # of the request, or which single block of it, which the first key names
    dropped: bytes = b""  # keys of the group's objects that no kept boundary needs after this store
    after: bytes | None = None  # key of the chunk before the first key, or before the single blocks
    durability: Durability = Durability.PROCESS  # of the variant
    step: int = 0  # that computed the last of its KV
    session_id: str = ""  # of the request
    session_salt: bytes | None = None
    tenant: str = ""


def ids_of(spec: CopySpec) -> list[int]:
    return array("I", unpack_blocks(spec.block_ids, 1 << 32)).tolist()
