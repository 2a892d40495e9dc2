"""Who leaves L1 first.

The contract of a policy:
- `track(chunks)`: from now on they may be victims, each as the youngest, in this order. What is leased or pinned is
  left out: it is tracked when its last hold ends. What was freed is left out, too.
- `oldest()`: the chunk that should leave next, or None if it has none. It may be leased or pinned by now: then the
  cache forgets it, and it is tracked again when its last hold ends.
- `forget(chunk)`: it leaves the policy. REQUIRES: tracked.
No call costs more than the chunks that it is given: what the cache does in one turn of the loop stays bounded.

Owns: the order. Refuses to know: pages and leases' owners.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from kvserver.cache.index import NOWHERE, Chunk, Link


class EvictionPolicy(Protocol):
    name: str

    def track(self, chunks: Iterable[Chunk]) -> None: ...

    def oldest(self) -> Chunk | None: ...

    def forget(self, chunk: Chunk) -> None: ...


class LeastRecentlyUsed:
    """Two rings through the chunks themselves, each from its end (`younger` is the oldest) back to it.

    What is not READY and nobody fills is in the first one and leaves before all others.
    """

    name = "lru"

    def __init__(self) -> None:
        self._incomplete = _empty_ring()
        self._used = _empty_ring()

    def track(self, chunks: Iterable[Chunk]) -> None:
        used = self._used
        for chunk in chunks:  # for each chunk of each lookup: no calls in here
            if chunk.leases or chunk.pins:
                continue
            if chunk.ready:
                end = used
            elif chunk.detached:
                continue
            else:
                end = self._incomplete
            older = chunk.older
            if older is not NOWHERE:
                younger = chunk.younger
                older.younger = younger
                younger.older = older
            youngest = end.older
            chunk.older = youngest
            chunk.younger = end
            youngest.younger = chunk
            end.older = chunk

    def oldest(self) -> Chunk | None:
        for end in (self._incomplete, self._used):
            if isinstance(oldest := end.younger, Chunk):
                return oldest
        return None

    def forget(self, chunk: Chunk) -> None:
        assert chunk.tracked
        chunk.older.younger, chunk.younger.older = chunk.younger, chunk.older
        chunk.older = chunk.younger = NOWHERE


def _empty_ring() -> Link:
    end = Link()
    end.older = end.younger = end
    return end


POLICIES: dict[str, type[EvictionPolicy]] = {"lru": LeastRecentlyUsed}
