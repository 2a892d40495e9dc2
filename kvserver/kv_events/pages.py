"""Matches the pages that an engine's own KV events describe with the chunks that the engine stored.

SGLang passes no tokens with a store, so no Store of its adapter has contents. Its own events have the tokens of each page. They name a
page by 8 bytes, in which the chunk's key ends. Event and store arrive in either order: the earlier one waits here. Of those that wait
the oldest are dropped.

Owns: what waits. Refuses to know: sockets, the form of events, what is in a tier. REQUIRES: one lock around all calls.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from kvserver.cache import GroupObjects
from kvserver.kv_events.types import Description, Tier

_MOST = 8192  # pages that wait for their chunk, and chunks that wait for their page, of all engines
_NAME_BYTES = 8  # of a page
_Name: TypeAlias = tuple[str, bytes]  # instance id, page


class Place(NamedTuple):
    """Chunk in L1 that is not described."""

    namespace: bytes
    group: GroupObjects
    key: bytes
    in_l2: bool = False


class Pages:
    def __init__(self, most_bytes: int) -> None:
        """`most_bytes`: of the pages that wait."""
        self._most_bytes = most_bytes
        self.bytes = 0  # of the pages that wait
        self._engines: set[str] = set()
        self._pages: OrderedDict[_Name, Description] = OrderedDict()
        self._chunks: OrderedDict[_Name, Place] = OrderedDict()
        self.undescribed = 0  # chunks that waited in vain

    def follow(self, instance_id: str) -> None:
        """From now on the engine's chunks wait for its pages."""
        self._engines.add(instance_id)

    def forget(self, instance_id: str) -> None:
        if instance_id in self._engines:
            self._engines.remove(instance_id)
            for name in [name for name in self._pages if name[0] == instance_id]:
                self._pop(name)
            for name in [name for name in self._chunks if name[0] == instance_id]:
                del self._chunks[name]
                self.undescribed += 1

    def __contains__(self, instance_id: str) -> bool:
        return instance_id in self._engines

    def page_of(self, instance_id: str, key: bytes) -> Description | None:
        """The page that waited for this chunk."""
        return self._pop((instance_id, key[-_NAME_BYTES:]))

    def _pop(self, name: _Name) -> Description | None:
        page = self._pages.pop(name, None)
        self.bytes -= page.size if page is not None else 0
        return page

    def chunk_of(self, instance_id: str, page: Description, free_bytes: int) -> Place | None:
        """The chunk that waited for this page. Without one the page waits. `free_bytes`: most for all pages that wait."""
        name = instance_id, page.hashes
        if instance_id not in self._engines:
            return None
        if (place := self._chunks.pop(name, None)) is None:
            self._pop(name)
            self._pages[name] = page
            self.bytes += page.size
            while self._pages and (len(self._pages) > _MOST or self.bytes > min(self._most_bytes, free_bytes)):
                self._pop(next(iter(self._pages)))
        return place

    def wait(self, instance_id: str, namespace: bytes, group: GroupObjects, keys: Sequence[bytes]) -> None:
        """Chunks in L1 that wait for their pages from now on."""
        for key in keys:
            name = instance_id, key[-_NAME_BYTES:]
            self.undescribed += name in self._chunks  # of another namespace
            self._chunks[name] = Place(namespace, group, key)
            if len(self._chunks) > _MOST:
                self._chunks.popitem(last=False)
                self.undescribed += 1

    def in_l2(self, namespace: bytes, keys: Sequence[bytes], stored: bool) -> int:
        """A tier of L2 stored the chunks, or has them no longer. Counts those that wait."""
        found = self._named(namespace, keys)
        for name, place in found:
            self._chunks[name] = place._replace(in_l2=stored)
        return len(found)

    def left(self, namespace: bytes, keys: Sequence[bytes]) -> None:
        """Chunks left L1."""
        for name, _ in self._named(namespace, keys):
            del self._chunks[name]
            self.undescribed += 1

    def _named(self, namespace: bytes, keys: Sequence[bytes]) -> list[tuple[_Name, Place]]:
        names = [((each, key[-_NAME_BYTES:]), key) for each in self._engines if self._chunks for key in keys]
        places = [(name, key, self._chunks.get(name)) for name, key in names]
        return [(name, at) for name, key, at in places if at is not None and (at.namespace, at.key) == (namespace, key)]

    def cleared(self, tier: Tier, prefix: bytes) -> None:
        """All chunks in the namespaces whose id begins with `prefix` left the tier."""
        for name, place in [each for each in self._chunks.items() if each[1].namespace.startswith(prefix)]:
            if tier is Tier.L2:
                self._chunks[name] = place._replace(in_l2=False)
            else:
                del self._chunks[name]
                self.undescribed += 1
