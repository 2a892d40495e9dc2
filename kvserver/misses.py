"""Why a lookup did not find a chunk.

Owns: the reasons and a bounded memory of what was evicted. Refuses to know: the chunks that are there (`cache`).
"""

from __future__ import annotations

from enum import Enum

REMEMBERED_KEYS = 1 << 16  # evicted keys, at least half of them; at most some 6 MB


class MissReason(str, Enum):
    """Decided by the first chunk that was missing, for all from there on."""

    EVICTED = "evicted"  # it was here, and is among the last evicted
    FILLING = "filling"  # it is on its way
    OTHER_NAMESPACE = "other_namespace"  # engines that may not share with this one have it
    UNAVAILABLE = "unavailable"  # not all ranks stand, or the device is lost: nothing could be found
    NEVER_STORED = "never_stored"  # none of these; also what was cleared, or evicted long ago
    PARTIAL_CHUNK = "partial_chunk"  # tokens of the prompt beyond its last full chunk


class EvictedKeys:
    """The last evicted (namespace, key) pairs, as 8-byte hashes, in two generations."""

    def __init__(self, limit: int = REMEMBERED_KEYS) -> None:
        self._half = limit // 2
        self._young: set[int] = set()
        self._old: set[int] = set()

    def add(self, namespace: bytes, key: bytes) -> None:
        self._young.add(hash((namespace, key)))
        if len(self._young) >= self._half:
            self._old, self._young = self._young, set()

    def __contains__(self, pair: tuple[bytes, bytes]) -> bool:
        digest = hash(pair)
        return digest in self._young or digest in self._old
