"""Chunks as engines describe them, and a model of which are resident."""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvserver.cache import WHOLE_CHUNKS, GroupObjects
from kvserver.events import ChunksDescribed
from kvserver.kv_events.types import (
    DirectEvent,
    KeysCleared,
    KeysRemoved,
    KeysStored,
    KVChunk,
    KVEvent,
    KVRemoved,
    KVStored,
)
from kvserver.protocol import ChunkContents, DescribeScheduler

BLOCK_TOKENS = 4


def hash_of(parent: bytes, tokens: Sequence[int], hash_bytes: int = 32) -> bytes:
    return hashlib.sha256(parent + struct.pack(f"<{len(tokens)}I", *tokens)).digest()[:hash_bytes]


class Prompt:
    """Tokens cut into chunks of `chunk_blocks` blocks, hashed in a chain as engines do."""

    def __init__(self, tokens: Sequence[int], chunk_blocks: int = 2, hash_bytes: int = 32, block: int = BLOCK_TOKENS):
        self.chunk_blocks, self.hash_bytes, self.block = chunk_blocks, hash_bytes, block
        chunk_tokens = chunk_blocks * block
        self.tokens = list(tokens[: len(tokens) // chunk_tokens * chunk_tokens])
        self.hashes: list[bytes] = []
        for at in range(0, len(self.tokens), block):
            before = self.hashes[-1] if self.hashes else b""
            self.hashes.append(hash_of(before, self.tokens[at : at + block], hash_bytes))

    @property
    def keys(self) -> list[bytes]:
        return [last.ljust(32, b"\0") for last in self.hashes[self.chunk_blocks - 1 :: self.chunk_blocks]]

    def contents(self, first: int = 0, last: int | None = None, **changes: Any) -> ChunkContents:
        """Of the chunks [first, last)."""
        last = len(self.keys) if last is None else last
        begin, end = first * self.chunk_blocks, last * self.chunk_blocks
        tokens = self.tokens[begin * self.block : end * self.block]
        fields: dict[str, Any] = {
            "hash_bytes": self.hash_bytes,
            "hashes": b"".join(self.hashes[begin:end]),
            "tokens": struct.pack(f"<{len(tokens)}I", *tokens),
            "parent": self.hashes[begin - 1] if begin else b"",
        }
        return ChunkContents(**{**fields, **changes})

    def described(
        self,
        namespace: bytes,
        first: int = 0,
        last: int | None = None,
        instance: str = "engine",
        ready: Sequence[bytes] | Mapping[GroupObjects, Sequence[bytes]] = (),
        **changes: Any,
    ) -> ChunksDescribed:
        """`ready`: the keys whose chunks are READY already, or of several groups whose objects are."""
        keys, contents = b"".join(self.keys[first:last]), self.contents(first, last, **changes)
        by_group = ready if isinstance(ready, Mapping) else {WHOLE_CHUNKS: ready}
        resident = tuple((group, b"".join(of)) for group, of in by_group.items())
        return ChunksDescribed(1, instance, namespace, keys, resident, self.block, contents)


def scheduler(instance_id: str = "engine", incarnation: str = "one", **changes: Any) -> DescribeScheduler:
    return DescribeScheduler(
        instance_id=instance_id, incarnation=incarnation, model_name="m", variant="", hash_form="bytes", **changes
    )


class Witness:
    """A direct observer that checks the promise: each described object is stored once, then removed once.

    By group: `resident` and `keys` are those of models with one.
    """

    def __init__(self) -> None:
        self.groups: dict[tuple[int, ...], dict[tuple[bytes, bytes], KVChunk]] = {(): {}}
        self.events: list[KVEvent] = []
        self.keys_of: dict[int, Counter[tuple[bytes, bytes]]] = {
            0: Counter()
        }  # how often each is stored, described or not

    @property
    def resident(self) -> dict[tuple[bytes, bytes], KVChunk]:
        return self.groups[()]

    @property
    def keys(self) -> Counter[tuple[bytes, bytes]]:
        return self.keys_of[0]

    def observe(self, event: DirectEvent) -> None:
        match event:
            case KeysStored():
                self.keys_of.setdefault(event.group, Counter()).update((event.namespace, key) for key in event.keys)
            case KeysRemoved():
                for group in self.keys_of if event.group is None else [event.group]:
                    self.keys_of[group] -= Counter((event.namespace, key) for key in event.keys)
            case KeysCleared():
                self.keys_of = {
                    group: Counter({at: n for at, n in keys.items() if not at[0].startswith(event.namespace_prefix)})
                    for group, keys in self.keys_of.items()
                }
            case _:
                self._observe(event)

    def _observe(self, event: KVEvent) -> None:
        assert event.number == (self.events[-1].number if self.events else 0) + 1
        self.events.append(event)
        if isinstance(event, KVStored):
            for chunk in event.chunks:
                resident = self.groups.setdefault(chunk.description.members, {})
                assert (event.namespace, chunk.key) not in resident, "stored twice"
                resident[event.namespace, chunk.key] = chunk
        elif isinstance(event, KVRemoved):
            for chunk in event.chunks:
                resident = self.groups[chunk.description.members]
                assert resident.pop((event.namespace, chunk.key)) is chunk, "it is not as it was stored"


def prompt(*tokens: int, **options: Any) -> Prompt:
    return Prompt(tokens, **options)


def extra(*blocks: Any) -> bytes:
    return msgspec.msgpack.encode(list(blocks))
