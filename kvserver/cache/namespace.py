"""Namespaces: the instances that may share KV.

Owns: the fingerprint of everything that must agree, and the check that the ranks of an instance agree. Refuses to know: the
meaning of counted fields, and the chunks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from kvserver.protocol import Counted, ErrorCode, KVServerError, ObjectGroup, RegisterWorker

# Part of every fingerprint: bump it when the arrangement of bytes in a slot changes.
SLOT_FORMAT = "block,plane,run/2"
_BASE_BYTES = 32  # of a namespace's id: the fingerprint of the registration
_EPOCH_BYTES = 64  # the fingerprint and the weights epoch
_TAILS = b"tails"

_encoder = msgspec.msgpack.Encoder(order="deterministic")


def check_agreement(first: RegisterWorker, other: RegisterWorker) -> None:
    """KVServerError(RANKS_DISAGREE) names the first field in which two ranks of one instance differ."""
    for name in (
        "model_name",
        "world_size",
        "num_blocks",
        "block_tokens",
        "chunk_blocks",
        "object_groups",
        "group_blocks",
        "tails",
    ):
        _check_same(name, getattr(first, name), getattr(other, name), first.rank, other.rank)
    fields, others = counted(first), counted(other)
    for name in sorted({*fields, *others}):
        if _digest(fields.get(name)) != _digest(others.get(name)):
            _check_same(name, fields.get(name), others.get(name), first.rank, other.rank)
    replicated = {member for group in first.object_groups if group.replicated for member in group.members}
    if replicated:
        _check_same("layout", first.layout, other.layout, first.rank, other.rank)
        for name, value in (("runs", "run_bytes"), ("groups", "group")):
            stated = [
                [getattr(plane, value) for plane in spec.planes if plane.group in replicated] for spec in (first, other)
            ]
            _check_same(name, stated[0], stated[1], first.rank, other.rank)


def _check_same(name: str, a: object, b: object, rank_a: int, rank_b: int) -> None:
    if a != b:
        stated = [_shown(value) for value in (a, b)]
        raise KVServerError(
            ErrorCode.RANKS_DISAGREE, f"rank {rank_b} states {name}={stated[1]}, rank {rank_a} states {stated[0]}"
        )


def _digest(field: Counted | None) -> str | None:
    return field.digest if field is not None else None


def _shown(value: object) -> str:
    return repr((value.value or value.digest) if isinstance(value, Counted) else value)


def counted(spec: RegisterWorker) -> dict[str, Counted]:
    """The fields that must agree beside the geometry, by name. KVServerError if there are none."""
    if not spec.counted:
        raise KVServerError(ErrorCode.BAD_MESSAGE, "`$.counted` is empty: it names what must agree")
    return {field.name: field for field in spec.counted}


def private_reason(ranks: Iterable[RegisterWorker]) -> str:
    """Reason why an instance shares KV with no other incarnation; empty if it does share."""
    return next(filter(None, (rank.private for rank in ranks)), "")


def fingerprint(ranks: list[RegisterWorker]) -> bytes:
    """32 bytes over the counted fields, chunk tokens, object groups, each rank's layout, groups, run lengths.

    The fingerprint of a private instance also covers its incarnation.

    REQUIRES: all ranks, in rank order, and they agree. Addresses, block counts and strides are not covered: they
    do not change the bytes in a slot.
    """
    first = ranks[0]
    content = [
        SLOT_FORMAT,
        {field.name: field.digest for field in counted(first).values()},
        [first.instance_id, first.incarnation] if any(rank.private for rank in ranks) else [],
        first.chunk_tokens,
        first.object_groups,
        [[rank.layout, [(plane.group, plane.run_bytes) for plane in rank.planes]] for rank in ranks],
    ]
    return hashlib.sha256(_encoder.encode(content)).digest()


def fingerprint_parts(ranks: Sequence[RegisterWorker]) -> Iterator[tuple[str, object, str]]:
    """The parts of fingerprint(), each with name, content, and a value for people where that is safe.

    A value is text that the engine sent for people, or geometry: never a place or a secret.
    """
    first = ranks[0]
    for name, field in counted(first).items():
        yield name, field.digest, field.value
    private = private_reason(ranks) if any(rank.private for rank in ranks) else ""
    yield "private", [first.instance_id, first.incarnation] if private else [], private or "no"
    yield "chunk_tokens", first.chunk_tokens, str(first.chunk_tokens)
    yield "groups", first.object_groups, ", ".join(map(_group_text, first.object_groups))
    yield "ranks", len(ranks), str(len(ranks))
    yield "layout", [rank.layout for rank in ranks], ""
    runs = [[(plane.group, plane.run_bytes) for plane in rank.planes] for rank in ranks]
    bytes_per_block = sum(run_bytes for _, run_bytes in runs[0])
    yield "planes", runs, f"{len(runs[0])} of rank 0, {bytes_per_block} bytes a block"


def _group_text(group: ObjectGroup) -> str:
    tokens = f" {group.tokens}" if group.tokens else ""
    return f"{group.kind}{tokens}{' replicated' if group.replicated else ''}: {len(group.members)} of {group.block_tokens} tokens"


def with_variant(base: bytes, variant: str) -> bytes:
    """The namespace of one weights epoch and LoRA within a registration; `base` itself for "".

    `variant` is "epoch" or "epoch/lora". The id begins with `base`, then the epoch's digest, so a prefix of the id finds
    all namespaces of one registration, or of one weights epoch.
    """
    return base + b"".join(hashlib.sha256(part.encode()).digest() for part in variant.split("/", 1) if part)


def split_namespace(namespace: bytes) -> tuple[bytes, bytes, bytes]:
    """The parts of a namespace's id for the registration, the weights epoch and the LoRA; b"" for an absent part."""
    return namespace[:_BASE_BYTES], namespace[_BASE_BYTES:_EPOCH_BYTES], namespace[_EPOCH_BYTES:]


def tails_of(namespace: bytes) -> bytes:
    """The namespace of single blocks beside a namespace of chunks: a key may name an object of either size."""
    return namespace + _TAILS


def chunks_of(tails: bytes) -> bytes:
    """The namespace of chunks beside a namespace of single blocks. REQUIRES: tails_of() made it."""
    return tails.removesuffix(_TAILS)


def epoch_of(namespace: bytes) -> bytes:
    """The part of a namespace's id that all LoRAs of the same weights share."""
    return namespace[:_EPOCH_BYTES]
