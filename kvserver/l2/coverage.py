"""Coverage of an object, beyond its name: which slots of a chunk it has, and how many bytes of each.

Owns: the coverage of each object group of an instance, which is the same for all chunks of a namespace. Refuses to know: which
objects are resident, and tiers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from kvserver.cache import SLOT_FORMAT, Chunk, Groups
from kvserver.l2.base import COVERAGE_BYTES, ObjectMemory
from kvserver.protocol import ObjectGroup

_encoder = msgspec.msgpack.Encoder(order="deterministic")


@dataclass(frozen=True, slots=True)
class Coverage:
    """Coverage of one object group. `digest` covers all known here that fixes the meaning of the bytes."""

    group: int
    digest: bytes
    slots: range  # numbers of the slots in a chunk
    slot_bytes: int  # of each

    @property
    def bytes(self) -> int:
        return self.slot_bytes * len(self.slots)

    def memory_of(self, chunk: Chunk) -> ObjectMemory:
        """REQUIRES: the object's slots are there."""
        return ObjectMemory(
            self.digest, tuple([chunk.slot(number) for number in self.slots]), (self.slot_bytes,) * len(self.slots)
        )


def coverages_of(
    layout: Groups, groups: Sequence[ObjectGroup], chunk_tokens: int, slot_bytes: Sequence[Sequence[int]]
) -> list[Coverage | None]:
    """Coverages by object group. `slot_bytes`: of each group, by rank.

    None where the ranks' slots differ in size (pipeline stages): such objects stay in L1.
    """
    found: list[Coverage | None] = []
    for number, (group, sizes) in enumerate(zip(groups, slot_bytes, strict=True)):
        slots = range(layout.first[number], layout.first[number] + layout.slots[number])
        content = [SLOT_FORMAT, chunk_tokens, group, group.object_blocks(chunk_tokens), sizes[0], len(slots)]
        digest = hashlib.blake2b(_encoder.encode(content), digest_size=COVERAGE_BYTES).digest()
        found.append(Coverage(number, digest, slots, sizes[0]) if len(set(sizes)) == 1 else None)
    return found
