"""Which chunks are in each tier after an event: the hub's after the last one, the publisher's after those it received.

Owns: references to these chunks, by tier, namespace and key. Refuses to know: what was published to whom.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from kvserver.cache import epoch_of
from kvserver.kv_events.types import Description, KVChunk, Tier

Name: TypeAlias = tuple[Tier, bytes, bytes]  # tier, namespace and key of a chunk


class ResidentChunks:
    def __init__(self) -> None:
        self.places: dict[tuple[Tier, bytes], dict[bytes, KVChunk]] = {}  # by tier and namespace; none is empty

    def add(self, tier: Tier, namespace: bytes, chunks: Iterable[KVChunk]) -> None:
        """REQUIRES: at least one chunk."""
        self.places.setdefault((tier, namespace), {}).update((chunk.key, chunk) for chunk in chunks)

    def remove(self, tier: Tier, namespace: bytes, keys: Iterable[bytes]) -> list[KVChunk]:
        """Returns the chunks that were resident."""
        chunks = self.places.get((tier, namespace), {})
        removed = [chunk for key in keys if (chunk := chunks.pop(key, None)) is not None]
        if removed and not chunks:
            del self.places[tier, namespace]
        return removed

    def __contains__(self, prefix: bytes) -> bool:
        """True if any chunk is resident in that namespace prefix."""
        return any(epoch_of(namespace) == prefix for _, namespace in self.places)

    def within(self, prefix: bytes) -> Iterator[tuple[Name, Description]]:
        """The described chunks in that namespace prefix."""
        for (tier, namespace), chunks in self.places.items():
            for key, chunk in chunks.items() if epoch_of(namespace) == prefix else ():
                if chunk.description is not None:
                    yield (tier, namespace, key), chunk.description
