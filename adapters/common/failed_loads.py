"""Keys whose load failed a short while ago. Lookups stop before them, so that a load is not repeated in vain.

A load fails as a whole, so each of its keys may be the reason. A key is forgotten after `SECONDS`, or once a store has copied it
on all ranks: a store copies only what the daemon does not have. At most `MOST_KEYS` are remembered, the newest. So this memory
errs towards computing.

Owns: those keys, and the stores under way that may replace their objects. Refuses to know: requests, and why loads fail.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvserver.adapters.common.specs import CopySpec, LoadSpec, StoreSpec
from kvserver.protocol import KEY_BYTES

SECONDS = 10.0
MOST_KEYS = 1024

_Key = tuple[str, bytes]  # variant and key


@dataclass(slots=True)
class _Failed:
    until: float
    groups: int  # a bit for each object group of which a load failed


class FailedLoads:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first_copy = 0
        self._keys: OrderedDict[_Key, _Failed] = OrderedDict()  # the oldest first
        # Under way: the remembered keys of each, by its number; its group; and how many objects are still to be copied, by all ranks.
        self._stores: OrderedDict[int, tuple[list[_Key], int, int]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._keys) and len(self) > 0  # a lookup of SGLang's asks each time: without keys no clock is read

    def __len__(self) -> int:
        now = self._clock()
        while self._keys and next(iter(self._keys.values())).until <= now:
            self._keys.popitem(last=False)
        return len(self._keys)

    def begin_session(self, first_copy: int) -> None:
        """Another daemon, which has other copies. Loads with lower numbers were of the one before."""
        self._first_copy = first_copy
        self._keys.clear()
        self._stores.clear()

    def failed(self, load: LoadSpec) -> None:
        """Remember the keys of a failed copy of a load.

        Its last keys are forgotten first: a lookup finds no key behind one that is remembered.
        """
        if load.copy_id < self._first_copy:
            return
        until = self._clock() + SECONDS
        for key in reversed(list(_keys_of(load))[:MOST_KEYS]):
            before = self._keys.pop(key, None)
            self._keys[key] = _Failed(until, 1 << load.group | (before.groups if before is not None else 0))
        while len(self._keys) > MOST_KEYS:
            self._keys.popitem(last=False)

    def leading(self, variant: str, keys: bytes) -> int:
        """Number of keys before the first remembered one."""
        count = len(keys) // KEY_BYTES
        if not self:
            return count
        for place in range(count):
            if (variant, keys[place * KEY_BYTES : (place + 1) * KEY_BYTES]) in self._keys:
                return place
        return count

    # ---- stores -------------------------------------------------------------------------------

    def store_planned(self, store: StoreSpec, copies: int) -> None:
        """`copies`: how many ranks copy each object."""
        if not self:
            return
        keys = list(_keys_of(store))
        if found := [key for key in keys if key in self._keys]:
            self._stores[store.copy_id] = found, store.group, len(keys) * copies
            if len(self._stores) > MOST_KEYS:
                self._stores.popitem(last=False)

    def store_copied(self, copy_id: int, objects: int) -> None:
        """Note that one rank has copied so many of the store's objects; the others were there."""
        keys, group, left = self._stores.pop(copy_id, ([], 0, 0))
        if left > objects:
            self._stores[copy_id] = keys, group, left - objects
            return
        for key in keys:
            if (failed := self._keys.get(key)) is not None:
                failed.groups &= ~(1 << group)
                if not failed.groups:
                    del self._keys[key]


def _keys_of(spec: CopySpec) -> Iterator[_Key]:
    for at in range(0, len(spec.keys), KEY_BYTES):
        yield spec.variant, spec.keys[at : at + KEY_BYTES]
