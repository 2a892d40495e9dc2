"""Objects that an engine described, by tier, and descriptions that wait for their chunks.

An object that is in L1 and in L2 has one KVChunk, whose memory counts once. Objects of L2 alone use at most half of the memory,
so that L1 can always be described. If there is no room, an object that L1 evicts is no longer described in L2 either.

Engines describe chunks, with the stores of their first object group. An object of another group has a Description of its own, of
its part of the chunk: 0.4 KB and 4 bytes a token. Where the first group's blocks are larger than another's, the chunk's own
description is kept beside that of the first group's object.

Owns: the memory of both, which is bounded, and the reason why an object has no description. Refuses to know: events, what is in a
tier.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import msgspec

from kvserver.cache import GroupObjects
from kvserver.kv_events.descriptions import of_objects
from kvserver.kv_events.resident import ResidentChunks
from kvserver.kv_events.types import CoarseDescription, Description, KVChunk, Tier

_MOST_EXPECTED = 16_384  # descriptions of chunks that are not READY yet, and may never be
_Name: TypeAlias = tuple[bytes, int, bytes]  # namespace, first group of its kind, key
_FIRST_GROUPS = (0, -1)  # of chunks and of single blocks: engines describe these
_OTHER = {Tier.L1: Tier.L2, Tier.L2: Tier.L1}


class Unannounced(enum.Enum):
    """Reason why an object that became READY has no description."""

    UNDESCRIBED = "undescribed"  # no engine described its chunk
    MEMORY = "memory"
    MISMATCHED = "mismatched"  # the description does not fit the chunk


class Described:
    """Described objects and waiting descriptions. REQUIRES: one lock around all calls but objects()."""

    def __init__(self, memory_bytes: int, used_elsewhere: Callable[[], int] = lambda: 0) -> None:
        """`memory_bytes`: most for descriptions. `used_elsewhere`: bytes of it that descriptions elsewhere use."""
        self._limit = memory_bytes
        self._used_elsewhere = used_elsewhere
        self.resident = ResidentChunks()
        self._expected: OrderedDict[_Name, Description] = OrderedDict()  # of chunks that are not READY yet
        self._expected_bytes = 0
        self._kept: dict[_Name, Description] = {}  # of chunks that a restart keeps and that are not READY yet
        self._refused: OrderedDict[_Name, Unannounced] = OrderedDict()  # why such a description is not kept
        self.bytes = 0  # of all descriptions
        self._l2_bytes = 0  # of objects that are in L2 alone
        self.count = 0  # objects, by tier

    def objects(self, tier: Tier, namespace: bytes, group: int) -> dict[bytes, KVChunk]:
        return self.resident.of_group(tier, namespace, group)

    # ---- over a restart -----------------------------------------------------------------------

    def encode_l1(self, and_waiting: bool) -> bytes:
        """The descriptions of all chunks in L1, for restore(); `and_waiting`: also restored ones whose chunk is not READY."""
        found = dict(self._kept) if and_waiting else {}
        for (tier, namespace), groups in self.resident.places.items():
            for number in _FIRST_GROUPS if tier is Tier.L1 else ():
                for key, chunk in groups.get(number, {}).items():
                    of = chunk.description
                    found[namespace, number, key] = of.chunk if isinstance(of, CoarseDescription) else of
        return msgspec.msgpack.encode(list(found.items()))

    def restore(self, raw: bytes) -> None:
        """Keep the descriptions until their chunks are READY again. REQUIRES: encode_l1() made `raw`."""
        self._kept = dict(msgspec.msgpack.decode(raw, type=list[tuple[_Name, Description]]))

    # ---- objects ------------------------------------------------------------------------------

    def twin(self, tier: Tier, namespace: bytes, group: int, key: bytes) -> KVChunk | None:
        """The object as it is described in the other tier."""
        return self.resident.of_group(_OTHER[tier], namespace, group).get(key)

    def make(self, tier: Tier, namespace: bytes, group: GroupObjects, key: bytes) -> KVChunk | Unannounced:
        """The object as it is described in the other tier, by the chunk's description that waits, or by another object's."""
        first = group.number == group.first
        why, waiting = self._waiting((namespace, group.first, key), uses=first and tier is Tier.L1)
        if (twin := self.twin(tier, namespace, group.number, key)) is not None:
            return twin
        for source in (waiting, *self._others(namespace, group, key)):
            if source is not None and (found := of_objects(source, group)) is not None:
                return KVChunk(key, found, group.number) if self._has_room(found, tier) else Unannounced.MEMORY
        return why

    def _others(self, namespace: bytes, group: GroupObjects, key: bytes) -> Iterator[Description]:
        for tier in Tier:
            for number, chunks in self.resident.places.get((tier, namespace), {}).items():
                if (number < 0) == (group.number < 0) and key in chunks:
                    yield chunks[key].description

    def add(self, tier: Tier, namespace: bytes, chunks: Sequence[KVChunk]) -> None:
        for chunk in chunks:
            size, shared = chunk.description.size, self.twin(tier, namespace, chunk.group, chunk.key) is not None
            self.bytes += 0 if shared else size
            if shared is (tier is Tier.L1):
                self._l2_bytes += -size if shared else size
        self.count += len(chunks)
        self.resident.add(tier, namespace, chunks)

    def remove(self, tier: Tier, namespace: bytes, group: int, keys: Iterable[bytes]) -> list[KVChunk]:
        """Returns the objects that were described."""
        removed = self.resident.remove(tier, namespace, group, keys)
        for chunk in removed:
            size, shared = chunk.description.size, self.twin(tier, namespace, group, chunk.key) is not None
            self.bytes -= 0 if shared else size
            if shared is (tier is Tier.L1):
                self._l2_bytes += size if shared else -size
        self.count -= len(removed)
        return removed

    def trim(self, namespace: bytes, group: int, left_l1: Sequence[KVChunk]) -> list[KVChunk]:
        """Remove from L2 those of the objects that have just left L1 for which there is no room."""
        removed: list[KVChunk] = []
        for chunk in left_l1:
            if self._l2_bytes <= self._limit // 2:
                break
            removed += self.remove(Tier.L2, namespace, group, [chunk.key])
        return removed

    # ---- descriptions that wait ---------------------------------------------------------------

    def expect(self, namespace: bytes, first: int, key: bytes, description: Description | None) -> None:
        """Keep the description until the chunk is READY. The oldest such descriptions are dropped when there are too many."""
        name = namespace, first, key
        if name in self._expected:
            return
        if description is None or not self._has_room(description):
            self._refuse(name, Unannounced.MISMATCHED if description is None else Unannounced.MEMORY)
            return
        self._refused.pop(name, None)
        self._expected[name] = description
        self._count_expected(description.size)
        while len(self._expected) > _MOST_EXPECTED or self._expected_bytes > self._limit // 4:
            oldest, forgotten = self._expected.popitem(last=False)
            self._count_expected(-forgotten.size)
            self._refuse(oldest, Unannounced.MEMORY)

    def _waiting(self, name: _Name, uses: bool) -> tuple[Unannounced, Description | None]:
        """The chunk's description, or why there is none. `uses`: it waits no longer."""
        if not uses:
            return self._refused.get(name, Unannounced.UNDESCRIBED), self._expected.get(name)
        kept, found = self._kept.pop(name, None), self._expected.pop(name, None)
        if found is not None:
            self._count_expected(-found.size)
        return self._refused.pop(name, Unannounced.UNDESCRIBED), found or kept

    def _count_expected(self, size: int) -> None:
        self._expected_bytes += size
        self.bytes += size

    def _refuse(self, name: _Name, why: Unannounced) -> None:
        self._refused[name] = why
        if len(self._refused) > _MOST_EXPECTED:
            self._refused.popitem(last=False)

    def _has_room(self, description: Description, tier: Tier = Tier.L1) -> bool:
        if tier is Tier.L2 and self._l2_bytes + description.size > self._limit // 2:
            return False
        return self.bytes + self._used_elsewhere() + description.size <= self._limit
