"""The layout of a KV cache in memory, as numbers: planes, and the block ids that name pieces of them.

Owns: `Plane` and the checks of block ids. Refuses to know: layers, heads, dtypes, tensors.
"""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Annotated

import msgspec
from msgspec import Meta

from kvserver.protocol.errors import ErrorCode, KVServerError

assert array("I").itemsize == 4, "array('I') must be the 4-byte integer of the wire"

MAX_GROUPS = 64
_Bytes = Annotated[int, Meta(ge=0, le=1 << 62)]


class Plane(msgspec.Struct, frozen=True):
    """Block `id` is the `run_bytes` bytes at `offset + id * stride_bytes` of memory number `memory`.

    `group` is the KV cache group of these blocks. A position has one block of each group.
    """

    memory: Annotated[int, Meta(ge=0, le=4095)]
    offset: _Bytes
    stride_bytes: _Bytes
    run_bytes: Annotated[int, Meta(gt=0, le=1 << 62)]
    group: Annotated[int, Meta(ge=0, lt=MAX_GROUPS)] = 0


def block_bytes(planes: list[Plane]) -> int:
    """Bytes of one block over all planes: its size in a slot."""
    return sum(plane.run_bytes for plane in planes)


def group_count(planes: list[Plane]) -> int:
    """The number of groups. KVServerError(BAD_PLANES) if a group between 0 and the highest has no plane."""
    present = {plane.group for plane in planes}
    count = max(present) + 1
    if len(present) < count:
        missing = min(set(range(count)) - present)
        raise KVServerError(ErrorCode.BAD_PLANES, f"no plane is of group {missing}; the highest group is {count - 1}")
    return count


def parse_block_ids(raw: bytes, num_blocks: int, least: int, most: int, null_may_repeat: bool = False) -> array[int]:
    """Block ids from little-endian u32, unpacked from their wire form.

    KVServerError(BAD_BLOCKS) unless there are `least` to `most` ids, all below `num_blocks` and all different. With
    `null_may_repeat`, id 0, the null block, may occur several times.
    """
    if len(raw) % 4 or not 4 * least <= len(raw) <= 4 * most:
        expected = f"{most}" if least == most else f"{least} to {most}"
        raise KVServerError(
            ErrorCode.BAD_BLOCKS,
            f"block_ids holds {len(raw)} bytes when unpacked; {expected} blocks of 4 bytes each belong to these keys",
        )
    ids = array("I")
    ids.frombytes(raw)
    if ids and max(ids) >= num_blocks:
        raise KVServerError(
            ErrorCode.BAD_BLOCKS, f"block id {max(ids)} is out of range: the worker registered {num_blocks} blocks"
        )
    nulls = ids.count(0) if null_may_repeat else 0
    if len(set(ids)) + max(0, nulls - 1) != len(ids):
        repeated = next(id for id, times in Counter(ids).most_common(2) if id or not null_may_repeat)
        raise KVServerError(ErrorCode.BAD_BLOCKS, f"block id {repeated} is named more than once")
    return ids
