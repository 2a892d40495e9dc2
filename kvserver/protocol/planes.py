"""Layout of a KV cache in memory, as numbers: planes.

Owns: `Plane`. Refuses to know: layers, heads, dtypes, tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from kvserver.protocol.errors import ErrorCode, KVServerError

MAX_GROUPS = 64
_Bytes = Annotated[int, Meta(ge=0, le=1 << 62)]


class Plane(msgspec.Struct, frozen=True):
    """Place of blocks in memory: block `id` is the `run_bytes` bytes at `offset + id * stride_bytes` of memory number `memory`.

    `group` is the KV cache group of these blocks. A position has one block of each group.
    """

    memory: Annotated[int, Meta(ge=0, le=4095)]
    offset: _Bytes
    stride_bytes: _Bytes
    run_bytes: Annotated[int, Meta(gt=0, le=1 << 62)]
    group: Annotated[int, Meta(ge=0, lt=MAX_GROUPS)] = 0


def planes_of(planes: Sequence[Plane], groups: Collection[int]) -> list[Plane]:
    """The planes of these KV cache groups."""
    return [plane for plane in planes if plane.group in groups]


def block_bytes(planes: list[Plane]) -> int:
    """Bytes of one position over all planes: its size in a slot."""
    return sum(plane.run_bytes for plane in planes)


def group_count(planes: list[Plane]) -> int:
    """The number of groups. KVServerError(BAD_PLANES) if a group between 0 and the highest has no plane."""
    present = {plane.group for plane in planes}
    count = max(present) + 1
    if len(present) < count:
        missing = min(set(range(count)) - present)
        raise KVServerError(ErrorCode.BAD_PLANES, f"no plane is of group {missing}; the highest group is {count - 1}")
    return count
