"""Computes vLLM's block hashes from token ids: each covers the hash before, the block's tokens and its extra keys.

    hash = SHA-256(dumps((hash before, (token, ...), extra keys or None)))

with pickle's protocol 5 ("sha256") or canonical CBOR ("sha256_cbor"). Only these two: xxhash starts from a secret. The
server does not import pickle, which may run code from its input: only this one shape is encoded here. A block of 16
tokens costs 8 to 15 us (bench/match.py); other threads get a turn every 32 blocks.

Owns: the encodings and the chain. Refuses to know: engines, and the use of the hashes.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TypeAlias

ExtraKeys: TypeAlias = tuple[tuple[str, ...], ...]  # ("lora", name, path), ("cache_salt", salt)
Dumps: TypeAlias = Callable[[bytes, Sequence[int], ExtraKeys], bytes]

_BLOCKS_BETWEEN_TURNS = 32
_CODES = 16384  # encoded tokens that each encoding caches


def hash_blocks(
    algorithm: str, start: bytes, block_tokens: int, tokens: Sequence[int], lora: tuple[str, str] | None, salt: str
) -> Iterator[bytes]:
    """The hash of each whole block of a prompt. `start`: the hash before the first block; `lora`: name and path.

    As vLLM 0.32 does; earlier versions hash LoRAs and salts in other shapes. ValueError if `algorithm` is not in DUMPS.
    REQUIRES: tokens from 0 on; texts shorter than 64 KiB.
    """
    if algorithm not in DUMPS:
        raise ValueError(
            f"block hashes by {algorithm or 'an unknown algorithm'} cannot be computed here; {' and '.join(DUMPS)} can"
        )
    dumps = DUMPS[algorithm]
    every: ExtraKeys = (("lora", *lora),) if lora is not None else ()
    first: ExtraKeys = (*every, ("cache_salt", salt)) if salt else every
    parent = start
    for number in range(len(tokens) // block_tokens):
        block = tokens[number * block_tokens : (number + 1) * block_tokens]
        parent = hashlib.sha256(dumps(parent, block, every if number else first)).digest()
        yield parent
        if number % _BLOCKS_BETWEEN_TURNS == _BLOCKS_BETWEEN_TURNS - 1:
            time.sleep(0)


# ---- pickle -----------------------------------------------------------------------------------

_MEMOIZE = b"\x94"
_TUPLES = {1: b"\x85" + _MEMOIZE, 2: b"\x86" + _MEMOIZE, 3: b"\x87" + _MEMOIZE}
_FRAME_BYTES = 64 << 10


def pickled(parent: bytes, tokens: Sequence[int], extra: ExtraKeys) -> bytes:
    """pickle.dumps((parent, tuple(tokens), extra or None), protocol=5), if no object occurs twice."""
    parts = [b"C" + len(parent).to_bytes(1, "little") + parent + _MEMOIZE]
    parts += _tuple_parts([_pickled_int(token) for token in tokens], len(tokens))
    if extra:
        keys = [part for key in extra for part in _tuple_parts([_pickled_text(word) for word in key], len(key))]
        parts += _tuple_parts(keys, len(extra))
    else:
        parts.append(b"N")
    parts = _tuple_parts(parts, 3)
    parts[-1] += b"."
    return b"\x80\x05" + b"".join(b"\x95" + len(frame).to_bytes(8, "little") + frame for frame in _frames(parts))


def _tuple_parts(items: list[bytes], count: int) -> list[bytes]:
    """A tuple of `count` objects, whose parts are `items`. Pickle ends a frame only between parts."""
    if count == 0:
        return [b")"]
    if count in _TUPLES:
        return [*items[:-1], items[-1] + _TUPLES[count]]
    return [b"(", *items[:-1], items[-1] + b"t" + _MEMOIZE]


def _frames(parts: list[bytes]) -> list[bytes]:
    """The parts in frames. A frame that is long enough ends before the next part."""
    whole = b"".join(parts)
    if len(whole) < _FRAME_BYTES:
        return [whole]
    frames = [bytearray()]
    for part in parts:
        if len(frames[-1]) >= _FRAME_BYTES:
            frames.append(bytearray())
        frames[-1] += part
    return [bytes(frame) for frame in frames]


@lru_cache(_CODES)
def _pickled_int(value: int) -> bytes:
    if value < 1 << 8:
        return b"K" + value.to_bytes(1, "little")
    if value < 1 << 16:
        return b"M" + value.to_bytes(2, "little")
    if value < 1 << 31:
        return b"J" + value.to_bytes(4, "little")
    size = value.bit_length() // 8 + 1
    return b"\x8a" + size.to_bytes(1, "little") + value.to_bytes(size, "little")


def _pickled_text(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    size = b"\x8c" + len(raw).to_bytes(1, "little") if len(raw) < 1 << 8 else b"X" + len(raw).to_bytes(4, "little")
    return size + raw + _MEMOIZE


# ---- CBOR -------------------------------------------------------------------------------------

_UNSIGNED, _BYTES, _TEXT, _ARRAY = 0, 2, 3, 4  # major types
_SIZES = ((24, 1 << 8, 1), (25, 1 << 16, 2), (26, 1 << 32, 4), (27, 1 << 64, 8))


def cbor(parent: bytes, tokens: Sequence[int], extra: ExtraKeys) -> bytes:
    """cbor2.dumps((parent, tuple(tokens), extra or None), canonical=True)."""
    parts = [_cbor_head(_ARRAY, 3), _cbor_head(_BYTES, len(parent)), parent, _cbor_head(_ARRAY, len(tokens))]
    parts += [_cbor_int(token) for token in tokens]
    parts.append(_cbor_head(_ARRAY, len(extra)) if extra else b"\xf6")
    for key in extra:
        parts.append(_cbor_head(_ARRAY, len(key)))
        for word in key:
            raw = word.encode()
            parts += (_cbor_head(_TEXT, len(raw)), raw)
    return b"".join(parts)


def _cbor_head(major: int, value: int) -> bytes:
    if value < 24:
        return bytes([major << 5 | value])
    code, _, size = next(row for row in _SIZES if value < row[1])
    return bytes([major << 5 | code]) + value.to_bytes(size, "big")


@lru_cache(_CODES)
def _cbor_int(value: int) -> bytes:
    return _cbor_head(_UNSIGNED, value)


DUMPS: dict[str, Dumps] = {"sha256": pickled, "sha256_cbor": cbor}
