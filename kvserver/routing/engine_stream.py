"""The KV events of one engine, in order: what it holds in its own memory, and whether that is all.

Owns: the sequence, what was lost. Refuses to know: sockets, and where the blocks are kept.

Batches are numbered from 0. One that is missing may be had again; if it cannot, all that is known is dropped, since
what the missing one removed would be found for ever. A number that was there before, at a later time, is another
engine's at the same address. An engine whose requests ask for `kv_cache_report_mode` "full" tells of blocks again that
it holds already; those are found until it clears its cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from kvserver.routing.engine_wire import Batch, Change, decode

FOLLOWING = ("waiting", "complete", "incomplete")  # states of a stream that is read


class Blocks(Protocol):
    """Where they are kept; 8 bytes each."""

    def add(self, hashes: bytes) -> None: ...

    def remove(self, hashes: bytes) -> None: ...

    def clear(self) -> None: ...


class EngineStream:
    def __init__(self, blocks: Blocks, group: int, clock: Callable[[], float]) -> None:
        self._blocks = blocks
        self._group = group
        self._clock = clock
        self._last: int | None = None
        self._last_time = 0.0
        self._incomplete_since: float | None = None
        self._batches = 0
        self._restarts = 0
        self._lost_gaps = 0
        self._malformed = 0

    @property
    def next(self) -> int:
        """The number of the batch that comes next."""
        return 0 if self._last is None else self._last + 1

    def apply_batch(self, number: int, payload: bytes, final: bool) -> bool:
        """Apply a batch. False, unless `final`: those before it are missing; ask for them, then hand it over again."""
        batch = decode(payload, self._group)
        if number < self.next:
            if batch is None or batch.time <= self._last_time:
                return True  # a replay told it before
            self._restarts += 1
            self._last, self._incomplete_since = None, None
            self._blocks.clear()
        if number != self.next:
            if not final:
                return False
            self._lost_gaps += self._last is not None
            self._lose()
        self._last = number
        if batch is None:
            self.count_malformed()
            self._lose()
        else:
            self._apply_changes(batch)
        return True

    def count_malformed(self) -> None:
        self._malformed += 1

    def _apply_changes(self, batch: Batch) -> None:
        self._last_time = batch.time
        self._batches += 1
        self._malformed += batch.malformed
        for change, hashes in batch.changes:
            if change is Change.STORED:
                self._blocks.add(hashes)
            elif change is Change.REMOVED:
                self._blocks.remove(hashes)
            else:
                self._blocks.clear()
                self._incomplete_since = None

    def _lose(self) -> None:
        self._blocks.clear()
        self._incomplete_since = self._clock()

    def status(self) -> dict[str, Any]:
        since = self._incomplete_since
        return {
            "state": "waiting" if self._last is None else "complete" if since is None else "incomplete",
            "incomplete_seconds": round(self._clock() - since, 3) if since is not None else None,
            "sequence": self._last,
            "batches": self._batches,
            "malformed": self._malformed,
            "lost_gaps": self._lost_gaps,
            "restarts": self._restarts,
        }
