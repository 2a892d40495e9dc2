"""One chunk of L1: the slots of all ranks under one key, and what holds them there.

Ranks here are the ranks that store: one rank if all ranks have the same bytes, whatever the engine's world size.

Owns: a chunk's state and slots, its namespace, and the counts of a model. Refuses to know: what pages contain, deadlines
of leases, copies. One thread uses it.

A chunk is FILLING until every rank's bytes were copied whole, then READY. A chunk is detached if its namespace was
cleared or if it left the index: lookups do not find it, and its pages are freed when its last pin ends.
"""

from __future__ import annotations

import sys
from array import array

from kvserver.cache.pages import page_count


class ModelUse:
    """What one model uses of L1. `pages` includes the pages of detached chunks until they are freed."""

    __slots__ = ("chunks", "evicted_chunks", "never_loaded_chunks", "pages")

    def __init__(self) -> None:
        self.chunks = 0
        self.pages = 0
        self.evicted_chunks = 0
        self.never_loaded_chunks = 0  # evicted chunks that were READY and never loaded


class Namespace:
    """The chunks that one set of engines may share. Setting `cleared` detaches all of them at once."""

    __slots__ = ("chunks", "cleared", "id", "model", "world_size")

    def __init__(self, id: bytes, world_size: int, model: ModelUse) -> None:
        self.id = id
        self.world_size = world_size
        self.model = model
        self.chunks: dict[bytes, Chunk] = {}
        self.cleared = False


class Chunk:
    """One chunk; an eviction policy adds its own state in a subclass. `done` and `filling` are bit sets of ranks; `ready` is done == all ranks.

    `pins` counts tickets, `leases` counts requests. A chunk with either is not evicted.
    """

    __slots__ = ("_slots", "done", "filling", "in_index", "key", "leases", "loaded", "namespace", "pins", "ready")

    def __init__(self, namespace: Namespace, key: bytes) -> None:
        self.namespace = namespace
        self.key = key
        # One rank: its slot. Several ranks: for each rank the u32 offset in these bytes where its slot ends, then the
        # slots. One object per rank would use more memory than the rest of a chunk.
        self._slots = b""
        self.done = 0
        self.filling = 0
        self.ready = False
        self.loaded = False  # at least one rank has loaded it whole
        self.leases = 0
        self.pins = 0
        self.in_index = True

    @property
    def detached(self) -> bool:
        return self.namespace.cleared or not self.in_index

    def slot(self, rank: int) -> bytes:
        """The rank's slot; b"" if the rank has none."""
        if self.namespace.world_size == 1 or not self._slots:
            return self._slots
        begin, end = self._bounds(rank)
        return self._slots[begin:end]

    def set_slot(self, rank: int, slot: bytes) -> None:
        """Set the rank's slot; b"" removes it."""
        ranks = self.namespace.world_size
        if ranks == 1:
            self._slots = slot
            return
        if not self._slots:
            self._slots = array("I", [4 * ranks] * ranks).tobytes()
        begin, end = self._bounds(rank)
        ends = array("I", self._slots[: 4 * ranks])
        grown = len(slot) - (end - begin)
        for later in range(rank, ranks):
            ends[later] += grown
        self._slots = ends.tobytes() + self._slots[4 * ranks : begin] + slot + self._slots[end:]

    def remove_slots(self) -> bytes:
        """Remove all ranks' slots and return them joined."""
        slots, self._slots = self._joined, b""
        return slots

    @property
    def page_count(self) -> int:
        return page_count(self._joined)

    @property
    def _joined(self) -> bytes:
        ranks = self.namespace.world_size
        return self._slots if ranks == 1 else self._slots[4 * ranks :]

    def _bounds(self, rank: int) -> tuple[int, int]:
        """Where in `_slots` the rank's slot lies. REQUIRES: several ranks, one of which has a slot."""
        before = 4 * rank
        begin = (
            int.from_bytes(self._slots[before - 4 : before], sys.byteorder) if rank else 4 * self.namespace.world_size
        )
        return begin, int.from_bytes(self._slots[before : before + 4], sys.byteorder)
