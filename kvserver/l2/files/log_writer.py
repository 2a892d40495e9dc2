"""The way of the index's changes into the journal.

Owns: which pages of dropped records may be used again: those whose drops are in the journal (written, not fsynced).
Compaction, when the journal has twice the bytes that its live records need. Refuses to know: tickets.

One batch is under way at a time; what changes meanwhile is the next one. The worker runs tasks in their order, so the
entries of the new file that follow a compaction come after its switch.
"""

from __future__ import annotations

from collections.abc import Callable

from kvserver._native import RecordTable
from kvserver.cache import PagePool
from kvserver.l2.files import journal
from kvserver.l2.files.journal import Journal
from kvserver.l2.files.worker import FileWorker

_PER_SLICE = 2048  # records of one slice of a compaction
_SPARE_BYTES = 1 << 20  # a smaller journal is not compacted


class LogWriter:
    """REQUIRES: the loop's thread uses it. `failed` gets the reason why the journal can have no more entries."""

    def __init__(
        self, table: RecordTable, pool: PagePool, file: Journal, worker: FileWorker, failed: Callable[[str], None]
    ) -> None:
        self._table = table
        self._pool = pool
        self._journal = file
        self._worker = worker
        self._failed = failed
        self._freed = bytearray()  # extents whose drops are in the log, or need none
        self._writing = False
        self._compacting = False
        self._next_id = 0
        self._slice_written = True
        self.bytes = file.bytes
        self.pending_pages = 0  # of dropped records, not free yet
        self.broken = False

    @property
    def idle(self) -> bool:
        """All that changed is in the journal."""
        return not (self._writing or self._compacting or self._freed or self._table.has_log)

    def free_later(self, extents: bytes, pages: int) -> None:
        """Free the pages once all entries logged so far are in the journal."""
        self._freed += extents
        self.pending_pages += pages

    def step(self) -> bool:
        """Send what waits. True if there is more to do at once."""
        if self.broken:
            self._table.drain_log()
            return False
        if not self._writing and (self._freed or self._table.has_log):
            self._write()
        if not self._compacting and self.bytes > 2 * self._table.live_journal_bytes + _SPARE_BYTES:
            self._begin_compaction()
        return self._compacting and self._slice_written and self._compact()

    def _write(self) -> None:
        entries, freed = self._table.drain_log(), bytes(self._freed)
        pages = self.pending_pages
        self._freed.clear()
        self._writing = True
        self.bytes += len(entries)

        def written(_: object, error: Exception | None) -> None:
            self._writing = False
            if error is not None:
                self._break(error)
                return
            self._pool.free_pages(freed)
            self.pending_pages -= pages

        self._worker.run(lambda: self._journal.append(entries), written)

    def write_last(self) -> None:
        """At the end: what waits, and the journal's last task. A compaction that is not complete is given up."""
        entries = b"" if self.broken else self._table.drain_log()

        def last() -> None:
            try:
                self._journal.append(entries)
                self._journal.sync()
            finally:
                self._journal.close()

        self._worker.run(last, self._check)

    # ---- compaction -----------------------------------------------------------------------------

    def _begin_compaction(self) -> None:
        id = self._next_id = journal.new_id()
        self._compacting, self._slice_written = True, True
        self._table.begin_next_log(id)
        self._worker.run(lambda: self._journal.begin_next(id), self._check)

    def _compact(self) -> bool:
        """One slice, or the end. True if another slice follows at once."""
        complete = self._table.fill_next_log(_PER_SLICE)
        entries = self._table.drain_next_log()
        self._slice_written = False
        if not complete:
            self._worker.run(lambda: self._journal.append_next(entries), self._slice_ended)
            return False
        last, id = self._table.drain_log(), self._next_id
        self._table.switch_logs()
        self._compacting = False

        def switch() -> int:
            if last:
                self._journal.append(last)
            self._journal.append_next(entries)
            self._journal.switch(id)
            return self._journal.bytes

        self._worker.run(switch, self._switched)
        return False

    def _slice_ended(self, _: object, error: Exception | None) -> None:
        self._slice_written = True
        self._check(_, error)

    def _switched(self, size: int | None, error: Exception | None) -> None:
        self._slice_written = True
        if size is not None:
            self.bytes = size
        self._check(None, error)

    def _check(self, _: object, error: Exception | None) -> None:
        if error is not None:
            self._break(error)

    def _break(self, error: Exception) -> None:
        if not self.broken:
            self.broken = True
            self._table.drop_next_log()
            self._failed(f"the journal cannot be written: {error}")
