"""Resync: publish all objects that are READY in L1 again, after the bus dropped events about chunks.

Owns: when it runs, and how far it is. Refuses to know: who keeps the chunks (`kv_events.hub`). Runs in the loop's
thread, a slice a turn.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from kvserver.cache import WHOLE_CHUNKS, GroupObjects, Index
from kvserver.events import Bus, L1Resynced, ResyncPart

SLICE = 1024  # chunks looked at in one turn


@dataclass
class Resync:
    index: Index
    bus: Bus
    _slices: Iterator[tuple[bytes, bytes, GroupObjects]] | None = None  # while a resync runs

    def step(self) -> bool:
        """Go on if there are chunks to publish, and space for them; True if there is more to do at once.

        An event about chunks that is dropped meanwhile makes the resync start over.
        """
        if self.bus.lost_chunks:
            self._slices = None
        elif self._slices is None:
            return False
        if not self.bus.half_empty:
            return False
        if self._slices is None:
            self.bus.lost_chunks = False
            self._slices = self._walk()
            return self._publish(ResyncPart.BEGIN)
        found = next(self._slices, None)
        if found is None:
            self._slices = None
            self._publish(ResyncPart.END)
            return False
        return self._publish(ResyncPart.SLICE, *found)

    def _publish(
        self, part: ResyncPart, namespace: bytes = b"", keys: bytes = b"", group: GroupObjects = WHOLE_CHUNKS
    ) -> bool:
        return self.bus.publish(L1Resynced(time.monotonic_ns(), part, namespace, keys, group), len(keys))

    def _walk(self) -> Iterator[tuple[bytes, bytes, GroupObjects]]:
        """Namespaces, keys and groups of the objects that are READY when each slice is taken."""
        for id in self.index.namespace_ids():
            namespace = self.index.find_namespace(id)
            if namespace is not None and namespace.groups.tails:  # no event announces single blocks
                continue
            chunks = namespace.chunks.values() if namespace is not None else []
            groups = namespace.groups.objects if namespace is not None else []
            while chunks:
                for group in groups:
                    ready = [c.key for c in chunks[-SLICE:] if c.ready >> group.number & 1 and not c.detached]
                    yield id, b"".join(ready), group
                del chunks[-SLICE:]  # freed a slice at a time: freeing a long list at once takes as long as making it
