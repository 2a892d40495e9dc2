"""How a KV cache lies in memory, as numbers: planes, and the block ids that name pieces of them.

Owns: `Plane` and the checks of block ids. Refuses to know: layers, heads, dtypes, tensors.
"""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Annotated

import msgspec
from msgspec import Meta

from kvserver.errors import ErrorCode, KVServerError

assert array("I").itemsize == 4, "array('I') must be the 4-byte integer of the wire"

_Bytes = Annotated[int, Meta(ge=0, le=1 << 62)]


class Plane(msgspec.Struct, frozen=True):
    """Block `id` is the `run_bytes` bytes at `offset + id * stride_bytes` of memory number `memory`."""

    memory: Annotated[int, Meta(ge=0, le=4095)]
    offset: _Bytes
    stride_bytes: _Bytes
    run_bytes: Annotated[int, Meta(gt=0, le=1 << 62)]


def block_bytes(planes: list[Plane]) -> int:
    """Bytes of one block over all planes: what it takes in a slot."""
    return sum(plane.run_bytes for plane in planes)


def parse_block_ids(raw: bytes, num_blocks: int, least: int, most: int) -> array[int]:
    """Block ids from their wire form, little-endian u32.

    KVServerError(BAD_BLOCKS) unless there are `least` to `most` ids, all below `num_blocks`, none twice.
    """
    if len(raw) % 4 or not 4 * least <= len(raw) <= 4 * most:
        expected = f"{most}" if least == most else f"{least} to {most}"
        raise KVServerError(
            ErrorCode.BAD_BLOCKS,
            f"block_ids holds {len(raw)} bytes; {expected} blocks of 4 bytes each belong to these keys",
        )
    ids = array("I")
    ids.frombytes(raw)
    if ids and max(ids) >= num_blocks:
        raise KVServerError(
            ErrorCode.BAD_BLOCKS, f"block id {max(ids)} is out of range: the worker registered {num_blocks} blocks"
        )
    if len(set(ids)) != len(ids):
        repeated = Counter(ids).most_common(1)[0][0]
        raise KVServerError(ErrorCode.BAD_BLOCKS, f"block id {repeated} is named more than once")
    return ids
