"""Waits of lookups for running stores: one engine stores a prompt, and another one wants it before the store has ended.

The stores of a prompt end in any order, and each by its own deadline. So a request waits while the first object that its hit lacks
is being filled, and no longer than its engine's own limit. What is in L2 has been read before that.

Owns: the requests that wait, and which object each waits for. Refuses to know: stores and fills (an object's state shows both),
leases and replies (`lookups`), L2 (`tiering`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvserver.cache import Cache, Chunk, tails_of
from kvserver.protocol import KEY_BYTES, Lookup

MOST_WAITS = 1024  # further requests do not wait

Owner = tuple[str, str]  # (instance id, request id)


@dataclass(slots=True)
class _Wait:
    lookup: Lookup
    namespace: bytes
    due_ns: int
    then: Callable[[bool], None]
    place: int  # of the first chunk or block that was not seen whole


@dataclass
class StoreWaits:
    """Waits for stores. REQUIRES: the loop's thread uses it."""

    cache: Cache
    clock: Callable[[], float] = time.monotonic
    _waits: dict[Owner, _Wait] = field(default_factory=dict)

    def coming_chunks(self, namespace: bytes, lookup: Lookup, hit_chunks: int, tail_blocks: int) -> int:
        """Chunks that the hit could have once running stores have ended. One more than it has stands for blocks of its tail."""
        chunks = len(lookup.keys) // KEY_BYTES
        first = hit_chunks + (tail_blocks if hit_chunks == chunks else 0)
        if not _is_filling(self._object(namespace, lookup, first)):
            return hit_chunks
        coming = hit_chunks + 1
        while coming < chunks and self._object(namespace, lookup, coming) is not None:
            coming += 1
        return coming

    def begin(self, namespace: bytes, lookup: Lookup, due_ns: int, then: Callable[[bool], None]) -> None:
        """Call `then` once no running store fills what the hit lacks next, or at `due_ns`: with True if there may be more than now."""
        owner = (lookup.instance_id, lookup.request_id)
        if (
            before := self._waits.pop(owner, None)
        ) is not None:  # the request asks anew: what was found before may have left L1
            before.then(True)
        first = self.cache.leading(namespace, lookup.keys)
        wait = _Wait(lookup, namespace, due_ns, then, first)
        if len(self._waits) < MOST_WAITS and self._is_coming(wait):
            self._waits[owner] = wait
        else:
            then(False)

    def end(self, owner: Owner) -> None:
        """The request waits no longer: it is answered with what was found before."""
        if (wait := self._waits.pop(owner, None)) is not None:
            wait.then(False)

    def step(self) -> None:
        """Go on with requests whose wait is over, at the end of a turn. An object is looked at once in a turn for each wait."""
        now_ns = int(self.clock() * 1e9)
        for owner, wait in list(self._waits.items()):
            if wait.due_ns <= now_ns or not self._is_coming(wait):
                del self._waits[owner]
                wait.then(True)

    @property
    def next_due_ns(self) -> int | None:
        """Time at which the next wait ends at the latest; None without waits."""
        return min((wait.due_ns for wait in self._waits.values()), default=None)

    def _is_coming(self, wait: _Wait) -> bool:
        """True while the first object that the hit lacks is being filled."""
        while (chunk := self._object(wait.namespace, wait.lookup, wait.place)) is not None:
            if _is_filling(chunk):
                return True
            full = chunk.namespace.groups.full
            if chunk.ready & full != full:
                return False
            wait.place += 1
        return False

    def _object(self, namespace: bytes, lookup: Lookup, place: int) -> Chunk | None:
        """The chunk of this number, or the block of the tail behind the last chunk."""
        chunks = len(lookup.keys) // KEY_BYTES
        keys, of = (lookup.keys, namespace) if place < chunks else (lookup.tail_keys, tails_of(namespace))
        first = (place if place < chunks else place - chunks) * KEY_BYTES
        key = keys[first : first + KEY_BYTES]
        return self.cache.index.find_chunks(of, key)[0] if key else None


def _is_filling(chunk: Chunk | None) -> bool:
    return chunk is not None and any(chunk.is_filling(group) for group in range(len(chunk.namespace.groups.masks)))
