"""Described objects in each tier after an event: the hub's after the last one, the publisher's after those it received.

Owns: references to these, by tier, namespace, object group and key. Refuses to know: what was published to whom.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from kvserver.cache import epoch_of
from kvserver.kv_events.types import Description, KVChunk, Tier

Name: TypeAlias = tuple[Tier, bytes, int, bytes]  # tier, namespace, object group and key


class ResidentChunks:
    def __init__(self) -> None:
        # By tier and namespace, then by object group; none is empty.
        self.places: dict[tuple[Tier, bytes], dict[int, dict[bytes, KVChunk]]] = {}

    def add(self, tier: Tier, namespace: bytes, chunks: Iterable[KVChunk]) -> None:
        for chunk in chunks:
            groups = self.places.setdefault((tier, namespace), {})
            groups.setdefault(chunk.group, {})[chunk.key] = chunk

    def remove(self, tier: Tier, namespace: bytes, group: int, keys: Iterable[bytes]) -> list[KVChunk]:
        """Returns the chunks that were resident."""
        groups = self.places.get((tier, namespace), {})
        chunks = groups.get(group, {})
        removed = [chunk for key in keys if (chunk := chunks.pop(key, None)) is not None]
        if removed and not chunks:
            del groups[group]
            if not groups:
                del self.places[tier, namespace]
        return removed

    def of_group(self, tier: Tier, namespace: bytes, group: int) -> dict[bytes, KVChunk]:
        return self.places.get((tier, namespace), {}).get(group, {})

    def __contains__(self, prefix: bytes) -> bool:
        """True if any chunk is resident in that namespace prefix."""
        return any(epoch_of(namespace) == prefix for _, namespace in self.places)

    def within(self, prefix: bytes) -> Iterator[tuple[Name, Description]]:
        """The chunks in that namespace prefix."""
        for (tier, namespace), groups in self.places.items():
            for group, chunks in groups.items() if epoch_of(namespace) == prefix else ():
                for key, chunk in chunks.items():
                    yield (tier, namespace, group, key), chunk.description
