"""The chunks in L1: one record per (namespace, key), for all ranks.

Ranks here are the ranks that store: one rank if all ranks have the same bytes, whatever the engine's world size.

Owns: `Chunk`, `Namespace`, their states, and the counts of each model. Refuses to know: what pages contain, deadlines
of leases, copies. One thread uses it.

A chunk is FILLING until every rank's bytes were copied whole, then READY. A chunk is detached if its namespace was
cleared or if it left the index: lookups do not find it, and its pages are freed when its last pin ends.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterator
from itertools import islice

from kvserver.cache.pages import page_count
from kvserver.protocol import bounded


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


class Index:
    """Namespaces with chunks, by id. After a clear the same id gets a new namespace."""

    def __init__(self, make_chunk: Callable[[Namespace, bytes], Chunk] = Chunk) -> None:
        self._make_chunk = make_chunk
        self._namespaces: dict[bytes, Namespace] = {}
        self.chunk_count = 0
        self.models: dict[str, ModelUse] = {}  # by name, also models without chunks; at most MOST_MODELS and OTHER

    def find_namespace(self, id: bytes) -> Namespace | None:
        return self._namespaces.get(id)

    def namespace_with(self, key: bytes, most: int) -> bytes:
        """The id of a namespace that has the key; b"" if none of the first `most` namespaces has it."""
        for namespace in islice(self._namespaces.values(), most):
            if key in namespace.chunks:
                return namespace.id
        return b""

    def find_or_make_namespace(self, id: bytes, world_size: int, model_name: str = "") -> Namespace:
        """The namespace. A new one belongs to this model, and enters the index with its first chunk."""
        found = self._namespaces.get(id) or Namespace(id, world_size, self._model(model_name))
        assert found.world_size == world_size, "the world size is part of the fingerprint"
        return found

    def _model(self, name: str) -> ModelUse:
        return self.models.setdefault(bounded(name, self.models), ModelUse())

    def add_chunk(self, namespace: Namespace, key: bytes) -> Chunk:
        if not namespace.chunks:  # it is new, or detach_chunk() dropped it when it became empty
            self._namespaces[namespace.id] = namespace
        chunk = namespace.chunks[key] = self._make_chunk(namespace, key)
        self.chunk_count += 1
        namespace.model.chunks += 1
        return chunk

    def detach_chunk(self, chunk: Chunk) -> None:
        """Detach one chunk. REQUIRES: not detached."""
        del chunk.namespace.chunks[chunk.key]
        chunk.in_index = False
        self.chunk_count -= 1
        chunk.namespace.model.chunks -= 1
        if not chunk.namespace.chunks and self._namespaces.get(chunk.namespace.id) is chunk.namespace:
            del self._namespaces[chunk.namespace.id]

    def detach_namespace(self, id: bytes) -> Namespace | None:
        """Detach a whole namespace; the caller frees its chunks later."""
        namespace = self._namespaces.pop(id, None)
        if namespace is not None:
            namespace.cleared = True
            self.chunk_count -= len(namespace.chunks)
            namespace.model.chunks -= len(namespace.chunks)
        return namespace

    def namespace_ids(self) -> list[bytes]:
        return list(self._namespaces)

    def __iter__(self) -> Iterator[Chunk]:
        for namespace in self._namespaces.values():
            yield from namespace.chunks.values()
