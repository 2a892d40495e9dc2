"""Why a lookup did not find a chunk.

Owns: the reasons and a bounded memory of what was evicted. Refuses to know: the chunks that are there (`cache`).
"""

from __future__ import annotations

from enum import Enum

LEAST_REMEMBERED = 1 << 15  # evicted keys, however few chunks L1 has
_BUCKET = 8  # places, in one of which a digest is


class MissReason(str, Enum):
    """Each chunk has its own; see Cache.why_missed."""

    EVICTED = "evicted"  # it was here, and is among the last evicted
    FILLING = "filling"  # it is on its way
    OTHER_NAMESPACE = "other_namespace"  # engines that may not share with this one have it
    UNAVAILABLE = "unavailable"  # not all ranks stand, or the device is lost: nothing could be found
    NEVER_STORED = "never_stored"  # none of these; also what was cleared, or evicted long ago
    PARTIAL_CHUNK = "partial_chunk"  # tokens of the prompt beyond its last full chunk


class EvictedKeys:
    """The last evicted (namespace, key) pairs: about one to two times as many as L1 has chunks.

    In two generations of digests, 16 bytes a chunk of L1 in all. A few in a hundred are lost where buckets overflow;
    a stranger is taken for one of them once in some hundred million times.
    """

    def __init__(self) -> None:
        self._young = _Generation(LEAST_REMEMBERED)
        self._old = _Generation(0)

    def add(self, namespace: bytes, key: bytes, chunks: int) -> None:
        """`chunks`: how many L1 has."""
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
    """Room for so many digests, made and dropped at once: no call takes longer the more there are."""

    def __init__(self, room: int) -> None:
        self.room = room
        self._buckets = max(1, 2 * room // _BUCKET)  # half empty, so that few overflow
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
