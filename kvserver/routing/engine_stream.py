"""Applies the KV events of one engine in order: which blocks are in its own memory, and whether all are known.

Batches are numbered from 0. A missing batch may be replayed. If it cannot, all known blocks are dropped, for blocks that the
missing batch removed would be found for ever. A number seen before, with a later time, is of another engine at the same address.
An engine whose requests set `kv_cache_report_mode` to "full" announces resident blocks again; those are found until the engine
clears its cache.

Owns: the sequence, and lost batches. Refuses to know: sockets.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from kvserver._native import PrefixIndex
from kvserver.kv_events import Description
from kvserver.protocol.kv_status import EngineEventsStatus
from kvserver.routing.engine_wire import Change, EngineBatch, decode, pages_of

log = logging.getLogger(__name__)
FOLLOWING = ("waiting", "complete", "incomplete")  # the states of a stream that is being read


class NoOwner(Exception):
    """Index with too few free owners."""


class EngineBlocks:
    """Blocks of an engine in the index, with 8 bytes of each hash: an owner for each object group; () once it is closed."""

    def __init__(self, index: PrefixIndex, groups: int = 1) -> None:
        """NoOwner if the index has too few."""
        self._index = index
        self.owners: tuple[int, ...] = tuple(index.add_owner() for _ in range(groups))
        if min(self.owners) < 0:
            self.close()
            raise NoOwner

    def add(self, group: int, hashes: bytes) -> None:
        self._index.add_blocks(self.owners[group], hashes, 8)

    def remove(self, group: int, hashes: bytes) -> None:
        self._index.remove_blocks(self.owners[group], hashes, 8)

    def clear(self) -> None:
        for owner in self.owners:
            self._index.clear_owner(owner)

    def close(self) -> None:
        owners, self.owners = self.owners, ()
        for owner in owners:
            if owner >= 0:
                self._index.remove_owner(owner)


class EngineStream:
    def __init__(
        self,
        blocks: EngineBlocks,
        groups: Sequence[int],
        describe: Callable[[list[Description]], None] | None = None,
        page_tokens: int = 1,
    ) -> None:
        """`groups`: the KV cache groups whose blocks are read, one for each owner of `blocks`. `describe` receives SGLang's pages
        of `page_tokens` tokens.
        """
        self._describe = describe
        self._page_tokens = page_tokens
        self._blocks = blocks
        self._groups = groups
        self._last: int | None = None
        self._last_time = 0.0
        self._incomplete_since: float | None = None
        self._batches = 0
        self._restarts = 0
        self._lost_gaps = 0
        self._undescribed_batches = 0
        self.malformed = 0

    @property
    def next(self) -> int:
        """The number of the next batch."""
        return 0 if self._last is None else self._last + 1

    def apply_batch(self, number: int, payload: bytes, final: bool) -> bool:
        """False, unless `final`: batches before it are missing; request a replay, then call again with `final`."""
        batch = decode(payload, self._groups)
        if number < self.next:
            if batch is None or batch.time <= self._last_time:
                return True  # a replay brought it before
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
            self.malformed += 1
            self._lose()
        else:
            self._apply_changes(batch)
            self._describe_pages(payload)
        return True

    def _describe_pages(self, payload: bytes) -> None:
        """Hand over the pages of a batch. An exception costs their descriptions, and only the first is logged."""
        try:
            if self._describe is not None and (pages := pages_of(payload, self._page_tokens)):
                self._describe(pages)
        except Exception:
            if not self._undescribed_batches:
                log.exception(
                    "the pages of a batch of KV events are not described; further such batches are not logged"
                )
            self._undescribed_batches += 1

    def _apply_changes(self, batch: EngineBatch) -> None:
        self._last_time = batch.time
        self._batches += 1
        self.malformed += batch.malformed
        for change, group, hashes in batch.changes:
            if change is Change.STORED:
                self._blocks.add(group, hashes)
            elif change is Change.REMOVED:
                self._blocks.remove(group, hashes)
            else:
                self._blocks.clear()
                self._incomplete_since = None

    def _lose(self) -> None:
        self._blocks.clear()
        self._incomplete_since = time.monotonic()

    def status(self) -> EngineEventsStatus:
        since = self._incomplete_since
        return EngineEventsStatus(
            state="waiting" if self._last is None else "complete" if since is None else "incomplete",
            incomplete_seconds=round(time.monotonic() - since, 3) if since is not None else None,
            sequence=self._last,
            batches=self._batches,
            malformed=self.malformed,
            lost_gaps=self._lost_gaps,
            restarts=self._restarts,
        )
