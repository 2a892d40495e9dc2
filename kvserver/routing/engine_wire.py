"""Decodes vLLM's KV events of GPU memory: maps from 0.26 on, arrays up to 0.25.

Only blocks in GPU memory are read (`medium` GPU or none). Of each object group only the blocks of one KV cache group are read:
the others have as many. Unused fields, token ids above all, are skipped undecoded.

Owns: which events and fields are read. Refuses to know: sequences, sockets, and what is done with the blocks.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec
from msgspec import Raw

_LAST_8 = (1 << 64) - 1
_NOTHING = Raw()
Hashes: TypeAlias = list[bytes | int] | None


class Change(enum.Enum):
    STORED = enum.auto()
    REMOVED = enum.auto()
    CLEARED = enum.auto()


@dataclass
class EngineBatch:
    time: float  # wall clock of the engine
    # Number of the object group, and hashes, 8 bytes for each block.
    changes: list[tuple[Change, int, bytes]] = field(default_factory=list)
    malformed: int = 0  # events that could not be decoded


class _Stored(msgspec.Struct, tag="BlockStored"):
    block_hashes: Hashes
    medium: str | None = None
    group_idx: int | None = None


class _Removed(_Stored, tag="BlockRemoved"):
    pass


class _Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _StoredArray(msgspec.Struct, tag="BlockStored", array_like=True):
    block_hashes: Hashes
    parent: Raw
    token_ids: Raw
    block_size: Raw
    lora_id: Raw = _NOTHING
    medium: str | None = None
    lora_name: Raw = _NOTHING
    extra_keys: Raw = _NOTHING
    group_idx: Any = None


class _RemovedArray(msgspec.Struct, tag="BlockRemoved", array_like=True):
    block_hashes: Hashes
    medium: str | None = None
    group_idx: Any = None


class _ClearedArray(msgspec.Struct, tag="AllBlocksCleared", array_like=True):
    pass


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Raw]


_batches = msgspec.msgpack.Decoder(_Batch)
_maps = msgspec.msgpack.Decoder(_Stored | _Removed | _Cleared)
_arrays = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)
_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)


def decode(payload: bytes, groups: Sequence[int]) -> EngineBatch | None:
    """The changes of the blocks of these KV cache groups, one for each object group; None if `payload` is not a batch."""
    try:
        raw = _batches.decode(payload)
    except _UNREADABLE:
        return None
    batch = EngineBatch(raw.ts)
    for event in raw.events:
        try:
            batch.changes += _changes(event, groups)
        except _UNREADABLE:
            batch.malformed += 1
    return batch


def _changes(raw: Raw, groups: Sequence[int]) -> list[tuple[Change, int, bytes]]:
    first = memoryview(raw)[0]
    is_array = first & 0xF0 == 0x90 or first in (0xDC, 0xDD)
    event: Any = (_arrays if is_array else _maps).decode(raw)
    if isinstance(event, (_Cleared, _ClearedArray)):
        return [(Change.CLEARED, 0, b"")]
    if event.medium not in (None, "GPU") or event.group_idx not in (None, *groups):
        return []
    number = 0 if event.group_idx is None else groups.index(event.group_idx)
    change = Change.REMOVED if isinstance(event, (_Removed, _RemovedArray)) else Change.STORED
    return [(change, number, _last_bytes(event.block_hashes or []))]


def _last_bytes(hashes: list[bytes | int]) -> bytes:
    """The last 8 bytes of each hash: integers have no more."""
    raw = b"".join([h[-8:] if isinstance(h, bytes) else (h & _LAST_8).to_bytes(8, "big") for h in hashes])
    if len(raw) != 8 * len(hashes):
        raise ValueError("a hash of fewer than 8 bytes")
    return raw
