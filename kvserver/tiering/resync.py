"""Resync: publish again all objects that a tier has, after the bus dropped events about them.

Owns: when a resync runs, and how far it is. Refuses to know: who keeps the objects (`kv_events.hub`), and where a tier has
them. Runs in the loop's thread, a slice a turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from kvserver.cache import Index, chunks_of
from kvserver.events import Bus, L1Resynced, L2Resynced, ResyncPart

SLICE = 1024  # chunks looked at in one turn

Resynced: TypeAlias = L1Resynced | L2Resynced


@dataclass
class Resync:
    """A resync. `walk` yields the slices: each has what the tier holds when it is taken. At most a `share`-th of the bus's queue is used."""

    kind: type[L1Resynced] | type[L2Resynced]
    walk: Callable[[], Iterator[Resynced]]
    bus: Bus
    share: int = 2
    _slices: Iterator[Resynced] | None = None  # while a resync runs

    def step(self) -> bool:
        """Go on if there are objects to publish, and space for them; True if there is more to do at once.

        An event about the tier that is dropped meanwhile makes the resync start over.
        """
        if self.kind in self.bus.needs_resync:
            self._slices = None
        elif self._slices is None:
            return False
        if not self.bus.has_room(self.share):
            return False
        if self._slices is None:
            self.bus.needs_resync.discard(self.kind)
            self._slices = self.walk()
            return self._publish(self.kind(time.monotonic_ns(), ResyncPart.BEGIN))
        found = next(self._slices, None)
        if found is None:
            self._slices = None
            self._publish(self.kind(time.monotonic_ns(), ResyncPart.END))
            return False
        return self._publish(found)

    @property
    def runs(self) -> bool:
        return self._slices is not None

    def _publish(self, event: Resynced) -> bool:
        return self.bus.publish(event, len(event.keys))


def resync_of_l1(index: Index, bus: Bus) -> Resync:
    return Resync(L1Resynced, lambda: _walk_l1(index), bus)


def _walk_l1(index: Index) -> Iterator[L1Resynced]:
    for id in index.namespace_ids():
        namespace = index.find_namespace(id)
        if namespace is None:
            continue
        chunks, groups = namespace.chunks.values(), namespace.groups.objects
        named = chunks_of(id) if namespace.groups.tails else id
        while chunks:
            for group in groups:
                ready = [c.key for c in chunks[-SLICE:] if c.ready >> group.place & 1 and not c.detached]
                yield L1Resynced(time.monotonic_ns(), ResyncPart.SLICE, named, b"".join(ready), group)
            del chunks[-SLICE:]  # freed a slice at a time: freeing a long list at once takes as long as making it
