"""Chunks as engines describe them, and a model of which are resident."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Any

import msgspec

from kvserver.events import ChunksDescribed
from kvserver.kv_events.types import KVChunk, KVEvent, KVRemoved, KVStored
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
        self, namespace: bytes, first: int = 0, last: int | None = None, instance: str = "engine", **changes: Any
    ) -> ChunksDescribed:
        keys = b"".join(self.keys[first:last])
        return ChunksDescribed(1, instance, namespace, keys, self.block, self.contents(first, last, **changes))


def scheduler(instance_id: str = "engine", incarnation: str = "one", **changes: Any) -> DescribeScheduler:
    return DescribeScheduler(
        instance_id=instance_id, incarnation=incarnation, model_name="m", variant="", hash_form="bytes", **changes
    )


class Witness:
    """An observer that checks the promise: each chunk is stored once, then removed once."""

    def __init__(self) -> None:
        self.resident: dict[tuple[bytes, bytes], KVChunk] = {}
        self.events: list[KVEvent] = []

    def observe(self, event: KVEvent) -> None:
        assert event.number == (self.events[-1].number if self.events else 0) + 1
        self.events.append(event)
        if isinstance(event, KVStored):
            for chunk in event.chunks:
                assert (event.namespace, chunk.key) not in self.resident, "stored twice"
                self.resident[event.namespace, chunk.key] = chunk
        elif isinstance(event, KVRemoved):
            for chunk in event.chunks:
                assert self.resident.pop((event.namespace, chunk.key)) is chunk, "it is not as it was stored"


def prompt(*tokens: int, **options: Any) -> Prompt:
    return Prompt(tokens, **options)


def extra(*blocks: Any) -> bytes:
    return msgspec.msgpack.encode(list(blocks))
