"""Decodes vLLM's KV events of GPU memory: maps from 0.26 on, arrays up to 0.25.

Only blocks in GPU memory are read (`medium` GPU or none). Of each object group only the blocks of one KV cache group are read:
the others have as many. Unused fields, token ids above all, are skipped undecoded, unless SGLang's pages are read (`pages_of`).

Owns: which events and fields are read. Refuses to know: sequences, sockets, and what is done with the blocks.
"""

from __future__ import annotations

import contextlib
import enum
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta, Raw

from kvserver.kv_events import Description
from kvserver.protocol import MAX_SESSION_ID, TOKEN_BYTES

_LAST_8 = (1 << 64) - 1
_NAME = 8  # bytes of a block's name
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


class _Page(msgspec.Struct, tag="BlockStored"):
    """SGLang's. Token ids that are pairs are not decoded."""

    block_hashes: list[int]
    token_ids: Raw
    block_size: int
    parent_block_hash: int | None = None
    medium: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    lora_name: str | None = None


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Raw]


_batches = msgspec.msgpack.Decoder(_Batch)
_maps = msgspec.msgpack.Decoder(_Stored | _Removed | _Cleared)
_arrays = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)
_pages = msgspec.msgpack.Decoder(_Page | _Removed | _Cleared)
_token_ids = msgspec.msgpack.Decoder(list[Annotated[int, Meta(ge=0, lt=1 << 32)]])
_MOST_ENCODED = 5  # bytes of a token id, and of the length of an array
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


def pages_of(payload: bytes, page_tokens: int) -> list[Description]:
    """The pages of `page_tokens` tokens in SGLang's GPU memory that a batch describes.

    Of a salt or a LoRA SGLang publishes other hashes than its keys.
    """
    found: list[Description] = []
    with contextlib.suppress(*_UNREADABLE):
        for raw in _batches.decode(payload).events:
            with contextlib.suppress(*_UNREADABLE):
                event = _pages.decode(raw)
                if isinstance(event, _Page) and event.medium in (None, "GPU") and event.block_size == page_tokens:
                    found += _described(event)
    return found


def _described(event: _Page) -> list[Description]:
    size, names = event.block_size, _last_bytes([*event.block_hashes])
    count = size * len(event.block_hashes)
    if event.cache_salt or event.lora_name or len(memoryview(event.token_ids)) > _MOST_ENCODED * (count + 1):
        return []
    token_ids = _token_ids.decode(event.token_ids)
    if len(token_ids) != count:
        return []
    session = event.session_id if event.session_id and len(event.session_id) <= MAX_SESSION_ID else ""
    tokens = array("I", token_ids).tobytes()
    parents = _last_bytes([event.parent_block_hash] if event.parent_block_hash is not None else [])
    chain = [parents, *(names[at : at + _NAME] for at in range(0, len(names), _NAME))]
    width = size * TOKEN_BYTES
    return [
        Description(_NAME, name, parent, tokens[at * width : (at + 1) * width], size, session_id=session)
        for at, (parent, name) in enumerate(pairwise(chain))
    ]


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
