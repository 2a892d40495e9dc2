"""Typed KV events for an observer, and a plain model of what its audience should know after them."""

from __future__ import annotations

import hashlib
import time
from array import array

import msgspec

from kvserver.kv_events.types import (
    Description,
    KVChunk,
    KVEventObserver,
    KVRemoved,
    KVStored,
    ReaderConnected,
    ReaderDisconnected,
    Tier,
)
from kvserver.protocol import DescribeScheduler, HashForm, KVGroup

BLOCK_TOKENS = 16
Block = tuple[str, int | None, int | bytes]  # medium, group, hash


def named(text: str, hash_bytes: int = 32) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:hash_bytes]


def namespace_prefix(text: str) -> bytes:
    """Of a registration and its weights; the namespace of requests without a LoRA, too."""
    return named(text) + named("epoch")


def describe(
    *blocks: str,
    parent: str = "",
    hash_bytes: int = 32,
    lora_name: str = "",
    extra_keys: list | None = None,
    members: tuple[int, ...] = (),
) -> Description:
    """A chunk of blocks, whose tokens count from the first one's on."""
    return Description(
        hash_bytes,
        b"".join(named(block, hash_bytes) for block in blocks),
        named(parent, hash_bytes) if parent else b"",
        array("I", range(BLOCK_TOKENS * len(blocks))).tobytes(),
        BLOCK_TOKENS,
        lora_name,
        b"" if extra_keys is None else msgspec.msgpack.encode(extra_keys),
        members,
    )


def chunk(*blocks: str, **described: object) -> KVChunk:
    return KVChunk(named(blocks[-1]), describe(*blocks, **described))


def in_form(name: bytes, form: str) -> int | bytes:
    return int.from_bytes(name[-8:], "big") if form == "int" else name


class Feed:
    """Sends events to an observer, and remembers which chunks are resident."""

    def __init__(self, observer: KVEventObserver) -> None:
        self.observer = observer
        self.resident: dict[tuple[Tier, bytes, tuple[int, ...], bytes], KVChunk] = {}
        self._number = 0

    def _next(self) -> tuple[int, int]:
        self._number += 1
        return self._number, time.monotonic_ns()

    def stored(self, namespace: bytes, *chunks: KVChunk, tier: Tier = Tier.L1) -> None:
        self.resident.update({(tier, namespace, each.description.members, each.key): each for each in chunks})
        self.observer.observe(KVStored(*self._next(), tier, namespace, chunks))

    def removed(self, namespace: bytes, *chunks: KVChunk, tier: Tier = Tier.L1) -> None:
        for each in chunks:
            del self.resident[tier, namespace, each.description.members, each.key]
        self.observer.observe(KVRemoved(*self._next(), tier, namespace, chunks))

    def reader_connected(
        self,
        instance_id: str,
        at: bytes,
        model_name: str = "model",
        form: HashForm = "int",
        groups: tuple[KVGroup, ...] = (KVGroup("full_attention"),),
    ) -> None:
        scheduler = DescribeScheduler(
            instance_id=instance_id,
            incarnation="1",
            model_name=model_name,
            variant="0",
            hash_form=form,
            groups=groups,
        )
        self.observer.observe(ReaderConnected(*self._next(), scheduler, at, 4, BLOCK_TOKENS))

    def reader_disconnected(self, instance_id: str, model_name: str = "model") -> None:
        self.observer.observe(ReaderDisconnected(*self._next(), instance_id, model_name))

    def blocks(self, *prefixes: bytes, form: str = "int", groups: int = 1) -> set[Block]:
        """Those that an audience of these namespace prefixes should know."""
        return {
            (tier.value, group if groups else None, in_form(each.description.hashes[at : at + width], form))
            for (tier, namespace, members, _), each in self.resident.items()
            if namespace.startswith(prefixes)
            for width in [each.description.hash_bytes]
            for at in range(0, len(each.description.hashes), width)
            for group in members or range(groups or 1)
        }
