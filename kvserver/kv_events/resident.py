"""The described chunks that are READY now, for readers that connect late.

Owns: references to these chunks, by namespace prefix, tier and namespace. Refuses to know: what was published to whom.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from kvserver.cache import epoch_of
from kvserver.kv_events.types import Description, KVRemoved, KVStored, Tier

Name: TypeAlias = tuple[Tier, bytes, bytes]  # tier, namespace and key of a chunk


class ResidentChunks:
    def __init__(self) -> None:
        self._prefixes: dict[bytes, dict[tuple[Tier, bytes], dict[bytes, Description]]] = {}

    def apply_event(self, event: KVStored | KVRemoved) -> None:
        prefix, place = epoch_of(event.namespace), (event.tier, event.namespace)
        if isinstance(event, KVStored):
            chunks = self._prefixes.setdefault(prefix, {}).setdefault(place, {})
            chunks.update((chunk.key, chunk.description) for chunk in event.chunks if chunk.description is not None)
        else:
            chunks = self._prefixes.get(prefix, {}).get(place, {})
            for chunk in event.chunks:
                chunks.pop(chunk.key, None)
        if not chunks and (places := self._prefixes.get(prefix)) is not None:
            places.pop(place, None)
            if not places:
                del self._prefixes[prefix]

    def __contains__(self, prefix: bytes) -> bool:
        """True if any described chunk is resident in that namespace prefix."""
        return prefix in self._prefixes

    def within(self, prefix: bytes) -> Iterator[tuple[Name, Description]]:
        for (tier, namespace), chunks in self._prefixes.get(prefix, {}).items():
            for key, description in chunks.items():
                yield (tier, namespace, key), description
