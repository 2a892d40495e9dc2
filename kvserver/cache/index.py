"""The chunks in L1, by namespace and key.

Owns: which chunks and namespaces can be found, and their number. Refuses to know: what a chunk has (`chunk`), eviction.
One thread uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from kvserver.cache.chunk import Chunk, ModelUse, Namespace
from kvserver.protocol import bounded


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
