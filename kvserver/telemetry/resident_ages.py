"""Ages of the chunks that L1 and the local tiers of L2 have now: the time from each store on.

All chunks of a tier count, up to MOST; beyond it a sample by their keys, halved whenever it exceeds MOST. Remote tiers are left
out: their stores evict without notice.

Owns: the times at which those chunks were stored. Refuses to know: bytes, object groups but the first, remote tiers. Runs in the
bus's thread; any thread may call `counts()`.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable

from msgspec import Struct

from kvserver.cache import split_keys
from kvserver.events import (
    ChunksEvicted,
    ChunksStored,
    Event,
    L1Cleared,
    L1Resynced,
    L2Cleared,
    L2Removed,
    L2Resynced,
    L2Stored,
    ResyncPart,
    Subscriber,
)
from kvserver.protocol import KEY_BYTES

MOST = 4096  # chunks of a tier, about 200 bytes each
AGE_SECONDS = (60.0, 600.0, 3600.0, 86400.0)
_UNKNOWN_NS = -1  # it was there before this daemon started, or was stored by events that were dropped
_ALL = 1 << 32


class AgeCounts(Struct, frozen=True):
    """Counts of chunks by age.

    `counts[i]`: chunks not older than `bounds[i]` seconds, the last one beyond all; `unknown` are in none of them.
    """

    bounds: tuple[float, ...] = AGE_SECONDS
    counts: list[int] = []
    unknown: int = 0
    oldest_seconds: float = 0.0
    share: float = 1.0  # of the chunks that are counted here


class _Tier:
    def __init__(self, most: int) -> None:
        self._most = most
        self._below = _ALL  # a key whose first 32 bits are below is in the sample
        self._stored_ns: dict[bytes, int] = {}  # by namespace and key
        self._before: dict[bytes, int] = {}  # while a resync runs: what was known at its begin

    def add(self, namespace: bytes, keys: bytes, stored_ns: int) -> None:
        for key in self._sampled(keys):
            name = namespace + key
            self._stored_ns[name] = self._before.pop(name, _UNKNOWN_NS) if stored_ns == _UNKNOWN_NS else stored_ns
        while len(self._stored_ns) > self._most:
            self._below //= 2
            self._stored_ns = {
                name: ns for name, ns in self._stored_ns.items() if _number(name[-KEY_BYTES:]) < self._below
            }

    def remove(self, namespace: bytes, keys: bytes) -> None:
        for key in self._sampled(keys):
            self._stored_ns.pop(namespace + key, None)
            self._before.pop(namespace + key, None)

    def clear(self, prefix: bytes) -> None:
        self._stored_ns = {name: ns for name, ns in self._stored_ns.items() if not name.startswith(prefix)}
        self._before.clear()
        if not self._stored_ns:
            self._below = _ALL

    def resync(self, part: ResyncPart, namespace: bytes, keys: bytes) -> None:
        if part is ResyncPart.BEGIN:
            self._before, self._stored_ns = self._stored_ns, {}
        elif part is ResyncPart.SLICE:
            self.add(namespace, keys, _UNKNOWN_NS)
        else:
            self._before = {}

    def counts(self, now_ns: int) -> AgeCounts:
        stored = list(self._stored_ns.values())  # one step for the interpreter: the bus's thread goes on
        ages = [max(0.0, (now_ns - ns) / 1e9) for ns in stored if ns != _UNKNOWN_NS]
        counts = [0] * (len(AGE_SECONDS) + 1)
        for age in ages:
            counts[bisect_left(AGE_SECONDS, age)] += 1
        return AgeCounts(
            counts=counts,
            unknown=len(stored) - len(ages),
            oldest_seconds=round(max(ages, default=0.0), 1),
            share=self._below / _ALL,
        )

    def _sampled(self, keys: bytes) -> Iterable[bytes]:
        below = self._below
        return [key for (key,) in split_keys(keys) if _number(key) < below]


def _number(key: bytes) -> int:
    return int.from_bytes(key[:4], "big")


class ResidentAges(Subscriber):
    name = "ages"
    handles = frozenset(
        {ChunksStored, ChunksEvicted, L1Resynced, L2Stored, L2Removed, L2Resynced, L1Cleared, L2Cleared}
    )

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns, most: int = MOST) -> None:
        """`clock` is CLOCK_MONOTONIC nanoseconds."""
        self._clock = clock
        self._l1, self._l2 = _Tier(most), _Tier(most)

    def handle(self, event: Event) -> None:
        match event:
            case ChunksStored() if event.group.number == 0:
                self._l1.add(event.namespace, event.keys, event.time_ns)
            case ChunksEvicted() if event.group is None or event.group.number == 0:
                self._l1.remove(event.namespace, event.keys)
            case L1Resynced() if event.group.number == 0:
                self._l1.resync(event.part, event.namespace, event.keys)
            case L2Stored() if event.group == 0:
                self._l2.add(event.namespace, event.keys, event.time_ns)
            case L2Removed() if event.group == 0:
                self._l2.remove(event.namespace, event.keys)
            case L2Resynced() if event.group == 0:
                self._l2.resync(event.part, event.namespace, event.keys)
            case L1Cleared():
                self._l1.clear(event.namespace)
            case L2Cleared():
                self._l2.clear(event.namespace)

    def counts(self) -> dict[str, AgeCounts]:
        """Counts by tier: "l1", and "l2" for the local tiers of L2 together."""
        now_ns = self._clock()
        return {"l1": self._l1.counts(now_ns), "l2": self._l2.counts(now_ns)}
