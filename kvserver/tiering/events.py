"""Publishes what the local tiers of L2 hold together: an object is stored when the first has it, and removed when none has it.

Tiers that other daemons write to are left out: their stores drop objects without notice. A resync publishes what a tier found at
its start, and what tiers hold when one of them becomes readable or unreadable.

While a resync runs, it is not known whether it has named an object already. So a change of an object is published as a removal,
and as a store if a tier holds the object. The resync then leaves that object out: a slice was copied from the tier before the
changes that are published ahead of it.

Owns: the changes of this turn. Refuses to know: which part receives the events, what is in L1. In memory only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby

from kvserver.events import Bus, L2Cleared, L2Removed, L2Resynced, L2Stored, ResyncPart
from kvserver.l2 import READABLE, LocalTier, ObjectName
from kvserver.protocol import KEY_BYTES
from kvserver.tiering.presence import keys_of
from kvserver.tiering.resync import Resync

_SHARE = 8  # of the queue of events: what a tier has may be as much as 300 MB of keys


class L2Events:
    """Events of the local tiers. REQUIRES: the loop's thread uses it."""

    def __init__(self, tiers: Sequence[LocalTier], bus: Bus, clock: Callable[[], float] = time.monotonic) -> None:
        self._tiers, self._bus, self._clock = list(tiers), bus, clock
        self._readable = [False] * len(self._tiers)
        self._changes: list[tuple[bool, ObjectName]] = []  # stored or removed, not published yet
        self._published: set[ObjectName] = set()  # objects with a change of their own since the running resync began
        self._resync = Resync(L2Resynced, self._walk, bus, _SHARE)
        for place, tier in enumerate(self._tiers):
            tier.watch(partial(self._changed, place))

    def present(self, namespace: bytes, groups: int, keys: bytes) -> tuple[bytes, ...]:
        """Keys whose objects are in a tier, for each of so many groups; () if there are no tiers."""
        if not any(self._readable):
            return ()
        places = range(len(keys) // KEY_BYTES)
        held = [self._holds(self._tiers, namespace, group, keys) for group in range(groups)]
        return tuple(keys_of(keys, [place for place in places if bits >> place & 1]) for bits in held)

    # ---- changes ------------------------------------------------------------------------------

    def publish(self) -> None:
        """Publish what has changed, before anything else can remove objects from L1, whose descriptions L2's share."""
        for (stored, namespace, group), changes in groupby(self._changes, lambda each: (each[0], *each[1][:2])):
            keys = b"".join([name.key for _, name in changes])
            event = (L2Stored if stored else L2Removed)(self._now_ns(), namespace, keys, group)
            self._bus.publish(event, len(keys))
        self._changes.clear()

    def clear(self, prefix: bytes) -> None:
        """The caller clears these namespaces in all tiers next."""
        if self._tiers:
            self.publish()
            self._bus.publish(L2Cleared(self._now_ns(), prefix))

    def step(self) -> bool:
        """Publish what has changed, or a slice of a resync, at the end of a turn. True if there is more to do at once."""
        if not self._tiers:
            return False
        self.publish()
        readable = [tier.state in READABLE for tier in self._tiers]
        if readable != self._readable:
            self._readable = readable
            self._bus.needs_resync.add(L2Resynced)
        return self._resync.step()

    def _changed(self, place: int, stored: bool, name: ObjectName) -> None:
        if not self._readable[place]:
            return  # a resync names what it has
        others = self._tiers[:place] + self._tiers[place + 1 :]
        elsewhere = bool(self._holds(others, *name))
        if self._resync.runs:
            self._published.add(name)
            self._changes.append((False, name))
            if stored or elsewhere:
                self._changes.append((True, name))
        elif not elsewhere:
            self._changes.append((stored, name))

    # ---- resync -------------------------------------------------------------------------------

    def _walk(self) -> Iterator[L2Resynced]:
        self._published.clear()
        return self._slices()

    def _slices(self) -> Iterator[L2Resynced]:
        for place, tier in enumerate(self._tiers):
            for namespace, group, keys in tier.walk():
                unnamed = self._unnamed(self._tiers[:place], namespace, group, keys)
                yield L2Resynced(self._now_ns(), ResyncPart.SLICE, namespace, unnamed, group)

    def _unnamed(self, walked: Sequence[LocalTier], namespace: bytes, group: int, keys: bytes) -> bytes:
        """Keys that neither the walk of an earlier tier nor a change has named."""
        named = self._holds(walked, namespace, group, keys)
        if not named and not self._published:
            return keys
        each = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
        return b"".join(
            [
                key
                for at, key in enumerate(each)
                if not named >> at & 1 and ObjectName(namespace, group, key) not in self._published
            ]
        )

    def _holds(self, tiers: Sequence[LocalTier], namespace: bytes, group: int, keys: bytes) -> int:
        bits = 0
        for tier in tiers:
            bits |= tier.holds(namespace, group, keys)
        return bits

    def _now_ns(self) -> int:
        return int(self._clock() * 1e9)
