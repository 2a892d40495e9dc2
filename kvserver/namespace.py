"""Who may share KV with whom.

Owns: the fingerprint of everything that must agree, and whether the ranks of an instance do. Refuses
to know: where the texts of a ModelIdentity come from, and the chunks.
"""

from __future__ import annotations

import hashlib

import msgspec

from kvserver.errors import ErrorCode, KVServerError
from kvserver.protocol import ModelIdentity, RegisterWorker

# Part of every fingerprint: bump it when the arrangement of bytes in a slot changes.
SLOT_FORMAT = "block,plane,run/1"
_EPOCH_BYTES = 64  # of a namespace: registration, then epoch

_encoder = msgspec.msgpack.Encoder(order="deterministic")


def check_agreement(first: RegisterWorker, other: RegisterWorker) -> None:
    """KVServerError(RANKS_DISAGREE) names the first thing two ranks of one instance say differently."""
    for name in ("model_name", "world_size", "num_blocks", "block_tokens", "chunk_blocks", "replicated"):
        _same(name, getattr(first, name), getattr(other, name), first.rank, other.rank)
    for field in msgspec.structs.fields(ModelIdentity):
        name = field.name
        _same(f"identity.{name}", getattr(first.identity, name), getattr(other.identity, name), first.rank, other.rank)
    if first.replicated:
        _same("layout", first.layout, other.layout, first.rank, other.rank)
        for name, value in (("runs", "run_bytes"), ("groups", "group")):
            said = [[getattr(plane, value) for plane in spec.planes] for spec in (first, other)]
            _same(name, said[0], said[1], first.rank, other.rank)


def _same(name: str, a: object, b: object, rank_a: int, rank_b: int) -> None:
    if a != b:
        raise KVServerError(ErrorCode.RANKS_DISAGREE, f"rank {rank_b} says {name}={b!r}, rank {rank_a} says {a!r}")


def fingerprint(ranks: list[RegisterWorker]) -> bytes:
    """32 bytes over the identity, block and chunk tokens, what ranks share, and each rank's layout, groups and run lengths.

    REQUIRES: all ranks, in rank order, that agree. Addresses, block counts and strides stay out: they
    do not change what a slot holds.
    """
    first = ranks[0]
    content = [
        SLOT_FORMAT,
        first.identity,
        first.block_tokens,
        first.chunk_blocks,
        first.replicated,
        [[rank.layout, [(plane.group, plane.run_bytes) for plane in rank.planes]] for rank in ranks],
    ]
    return hashlib.sha256(_encoder.encode(content)).digest()


def with_variant(base: bytes, variant: str) -> bytes:
    """The namespace of one weights epoch and LoRA within a registration; `base` itself for "".

    `variant` is "epoch" or "epoch/lora". The namespace begins with `base`, and with that of the epoch alone, so that all
    that one registration can see, or one epoch of it, is found by that.
    """
    return base + b"".join(hashlib.sha256(part.encode()).digest() for part in variant.split("/", 1) if part)


def epoch_of(namespace: bytes) -> bytes:
    """The part of a namespace's id that it shares with all LoRAs of the same weights."""
    return namespace[:_EPOCH_BYTES]
