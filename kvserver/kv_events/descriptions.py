"""Makes a description of each chunk of a Store from the Store's contents.

Owns: which contents are valid. They must fit the chunks' keys, and invalid data from an engine must be harmless to
later decoders. Refuses to know: where the chunks are.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvserver.cache import GroupObjects
from kvserver.events import ChunksDescribed
from kvserver.kv_events.types import CoarseDescription, Description
from kvserver.protocol import KEY_BYTES, TOKEN_BYTES

_NIL = b"\xc0"
_DEEPEST = 2  # nested lists in a block's extra keys, such as vLLM's (identifier, offset)
_MOST_OFFSET = 1 << 63  # more, and what is added to it, would not fit into a message
_raw_list = msgspec.msgpack.Decoder(list[msgspec.Raw])
_block_keys = msgspec.msgpack.Decoder(list[Any])


def describe(event: ChunksDescribed) -> list[Description | None]:
    """A description for each key, None where the contents do not fit. REQUIRES: hashes and tokens of whole chunks."""
    contents, chunks = event.contents, len(event.keys) // KEY_BYTES
    hash_bytes = contents.hash_bytes
    blocks = len(contents.hashes) // hash_bytes // chunks
    extra_keys = _checked(contents.extra_keys, blocks * chunks)
    if extra_keys is None:
        return [None] * chunks
    described: list[Description | None] = []
    parent, hashes_size, tokens_size = contents.parent, blocks * hash_bytes, len(contents.tokens) // chunks
    for at in range(chunks):
        hashes = contents.hashes[at * hashes_size : (at + 1) * hashes_size]
        last = hashes[-hash_bytes:]
        fits = event.keys[at * KEY_BYTES : (at + 1) * KEY_BYTES] == last.ljust(KEY_BYTES, b"\0")
        described.append(
            Description(
                hash_bytes,
                hashes,
                parent,
                contents.tokens[at * tokens_size : (at + 1) * tokens_size],
                event.block_tokens,
                contents.lora_name,
                _joined(extra_keys[at * blocks : (at + 1) * blocks]),
                session_id=event.session_id,
            )
            if fits
            else None
        )
        parent = last
    return described


def of_objects(chunk: Description, objects: GroupObjects) -> Description | None:
    """Description of the group's object of a described chunk; None if the hashes of the object's blocks are not known."""
    if not objects.members:
        return chunk
    if isinstance(chunk, CoarseDescription):
        chunk = chunk.chunk
    step, rest = divmod(objects.block_tokens, chunk.block_tokens)  # a block's hash is the last one inside it
    first = chunk.blocks - step * objects.blocks
    if rest or first < 0:
        return None
    part, width = part_of(chunk, first, chunk.blocks), chunk.hash_bytes
    keys = _raw_list.decode(part.extra_keys) if part.extra_keys else []
    ends = range(step * width, len(part.hashes) + 1, step * width)
    found = msgspec.structs.replace(
        part,
        hashes=b"".join([part.hashes[end - width : end] for end in ends]),
        block_tokens=objects.block_tokens,
        extra_keys=_joined([_merged(keys[at : at + step], chunk.block_tokens) for at in range(0, len(keys), step)]),
        members=objects.members,
    )
    if step == 1 or objects.number:
        return found
    return CoarseDescription(*msgspec.structs.astuple(found), chunk=chunk)


def _merged(parts: list[msgspec.Raw], block_tokens: int) -> bytes:
    """The extra keys of one block that consists of smaller ones. Items have the offset from the start of their block."""
    if len(parts) == 1:
        return bytes(parts[0])
    found: dict[bytes, None] = {}  # each key once, encoded
    for number, part in enumerate(parts):
        for key in _block_keys.decode(part) if bytes(part) != _NIL else ():
            match key:
                case [name, int(offset)] if offset < _MOST_OFFSET:
                    key = [name, offset + number * block_tokens]
            found[msgspec.msgpack.encode(key)] = None
    return _list_of(len(found)) + b"".join(found) if found else _NIL


def part_of(chunk: Description, first: int, last: int) -> Description:
    """Blocks [first, last) of the chunk. REQUIRES: valid extra keys."""
    if (first, last) == (0, chunk.blocks):
        return chunk
    width, size = chunk.hash_bytes, chunk.block_tokens * TOKEN_BYTES
    keys = _raw_list.decode(chunk.extra_keys)[first:last] if chunk.extra_keys else []
    return msgspec.structs.replace(
        chunk,
        hashes=chunk.hashes[first * width : last * width],
        parent=chunk.hashes[(first - 1) * width : first * width] if first else chunk.parent,
        tokens=chunk.tokens[first * size : last * size],
        extra_keys=_joined([bytes(raw) for raw in keys]),
    )


def _checked(raw: bytes, blocks: int) -> list[bytes] | None:
    """The encoded extra keys of each block; [] if `raw` is empty. None if `raw` is invalid."""
    if not raw:
        return []
    if not raw.startswith(_list_of(blocks)):  # before decoding what may be millions of items
        return None
    try:
        found = [bytes(part) for part in _raw_list.decode(raw)]
        fits = all(part == _NIL or _plain(_block_keys.decode(part), _DEEPEST) for part in found)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return found if fits else None


def _plain(value: Any, depth: int) -> bool:
    """True if any msgpack or JSON decoder accepts it, and lists are nested at most `depth` deep."""
    if isinstance(value, list):
        return depth > 0 and all(_plain(item, depth - 1) for item in value)
    return value is None or isinstance(value, str | bytes | int | float)


def _joined(parts: list[bytes]) -> bytes:
    if all(part == _NIL for part in parts):
        return b""
    return _list_of(len(parts)) + b"".join(parts)


def _list_of(count: int) -> bytes:
    """The first bytes of a msgpack list with `count` items."""
    if count < 16:
        return bytes([0x90 | count])
    return b"\xdc" + count.to_bytes(2, "big") if count < 1 << 16 else b"\xdd" + count.to_bytes(4, "big")
