"""Result of a lookup: what it found, and why it did not find more.

Owns: the outcome, the reasons and a bounded memory of evicted keys. Refuses to know: resident chunks (`cache`).
"""

from __future__ import annotations

from enum import Enum

import msgspec

LEAST_REMEMBERED = 1 << 15  # evicted keys, also if L1 has fewer chunks
_BUCKET = 8  # places that one digest may use


class MissReason(str, Enum):
    """Reason of one missed chunk; Cache.lookup() determines it."""

    EVICTED = "evicted"  # it was evicted, and EvictedKeys still remembers it, or the chunk behind it
    PINNED_OUT = "pinned_out"  # it was evicted, and would be there if pins kept no other chunk
    NO_BOUNDARY = (
        "no_boundary"  # full attention's KV is resident, but a window's or a state's at no boundary behind the chunk
    )
    FILLING = "filling"  # a store fills it now
    IN_L2 = "in_l2"  # L1 lacks it, a tier of L2 has it; kvserver_filled_tokens_total counts those that were read
    SLOW_L2 = "slow_l2"  # as IN_L2, and it was not read: to compute it was expected to take less time
    OTHER_NAMESPACE = "other_namespace"  # it is resident for engines that may not share KV with this one
    UNAVAILABLE = "unavailable"  # not all ranks are registered, the device is lost, or serving is off
    NEVER_STORED = "never_stored"  # none of the other reasons; includes chunks that were cleared, or evicted long ago
    PARTIAL_CHUNK = (
        "partial_chunk"  # tokens of the prompt beyond its last full chunk, whose blocks were not found either
    )


class LookupOutcome(msgspec.Struct, frozen=True, gc=False):
    """A hit at boundary `hit_chunks` of `chunks` chunks. The chunks behind it are missed; the first of them has position `hit_chunks`.

    All full groups have the first `full_chunks`; these are more than the hit if other groups' objects are missing. The hit
    includes the blocks of the next `tail_tokens` tokens: of the first missed chunk, or behind the last chunk.
    """

    chunks: int
    hit_chunks: int
    missed: tuple[tuple[MissReason, int], ...] = ()  # chunks by reason, the reason of the first missed chunk first
    missing_key: bytes = b""  # of the first missed chunk
    other_namespace: bytes = b""  # of OTHER_NAMESPACE: one that has the first missed chunk
    unavailable: str = ""  # of UNAVAILABLE: why no chunk could be found
    full_chunks: int = 0
    tail_blocks: int = 0
    tail_tokens: int = 0

    def missed_tokens(self, chunk_tokens: int, prompt_tokens: int) -> dict[MissReason, int]:
        """Missed tokens by reason, that of the first missed chunk first. `prompt_tokens` is 0 if it was not stated."""
        found = {reason: chunks * chunk_tokens for reason, chunks in self.missed}
        if found:
            found[self.missed[0][0]] -= self.tail_tokens
        beyond = prompt_tokens - self.chunks * chunk_tokens - (0 if found else self.tail_tokens)
        return found | ({MissReason.PARTIAL_CHUNK: beyond} if beyond > 0 else {})

    def looked_up_tokens(self, chunk_tokens: int) -> int:
        """Tokens of the chunks, and of the blocks that were found behind the last one."""
        return self.chunks * chunk_tokens + (0 if self.missed else self.tail_tokens)


def counted_in_l2(outcome: LookupOutcome, boundary: int, reason: MissReason = MissReason.IN_L2) -> LookupOutcome:
    """The outcome where chunks [hit_chunks, boundary) are in L2: they are missed for that reason, the others as before."""
    left = boundary - outcome.hit_chunks
    missed = [(reason, left)]
    for reason, chunks in outcome.missed:
        moved = min(left, chunks)
        left -= moved
        if chunks > moved:
            missed.append((reason, chunks - moved))
    return msgspec.structs.replace(outcome, missed=tuple(missed), other_namespace=b"")


def filled_to(outcome: LookupOutcome, boundary: int) -> LookupOutcome:
    """The outcome after chunks [hit_chunks, boundary) were read from L2: the hit is longer by them, and only the rest is missed."""
    missed = counted_in_l2(outcome, boundary).missed[1:]
    return LookupOutcome(outcome.chunks, boundary, missed, full_chunks=max(boundary, outcome.full_chunks))


class EvictedKeys:
    """The last evicted (namespace, key) pairs: between one and two times as many as L1 has chunks.

    Keeps two generations of digests, which use 16 bytes for each chunk of L1. About one in a hundred pairs is lost when buckets
    overflow. About one of a hundred million other pairs is mistaken for an evicted one.
    """

    def __init__(self) -> None:
        self._young = _Generation(LEAST_REMEMBERED)
        self._old = _Generation(0)

    def add(self, namespace: bytes, key: bytes, chunks: int) -> None:
        """Remember one evicted pair. `chunks`: the number of chunks in L1."""
        if not self._young.room:
            self._old, self._young = self._young, _Generation(max(LEAST_REMEMBERED, chunks))
        self._young.add(hash((namespace, key)))

    def __contains__(self, pair: tuple[bytes, bytes]) -> bool:
        digest = hash(pair)
        return digest in self._young or digest in self._old

    @property
    def bytes(self) -> int:
        return self._young.bytes + self._old.bytes


class _Generation:
    """A table for `room` digests. The time of a call does not grow with the number of digests."""

    def __init__(self, room: int) -> None:
        self.room = room
        self._buckets = max(1, 2 * room // _BUCKET)  # half of the places stay empty, so that few buckets overflow
        self._marks = memoryview(bytearray(4 * _BUCKET * self._buckets)).cast("I")  # 0: a free place

    @property
    def bytes(self) -> int:
        return self._marks.nbytes

    def add(self, digest: int) -> None:
        first, mark = self._bucket(digest)
        marks = self._marks[first : first + _BUCKET].tolist()
        place = marks.index(0) if 0 in marks else self.room % _BUCKET
        self._marks[first + place] = mark
        self.room -= 1

    def __contains__(self, digest: int) -> bool:
        first, mark = self._bucket(digest)
        return mark in self._marks[first : first + _BUCKET].tolist()

    def _bucket(self, digest: int) -> tuple[int, int]:
        return (digest >> 32) % self._buckets * _BUCKET, (digest & 0xFFFFFFFF) or 1
