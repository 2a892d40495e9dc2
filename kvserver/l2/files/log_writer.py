"""Writes the index's changes to the journal.

Rounds. A round is a batch of entries for the journal, then a part of a compaction, if one is under way. The next round begins
when both have ended; changes meanwhile wait for it. So nothing is written behind an entry that failed, and no second compaction
begins before the first one's file is the journal.

Failures. After one the journal gets no entries, until a compaction has put a new file into its place. That is tried for errors
that may pass. Pages of dropped records wait for it.

Owns: which pages of dropped records may be used again: those whose drops are in the journal (written, not fsynced). Compaction,
when the journal has twice the bytes that its live records need, nears its capacity, or is of an earlier format. Refuses to know:
tickets.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable
from typing import Any

from kvserver._native import RecordTable
from kvserver.cache import PagePool, page_count
from kvserver.l2.files import journal
from kvserver.l2.files.journal import Journal
from kvserver.l2.files.worker import FileWorker

_PER_SLICE = 2048  # records of one slice of a compaction
_PER_FREE = 512 * 8  # bytes of extents that are freed at once
_SPARE_BYTES = 1 << 20  # a smaller journal is not compacted
_MOST_WAITING_BYTES = 4 << 20  # of entries, before puts wait
_PASSING = (errno.ENOSPC, errno.EDQUOT)
_FIRST_RETRY_NS, _LONGEST_RETRY_NS = 1_000_000_000, 60_000_000_000


class LogWriter:
    """Writer of one journal. REQUIRES: the loop's thread uses it.

    `failing` gets the reason why the journal can have no more entries; "" when it can again.
    """

    def __init__(
        self, table: RecordTable, pool: PagePool, file: Journal, worker: FileWorker, failing: Callable[[str], None]
    ) -> None:
        self._table = table
        self._pool = pool
        self._journal = file
        self._worker = worker
        self._failing = failing
        self._freed = bytearray()  # extents whose drops are in the log, or need none
        self._free = deque[bytearray]()  # extents whose drops are in the journal
        self._running = 0  # tasks of this round
        self._compacting = False
        self._next_id = self._next_bytes = 0
        self._retry_at_ns = 0  # 0: the failure will not pass
        self._retry_ns = _FIRST_RETRY_NS
        self.bytes = file.bytes
        self.pending_pages = 0  # of dropped records, not free yet
        self.failure = ""
        self.takes_units = file.format == journal.FORMAT  # else a compaction is due

    @property
    def most_live_bytes(self) -> int:
        """Entries of records that a journal can have: as many bytes as it has place for changes."""
        return self._journal.capacity // 2

    @property
    def behind(self) -> bool:
        return self._table.log_bytes > _MOST_WAITING_BYTES

    @property
    def idle(self) -> bool:
        """All that changed is in the journal."""
        return not (self._running or self._compacting or self._freed or self._free or self._table.log_bytes)

    def free_later(self, extents: bytes, pages: int) -> None:
        """Free the pages once all entries logged so far are in the journal."""
        self._freed += extents
        self.pending_pages += pages

    def step(self) -> bool:
        """Begin a round, if the last one has ended. True if there is more to do at once."""
        freed = self._free_some()
        if self._running:
            return freed
        if self.failure:
            self._table.drain_log()
        full = self.bytes + self._table.log_bytes > self._journal.capacity
        due = full or not self.takes_units or self.bytes > self._most_bytes()
        if due and not (self._compacting or self.failure):
            self._begin_compaction()
        elif self._compacting:
            self._write(full)
            self._compact()
        else:
            self._write(full)
        return freed

    def try_again(self, now_ns: int) -> None:
        if self._retry_at_ns and self._retry_at_ns <= now_ns and not (self._running or self._compacting):
            self._retry_ns = min(2 * self._retry_ns, _LONGEST_RETRY_NS)
            self._retry_at_ns = now_ns + self._retry_ns
            self._begin_compaction()

    def _write(self, full: bool) -> None:
        if full or self.failure or not (self._freed or self._table.log_bytes):
            return
        entries = self._table.drain_log()
        freed, self._freed = self._freed, bytearray()
        self.bytes += len(entries)

        def written(_: object, error: Exception | None) -> None:
            self._running -= 1
            if error is not None:
                self._freed[:0] = freed
                self._fail(error)
            elif freed:
                self._free.append(freed)
                self._free_some()  # at once: puts wait for it

        self._run(lambda: self._journal.append(entries), written)

    def _run(self, call: Callable[[], Any], then: Callable[[Any, Exception | None], None]) -> None:
        self._running += 1
        self._worker.run(call, then)

    def _free_some(self) -> bool:
        """A slice: a clear frees all pages at once. False: there was nothing to free."""
        if not self._free:
            return False
        batch = self._free[0]
        part = bytes(batch[-_PER_FREE:])
        del batch[-_PER_FREE:]
        if not batch:
            self._free.popleft()
        self._pool.free_pages(part)
        self.pending_pages -= page_count(part)
        return True

    def write_last(self) -> None:
        """Write waiting entries and close the journal. An incomplete compaction is given up."""
        entries = b"" if self.failure else self._table.drain_log()

        def last() -> None:
            try:
                self._journal.append(entries)
                self._journal.sync()
            finally:
                self._journal.close()

        self._worker.run(last, self._ended_last)

    def _ended_last(self, _: object, error: Exception | None) -> None:
        if error is not None:
            self._fail(error)

    # ---- compaction -----------------------------------------------------------------------------

    def _most_bytes(self) -> int:
        live, capacity = self._table.live_journal_bytes, self._journal.capacity
        return min(2 * live + min(_SPARE_BYTES, capacity // 4), (live + capacity) // 2)

    def _begin_compaction(self) -> None:
        id = self._next_id = journal.new_id()
        self._compacting, self._next_bytes = True, journal.HEAD_BYTES
        self._table.begin_next_log(id)
        self._run(lambda: self._journal.begin_next(id), self._part_ended)

    def _compact(self) -> None:
        """Write one slice of the compaction, or its end."""
        complete = self._table.fill_next_log(_PER_SLICE)
        entries, id = self._table.drain_next_log(), self._next_id
        self._next_bytes += len(entries)
        if not complete:
            self._run(lambda: self._journal.append_next(entries), self._part_ended)
            return
        self._table.switch_logs()
        self.bytes = self._next_bytes

        def switch() -> None:
            self._journal.append_next(entries)
            self._journal.switch(id)

        self._run(switch, self._switched)

    def _part_ended(self, _: object, error: Exception | None) -> None:
        self._running -= 1
        if error is not None:
            self._compacting = False
            self._table.drop_next_log()
            self._fail(error)

    def _switched(self, _: object, error: Exception | None) -> None:
        self._part_ended(_, error)
        self._compacting = False
        self.takes_units |= error is None
        if error is None and self.failure:
            self.failure, self._retry_at_ns, self._retry_ns = "", 0, _FIRST_RETRY_NS
            self._failing("")

    def _fail(self, error: Exception) -> None:
        passes = isinstance(error, OSError) and error.errno in _PASSING
        if not self.failure:
            self.failure = f"the journal cannot be written: {error}"
            self._retry_at_ns = 1 if passes else 0  # the next tick
            self._failing(self.failure)
