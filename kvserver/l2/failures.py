"""Objects whose read failed although their tier answers. Lookups do not count on them for a while.

Owns: which objects, for how long, and their number. Refuses to know: why a read failed. One thread uses it.
"""

from __future__ import annotations

from collections import OrderedDict

from kvserver.l2.base import ObjectName
from kvserver.protocol import KEY_BYTES

FIRST_SECONDS = 10.0  # doubled with each further failure
MOST_OBJECTS = 1024
_MOST_DOUBLINGS = 12  # 11 hours


class ObjectFailures:
    def __init__(self, most: int = MOST_OBJECTS) -> None:
        self._most = most
        self._in_a_row: set[ObjectName] = set()  # since the tier last answered
        self._failed: OrderedDict[ObjectName, tuple[int, int]] = (
            OrderedDict()
        )  # failures, and when it is tried again, in ns

    def __contains__(self, name: ObjectName) -> bool:
        return name in self._failed

    def note(self, name: ObjectName, now_ns: int) -> int:
        """A read failed; returns how many did in a row."""
        failures = self._failed.get(name, (0, 0))[0] + 1
        seconds = FIRST_SECONDS * 2 ** min(failures - 1, _MOST_DOUBLINGS)
        self._failed[name] = failures, now_ns + int(seconds * 1e9)
        self._failed.move_to_end(name)
        self._in_a_row.add(name)
        if len(self._failed) > self._most:
            self._in_a_row.discard(self._failed.popitem(last=False)[0])
        return failures

    def answered(self) -> None:
        """The tier answered: what failed so far is the objects' failure."""
        self._in_a_row.clear()

    def blame_tier(self) -> None:
        """The tier failed, not the objects whose reads failed since it last answered: they may be tried again."""
        for name in self._in_a_row & self._failed.keys():
            self._failed[name] = self._failed[name][0], 0
        self._in_a_row.clear()

    def forget(self, name: ObjectName) -> None:
        """The object was read or dropped."""
        self._failed.pop(name, None)

    def shown(self, found: int, namespace: bytes, group: int, keys: bytes, now_ns: int) -> int:
        """`found`, a bitmap of the keys, without those that failed lately."""
        if not self._failed:
            return found
        for place in range(len(keys) // KEY_BYTES):
            name = ObjectName(namespace, group, keys[place * KEY_BYTES : (place + 1) * KEY_BYTES])
            if self._failed.get(name, (0, 0))[1] > now_ns:
                found &= ~(1 << place)
        return found
