"""The chunks in L1, by namespace and key.

Owns: which chunks and namespaces can be found, and their number. Refuses to know: what a chunk has (`chunk`), eviction.
One thread uses it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

from kvserver.cache.chunk import Chunk, ModelUse, Namespace
from kvserver.cache.groups import Groups
from kvserver.protocol import KEY_BYTES, OTHER, TENANT_PREFIX, bounded

_KEY = struct.Struct(f"{KEY_BYTES}s")


class ChunkRows(NamedTuple):
    """Columns of chunks of one namespace, as pack_chunks() makes them."""

    keys: bytes
    ends: bytes  # of the slots, as a chunk of several has them
    counts: bytes  # u32: extents of each
    extents: bytes


def split_keys(keys: bytes) -> Iterator[tuple[bytes]]:
    """Keys, each in a tuple of one. This runs for every chunk of every lookup, and no other way is as fast."""
    return _KEY.iter_unpack(keys)


class Index:
    """Namespaces with chunks, by id. After a clear the same id gets a new namespace."""

    def __init__(self, make_chunk: Callable[[Namespace, bytes], Chunk] = Chunk) -> None:
        self._make_chunk = make_chunk
        self._namespaces: dict[bytes, Namespace] = {}
        self.chunk_count = 0
        self.tail_blocks = 0  # which are not among the chunks
        self.models: dict[str, ModelUse] = {}  # by name, also models without chunks; at most MOST_MODELS and OTHER
        self.tenants: dict[str, ModelUse] = {}  # by name: those with a share, which are the only ones that own chunks

    def find_namespace(self, id: bytes) -> Namespace | None:
        return self._namespaces.get(id)

    def find_chunks(self, id: bytes, keys: bytes) -> list[Chunk | None]:
        """Chunks by key; None where the namespace has none."""
        namespace = self._namespaces.get(id)
        return namespace.chunks.find(keys) if namespace is not None else [None] * (len(keys) // KEY_BYTES)

    def namespace_with(self, key: bytes, most: int) -> bytes:
        """The id of a namespace that has this chunk; b"" if none of the first `most` namespaces has it."""
        for namespace in islice(self._namespaces.values(), most):
            if not namespace.groups.tails and namespace.chunks.get(key) is not None:
                return namespace.id
        return b""

    def find_or_make_namespace(self, id: bytes, groups: Groups, model_name: str = "") -> Namespace:
        """The namespace. A new one belongs to this model, and enters the index with its first chunk."""
        found = self._namespaces.get(id) or Namespace(id, groups, self.model(model_name))
        assert found.groups.masks == groups.masks, "groups and ranks are part of the fingerprint"
        return found

    def model(self, name: str) -> ModelUse:
        return self.models.setdefault(bounded(name, self.models), ModelUse())

    def owner_of_share(self, name: str) -> ModelUse:
        """The tenant or the model, by its name in --share."""
        if name.startswith(TENANT_PREFIX):
            return self.tenants.setdefault(name.removeprefix(TENANT_PREFIX), ModelUse())
        return self.model(name)

    def add_chunk(self, namespace: Namespace, key: bytes, part: Namespace | None = None) -> Chunk:
        """Add a chunk of the namespace itself, or of its part."""
        if not namespace.chunks:  # it is new, or detach_chunk() dropped it when it became empty
            self._namespaces[namespace.id] = namespace
        part = part or namespace
        chunk = self._make_chunk(part, key)
        namespace.chunks.add(key, chunk)
        self._count(part, 1)
        return chunk

    def add_rows(
        self,
        namespace: Namespace,
        wanted: bytes,
        rows: ChunkRows,
        done: int,
        ready: int,
        part: Namespace | None = None,
    ) -> list[Chunk | None]:
        """Add the chunks of the wanted rows whose key is absent, as add_chunk() adds one; None for the other rows."""
        part = part or namespace
        prototype = self._make_chunk(part, b"")
        prototype.set_slots(b"", done, ready)
        added = namespace.chunks.add_copies(prototype, wanted, *rows)
        count = len(added) - added.count(None)
        if count:
            self._namespaces[namespace.id] = namespace
            self._count(part, count)
        return added

    def detach_chunk(self, chunk: Chunk) -> None:
        """Detach one chunk. REQUIRES: not detached."""
        namespace = chunk.namespace
        namespace.chunks.remove(chunk.key)
        chunk.namespace = namespace.left
        self._count(namespace, -1)
        if not namespace.chunks and self._namespaces[namespace.id].chunks is namespace.chunks:
            del self._namespaces[namespace.id]

    def detach_namespace(self, id: bytes) -> Namespace | None:
        """Detach a whole namespace; the caller frees its chunks later."""
        namespace = self._namespaces.pop(id, None)
        if namespace is not None:
            for each in (namespace, *namespace.parts.values()):
                each.cleared = True
                self._count(each, -each.count)
        return namespace

    @property
    def count(self) -> int:
        """Number of chunks and single blocks."""
        return self.chunk_count + self.tail_blocks

    def _count(self, namespace: Namespace, more: int) -> None:
        namespace.count += more
        if namespace.groups.tails:
            self.tail_blocks += more
            namespace.owner.tail_blocks += more
        else:
            self.chunk_count += more
            namespace.owner.chunks += more

    def namespaces(self) -> list[Namespace]:
        return list(self._namespaces.values())

    def namespace_ids(self) -> list[bytes]:
        return list(self._namespaces)

    def ids_of_model(self, name: str) -> list[bytes]:
        """Ids of the namespaces that engines of this model made. For OTHER, which is several models, there are none."""
        use = self.models.get(name) if name != OTHER else None
        return [id for id, namespace in self._namespaces.items() if namespace.model is use]

    def count_with(self, prefixes: tuple[bytes, ...]) -> tuple[int, int]:
        """(chunks, single blocks) in the namespaces with one of these prefixes."""
        counts = [0, 0]
        for id, namespace in self._namespaces.items():
            if id.startswith(prefixes):
                counts[namespace.groups.tails] += len(namespace.chunks)
        return counts[0], counts[1]

    def __iter__(self) -> Iterator[Chunk]:
        for namespace in self._namespaces.values():
            yield from namespace.chunks.values()
