"""Reports of an engine on its block pools: operations one by one, or which request owns which block.

Owns: the structs of ReportBlockAllocations, and the numbers of operations. Refuses to know: what follows from them (`telemetry`).
"""

from __future__ import annotations

import struct
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from kvserver.protocol.fields import Message, Name, Positive, Small, Unsigned

MAX_REPORTED_BLOCKS = 1 << 16  # in one message, also if a few bytes name more
RECORD_OPERATION_SHIFT = 29
MARK = struct.Struct("<QQ")  # one of ExactRecords.marks: number of its first record, monotonic ns
RECORD_ALLOCATED = 0  # the block is allocated to one owner; its previous content has ended
RECORD_ACCESSED = 1  # the block has one owner more; its content stays
RECORD_RELEASED = 2  # the block has one owner less
RECORD_EVICTED = 3  # the block's content left the engine's prefix cache
RECORD_CLEARED = 4  # the content of all blocks left the prefix cache; the block id has no meaning
RECORD_PRESENT = 5  # full state: the block has content of unknown age
RECORD_OWNED = 6  # full state: the block has one owner more


class ExactRecords(Message):
    """Operations of one block pool: u32 little-endian `operation << 29 | block_id` (RECORD_*), in order.

    `marks` has their times: 16 bytes each, u64 little-endian (number of a record, monotonic ns), ascending from record 0. A
    mark's time is the time of its record and of all records up to the next mark. With `full` the server first forgets the pool's
    state; the records then begin with the pool's whole state.
    """

    records: bytes
    marks: bytes
    pool: Small = 0
    full: bool = False


class Owned(msgspec.Struct, tag_field="type", tag="held", array_like=True):
    """Blocks that a request owns: table positions [first_index, ...) of one KV cache group.

    `contents` names the content of the full blocks, 8 bytes each from the first on; partial blocks at the end have none. Engines
    without hashes leave it empty and send the u32 `tokens` of the positions instead. A record without the content of a block that
    the request owns already leaves that content unchanged.
    """

    request_id: Name
    group: Small
    first_index: Small
    block_ids: bytes  # as pack_blocks() makes them
    blocks: Small  # number of block_ids
    contents: bytes = b""
    tokens: bytes = b""


class Released(msgspec.Struct, tag_field="type", tag="released", array_like=True):
    """Blocks that a request no longer owns: it was preempted, or its table was replaced."""

    request_id: Name
    block_ids: bytes
    blocks: Small


class ReportedBlocks(Message):
    """Owners of blocks, for engines whose pool cannot be watched: which request owns which block with which content."""

    time_ns: Unsigned
    block_tokens: Positive
    records: Annotated[list[Owned | Released], Meta(max_length=16384)]
    full: bool = False  # as in ExactRecords


Payload: TypeAlias = ExactRecords | ReportedBlocks


class ReportBlockAllocations(Message):
    """Operations of the engine's blocks, exact or reported; an instance never mixes the two.

    The server answers REPORT_GAP if it lost records (a gap in `sequence`, an overflow of its own queue): the engine
    should send its full state next.
    """

    instance_id: Name
    incarnation: Name
    model_name: Name
    sequence: Unsigned  # counts these messages and EndRequests, from 0, without gaps
    payload: Payload
