"""Checks of keys, blocks and contents that a request names, and the session of a request. A check raises KVServerError; nothing here changes state."""

from __future__ import annotations

from kvserver._native import BlockIds, Direction
from kvserver.cache import SessionKey
from kvserver.engines import Worker, WorkerGroup
from kvserver.protocol import (
    KEY_BYTES,
    MOST_EXTRA_KEY_BYTES,
    TOKEN_BYTES,
    ChunkContents,
    ErrorCode,
    KVServerError,
    Lookup,
    RegisterWorker,
    Retrieve,
    Store,
)


def chunk_count(keys: bytes) -> int:
    """KVServerError(BAD_KEYS) unless there are one or more whole keys."""
    if not keys or len(keys) % KEY_BYTES:
        raise KVServerError(
            ErrorCode.BAD_KEYS, f"keys holds {len(keys)} bytes, not one or more whole keys of {KEY_BYTES}"
        )
    return len(keys) // KEY_BYTES


def session_of(request: Lookup | Store, namespace: bytes) -> SessionKey | None:
    return SessionKey(namespace, request.session_salt or b"", request.session_id) if request.session_id else None


def check_tail(tail_keys: bytes, spec: RegisterWorker) -> None:
    """KVServerError(BAD_KEYS) unless these are keys of blocks of one chunk, and the workers store such blocks."""
    if not tail_keys:
        return
    count = chunk_count(tail_keys)
    if not spec.tails or count > spec.chunk_blocks:
        stored = f"a chunk has {spec.chunk_blocks}" if spec.tails else "the workers registered without tails"
        raise KVServerError(ErrorCode.BAD_KEYS, f"keys of {count} single blocks, {stored}")


def check_chunk(chunk_blocks: int, spec: RegisterWorker) -> None:
    if chunk_blocks != spec.chunk_blocks:
        raise KVServerError(
            ErrorCode.BAD_KEYS, f"keys are per {chunk_blocks} blocks, the workers registered {spec.chunk_blocks}"
        )


def group_of(request: Store | Retrieve, worker: Worker) -> WorkerGroup:
    """KVServerError(BAD_KEYS) unless the request names one of the worker's object groups, and the size of its objects."""
    if request.group >= len(worker.groups):
        raise KVServerError(
            ErrorCode.BAD_KEYS, f"object group {request.group}, the workers registered {len(worker.groups)}"
        )
    group = worker.groups[request.group]
    if request.chunk_blocks != group.blocks:
        raise KVServerError(
            ErrorCode.BAD_KEYS,
            f"keys are per {request.chunk_blocks} blocks, objects of group {group.number} have {group.blocks}",
        )
    return group


def store_blocks(request: Store, worker: Worker, group: WorkerGroup) -> BlockIds:
    """The blocks of a store: an object's positions for each key."""
    if request.after is not None and len(request.after) != KEY_BYTES:
        raise KVServerError(ErrorCode.BAD_KEYS, f"after holds {len(request.after)} bytes, not one key of {KEY_BYTES}")
    positions = chunk_count(request.keys) * group.blocks
    blocks = _block_ids(group, Direction.STORE, request.block_ids, positions, positions)
    if request.contents is not None:
        if group.number:
            raise KVServerError(ErrorCode.BAD_KEYS, f"contents with a store of object group {group.number}, not of 0")
        # Of whole chunks, whatever an object holds of them, or of single blocks.
        described = chunk_count(request.keys) * (1 if group.layout.tails else worker.spec.chunk_blocks)
        _check_contents(request.contents, described, worker.spec.block_tokens)
    return blocks


def own_places(request: Store, worker: Worker, group: WorkerGroup) -> range:
    """Indexes of the request's keys that this rank copies. Of a replicated group each rank copies its share, by chunks of the prompt."""
    count = chunk_count(request.keys)
    if not worker.spec.groups:  # protocol 4
        return range(count if group.turn == 0 else 0)
    return range((group.turn - request.first_chunk) % group.ranks, count, group.ranks)


def keys_at(keys: bytes, places: range) -> bytes:
    if places.step == 1:
        return keys[places.start * KEY_BYTES : places.stop * KEY_BYTES]
    return b"".join([keys[place * KEY_BYTES : (place + 1) * KEY_BYTES] for place in places])


def load_blocks(request: Retrieve, group: WorkerGroup) -> BlockIds:
    """The blocks of a load, which may leave out the first positions, and the last ones of the last object."""
    most = chunk_count(request.keys) * group.blocks - request.skip_blocks
    if request.skip_blocks >= group.blocks:
        raise KVServerError(
            ErrorCode.BAD_BLOCKS,
            f"skip_blocks {request.skip_blocks} leaves out a whole object of {group.blocks} blocks",
        )
    return _block_ids(group, Direction.LOAD, request.block_ids, max(1, most - group.blocks + 1), most)


def _block_ids(group: WorkerGroup, direction: Direction, packed: bytes, least: int, most: int) -> BlockIds:
    assert group.table is not None
    try:
        return BlockIds(group.table, direction, packed, least, most)
    except ValueError as error:
        raise KVServerError(ErrorCode.BAD_BLOCKS, str(error)) from None


def _check_contents(contents: ChunkContents, blocks: int, block_tokens: int) -> None:
    """KVServerError(BAD_KEYS) unless there are the tokens of the `blocks`, and a hash for each, or for each of equal parts."""
    parts = max(1, len(contents.hashes) // (blocks * contents.hash_bytes))
    if block_tokens % parts == 0:
        blocks *= parts
        block_tokens //= parts
    expected = (blocks * contents.hash_bytes, blocks * block_tokens * TOKEN_BYTES)
    got = (len(contents.hashes), len(contents.tokens))
    if got != expected or len(contents.parent) not in (0, contents.hash_bytes):
        raise KVServerError(
            ErrorCode.BAD_KEYS,
            f"contents of {blocks} blocks with hashes of {contents.hash_bytes} bytes: hashes and tokens of {got} bytes instead of "
            f"{expected}, a parent of {len(contents.parent)}",
        )
    if len(contents.extra_keys) > blocks * MOST_EXTRA_KEY_BYTES:
        raise KVServerError(
            ErrorCode.BAD_KEYS,
            f"extra keys of {len(contents.extra_keys)} bytes, at most {MOST_EXTRA_KEY_BYTES} a block",
        )
