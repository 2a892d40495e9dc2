"""A local tier of L2 that is a set of names, for what follows the tiers without moving a byte."""

from __future__ import annotations

from collections.abc import Iterator

from kvserver.l2 import READABLE, ObjectName
from kvserver.l2.base import Changed, State
from kvserver.protocol import KEY_BYTES

SLICE = 3  # objects


class ListedTier:
    """The part of LocalTier that L2Events uses."""

    shared = False

    def __init__(self) -> None:
        self.state: State = "ready"
        self.objects: dict[ObjectName, None] = {}
        self._dropped: set[ObjectName] = set()  # and not cleared since
        self._changed: Changed = lambda stored, name: None

    @property
    def readable(self) -> list[ObjectName]:
        """In the order of their puts, so that equal walks do the same in every process."""
        return list(self.objects) if self.state in READABLE else []

    def put(self, name: ObjectName) -> None:
        if name not in self.objects:
            self.objects[name] = None
            self._changed(True, name)

    def drop(self, name: ObjectName) -> None:
        if name in self.objects:
            del self.objects[name]
            self._dropped.add(name)
            self._changed(False, name)

    def clear(self, prefix: bytes) -> None:
        self.objects = {name: None for name in self.objects if not name.namespace.startswith(prefix)}
        self._dropped = {name for name in self._dropped if not name.namespace.startswith(prefix)}

    def holds(self, namespace: bytes, group: int, keys: bytes) -> int:
        readable = self.readable
        names = (ObjectName(namespace, group, keys[at : at + KEY_BYTES]) for at in range(0, len(keys), KEY_BYTES))
        return sum(1 << place for place, name in enumerate(names) if name in readable)

    def watch(self, changed: Changed) -> None:
        self._changed = changed

    def walk(self) -> Iterator[tuple[bytes, int, bytes]]:
        """In slices, as a table's: each as of when it is taken, though it is named object by object, but for what was cleared since.

        What comes is named at the end, as in a table whose places are filled anew.
        """
        seen: set[ObjectName] = set()
        while left := [name for name in self.readable if name not in seen][:SLICE]:
            seen |= set(left)
            for name in left:
                if name in self.objects or name in self._dropped:
                    yield name
