"""The described chunks that are READY now, so that whoever comes late can be told of them.

Owns: references to them, by reach (whose chunks an instance can read), tier and namespace. Refuses to know: who was told.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from kvserver.cache import epoch_of
from kvserver.kv_events.types import Description, KVRemoved, KVStored, Tier

Name: TypeAlias = tuple[Tier, bytes, bytes]  # of a chunk in a tier: namespace, key


class Held:
    def __init__(self) -> None:
        self._reaches: dict[bytes, dict[tuple[Tier, bytes], dict[bytes, Description]]] = {}

    def apply(self, event: KVStored | KVRemoved) -> None:
        reach, place = epoch_of(event.namespace), (event.tier, event.namespace)
        if isinstance(event, KVStored):
            chunks = self._reaches.setdefault(reach, {}).setdefault(place, {})
            chunks.update((chunk.key, chunk.description) for chunk in event.chunks if chunk.description is not None)
        else:
            chunks = self._reaches.get(reach, {}).get(place, {})
            for chunk in event.chunks:
                chunks.pop(chunk.key, None)
        if not chunks and (places := self._reaches.get(reach)) is not None:
            places.pop(place, None)
            if not places:
                del self._reaches[reach]

    def __contains__(self, reach: bytes) -> bool:
        """Whether anything is held there."""
        return reach in self._reaches

    def within(self, reach: bytes) -> Iterator[tuple[Name, Description]]:
        for (tier, namespace), chunks in self._reaches.get(reach, {}).items():
            for key, description in chunks.items():
                yield (tier, namespace, key), description
