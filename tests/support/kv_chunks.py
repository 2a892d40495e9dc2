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
    Tier,
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
        in_l2: tuple[bytes, ...] = (),
        **changes: Any,
    ) -> ChunksDescribed:
        """`ready`: the keys whose chunks are READY already, or of several groups whose objects are."""
        keys, contents = b"".join(self.keys[first:last]), self.contents(first, last, **changes)
        by_group = ready if isinstance(ready, Mapping) else {WHOLE_CHUNKS: ready}
        resident = tuple((group, b"".join(of)) for group, of in by_group.items())
        return ChunksDescribed(1, instance, namespace, keys, resident, self.block, contents, in_l2)

    @property
    def single(self) -> Prompt:
        """The same tokens, each block by itself: what is stored of the prompt's tail."""
        return Prompt(self.tokens, 1, self.hash_bytes, self.block)


def scheduler(instance_id: str = "engine", incarnation: str = "one", **changes: Any) -> DescribeScheduler:
    return DescribeScheduler(
        instance_id=instance_id, incarnation=incarnation, model_name="m", variant="", hash_form="bytes", **changes
    )


class Witness:
    """A direct observer that checks the promise: each described object is stored once in each tier, then removed once.

    By tier and group; `groups` and `keys_of` are those of L1, `resident` and `keys` those of chunks of models with one group.
    """

    def __init__(self) -> None:
        self.tiers: dict[Tier, dict[tuple[int, ...], dict[tuple[bytes, bytes], KVChunk]]] = {
            tier: {(): {}} for tier in Tier
        }
        self.events: list[KVEvent] = []
        self.keys_in: dict[Tier, dict[int, Counter[tuple[bytes, bytes]]]] = {
            tier: {0: Counter()} for tier in Tier
        }  # how often each is stored, described or not

    @property
    def groups(self) -> dict[tuple[int, ...], dict[tuple[bytes, bytes], KVChunk]]:
        return self.tiers[Tier.L1]

    @property
    def resident(self) -> dict[tuple[bytes, bytes], KVChunk]:
        return self.groups[()]

    @property
    def keys_of(self) -> dict[int, Counter[tuple[bytes, bytes]]]:
        return self.keys_in[Tier.L1]

    @property
    def keys(self) -> Counter[tuple[bytes, bytes]]:
        return self.keys_of[0]

    def observe(self, event: DirectEvent) -> None:
        match event:
            case KeysStored():
                of_group = self.keys_in[event.tier].setdefault(event.group, Counter())
                of_group.update((event.namespace, key) for key in event.keys)
            case KeysRemoved():
                of_tier = self.keys_in[event.tier]
                for group in [each for each in of_tier if each >= 0] if event.group is None else [event.group]:
                    of_tier.setdefault(group, Counter())
                    of_tier[group] -= Counter((event.namespace, key) for key in event.keys)
            case KeysCleared():
                self.keys_in[event.tier] = {
                    group: Counter({at: n for at, n in keys.items() if not at[0].startswith(event.namespace_prefix)})
                    for group, keys in self.keys_in[event.tier].items()
                }
            case _:
                self._observe(event)

    def _observe(self, event: KVEvent) -> None:
        assert event.number == (self.events[-1].number if self.events else 0) + 1
        self.events.append(event)
        if isinstance(event, KVStored):
            for chunk in event.chunks:
                resident = self.tiers[event.tier].setdefault(_place(chunk), {})
                assert (event.namespace, chunk.key) not in resident, "stored twice"
                resident[event.namespace, chunk.key] = chunk
        elif isinstance(event, KVRemoved):
            for chunk in event.chunks:
                resident = self.tiers[event.tier][_place(chunk)]
                assert resident.pop((event.namespace, chunk.key)) is chunk, "it is not as it was stored"


def _place(chunk: KVChunk) -> tuple[int, ...]:
    """A block may have the key of a chunk."""
    return chunk.description.members if chunk.group >= 0 else (-1, *chunk.description.members)


def prompt(*tokens: int, **options: Any) -> Prompt:
    return Prompt(tokens, **options)


def extra(*blocks: Any) -> bytes:
    return msgspec.msgpack.encode(list(blocks))
