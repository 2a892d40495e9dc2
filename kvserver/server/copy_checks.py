"""The checks of keys, blocks and contents that a request names. Each raises KVServerError; nothing here changes state."""

from __future__ import annotations

from kvserver._native import BlockIds, Direction
from kvserver.protocol import (
    KEY_BYTES,
    MOST_EXTRA_KEY_BYTES,
    TOKEN_BYTES,
    ChunkContents,
    ErrorCode,
    KVServerError,
    RegisterWorker,
    Retrieve,
    Store,
)
from kvserver.server.instances import Worker


def chunk_count(keys: bytes) -> int:
    """KVServerError(BAD_KEYS) unless there are one or more whole keys."""
    if not keys or len(keys) % KEY_BYTES:
        raise KVServerError(
            ErrorCode.BAD_KEYS, f"keys holds {len(keys)} bytes, not one or more whole keys of {KEY_BYTES}"
        )
    return len(keys) // KEY_BYTES


def check_chunk(chunk_blocks: int, spec: RegisterWorker) -> None:
    if chunk_blocks != spec.chunk_blocks:
        raise KVServerError(
            ErrorCode.BAD_KEYS, f"keys are per {chunk_blocks} blocks, the workers registered {spec.chunk_blocks}"
        )


def store_blocks(request: Store, worker: Worker) -> BlockIds:
    """The blocks of a store: chunk_blocks positions for each key."""
    positions = chunk_count(request.keys) * worker.spec.chunk_blocks
    blocks = _block_ids(worker, Direction.STORE, request.block_ids, positions, positions)
    if request.contents is not None:
        _check_contents(request.contents, positions, worker.spec.block_tokens)
    return blocks


def load_blocks(request: Retrieve, worker: Worker) -> BlockIds:
    """The blocks of a load, which may leave out the first positions, and the last ones of the last chunk."""
    chunk_blocks = worker.spec.chunk_blocks
    most = chunk_count(request.keys) * chunk_blocks - request.skip_blocks
    if request.skip_blocks >= chunk_blocks:
        raise KVServerError(
            ErrorCode.BAD_BLOCKS,
            f"skip_blocks {request.skip_blocks} leaves out a whole chunk of {chunk_blocks} blocks",
        )
    return _block_ids(worker, Direction.LOAD, request.block_ids, max(1, most - chunk_blocks + 1), most)


def _block_ids(worker: Worker, direction: Direction, packed: bytes, least: int, most: int) -> BlockIds:
    assert worker.table is not None
    try:
        return BlockIds(worker.table, direction, packed, least, most)
    except ValueError as error:
        raise KVServerError(ErrorCode.BAD_BLOCKS, str(error)) from None


def _check_contents(contents: ChunkContents, blocks: int, block_tokens: int) -> None:
    """KVServerError(BAD_KEYS) unless there is a hash and a block of tokens for each of the `blocks`."""
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
