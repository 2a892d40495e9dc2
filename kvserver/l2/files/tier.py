"""The file tier: a StorageTier over one folder.

Owns: which record lies where, eviction, the state of each ticket. Bytes move in the native device's threads, all other file
work in the worker; the loop's thread decides, in memory only.

How wrong bytes are kept out, in the order of a record's time:
- A put writes to pages that no record in the index or in the journal has, then enters the index and the journal.
- A get verifies the whole record against its name, coverage, lengths and generation (`csrc/l2/record.h`).
- Pages of a dropped record are used again once no get reads them and its drop is in the journal (`log_writer`).
- After a clear the namespace has another generation (`generations`): in the index at once, in the folder when the ticket
  ends. A put or get that began before it ends as CANCELLED.
"""

from __future__ import annotations

import logging
import struct
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from kvserver._native import FileDevice, FileOutcome, HostRegion, Record, RecordTable, checksum
from kvserver.cache import PagePool
from kvserver.config import TierUrl
from kvserver.l2.base import ObjectMemory, ObjectName, State, TierEnd, TierOutcome
from kvserver.l2.files import generations
from kvserver.l2.files.folder import Folder
from kvserver.l2.files.generations import FolderGenerations
from kvserver.l2.files.log_writer import LogWriter
from kvserver.l2.files.opening import HEAD_PAGES, Opened, open_tier
from kvserver.l2.files.worker import FileWorker
from kvserver.protocol.status import TierStatus

log = logging.getLogger(__name__)

THREADS = 4
MOST_CORRUPT = 8  # gets in a row, of records that this process wrote
_STALLED_SECONDS = 10.0  # a call of the file system that runs so much longer than a get may
_SWEEP = 4096  # records of one slice
_EXTENT = struct.Struct("=II")

_OUTCOMES = {
    FileOutcome.DONE: TierOutcome.DONE,
    FileOutcome.OTHER: TierOutcome.CORRUPT,  # the index has another one than the file
    FileOutcome.CORRUPT: TierOutcome.CORRUPT,
    FileOutcome.FULL: TierOutcome.FULL,
    FileOutcome.LATE: TierOutcome.TIMEOUT,
    FileOutcome.FAILED: TierOutcome.UNAVAILABLE,
    FileOutcome.CANCELLED: TierOutcome.CANCELLED,
}


@dataclass
class _Put:
    ticket: int
    name: ObjectName
    generation: int
    meaning: int
    parent: bytes
    record: Record
    pages: int
    deadline_ns: int
    extents: bytes = b""
    void: bool = False  # it was dropped meanwhile


@dataclass
class _Get:
    ticket: int
    name: ObjectName
    generation: int
    extents: bytes
    recovered: bool
    void: bool = False


@dataclass
class _Counts:
    hits: int = 0
    misses: int = 0
    corrupt: int = 0
    timeouts: int = 0
    errors: int = 0
    written_objects: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    write_nanos: int = 0
    read_nanos: int = 0
    evictions: int = 0
    full: int = 0


@dataclass
class _Reads:
    """The records that gets read, by their first extents, and what is freed after them."""

    counts: Counter[bytes] = field(default_factory=Counter)
    freed_after: dict[bytes, bytes] = field(default_factory=dict)


class FileTier:
    """REQUIRES: the loop's thread uses it; `folder` is closed by close()."""

    kind = "file"
    shared = False

    def __init__(self, url: TierUrl, folder: Folder, region: HostRegion, page_bytes: int) -> None:
        self.name = url.name
        self.url = url.shown
        self._timeout_ns = int(url.timeout_seconds * 1e9)
        self._folder = folder
        self._region = region
        self._page_bytes = page_bytes
        data = folder.data
        self._device = FileDevice(data.fd, data.page_bytes, data.pages, THREADS, folder.disk.calls)
        self._worker = FileWorker(url.name, self._device.notify)
        # All four are there from the end of opening on; without a journal in a read-only folder.
        self._table: RecordTable | None = None
        self._pool = PagePool(0, data.page_bytes)
        self._generations = FolderGenerations()
        self._writer: LogWriter | None = None
        self._closed = ""
        self._read_only = folder.read_only_reason
        self._stalled = ""
        self._next_ticket = 0
        self._ends: list[TierEnd] = []
        self._waiting: deque[_Put] = deque()  # for space
        self._puts: dict[int, _Put] = {}
        self._gets: dict[int, _Get] = {}
        self._reads = _Reads()
        self._early_clears: list[tuple[int, bytes]] = []  # before the end of opening
        self._unsaved_clears: list[int] = []  # tickets
        self._saving = False
        self._generations_saved = True  # or being saved
        self._corrupt_in_a_row = 0
        self._counts = _Counts()
        self._worker.run(partial(open_tier, folder), self._opened)

    # ---- state ----------------------------------------------------------------------------------

    @property
    def completion_fd(self) -> int:
        return self._device.completion_fd

    @property
    def state(self) -> State:
        if self._closed:
            return "closed"
        if self._table is None:
            return "opening"
        if self._stalled:
            return "unavailable"
        return "read_only" if self._read_only else "ready"

    @property
    def failure(self) -> str:
        return self._closed or self._stalled or self._read_only

    def _readable(self) -> RecordTable | None:
        return self._table if self.state in ("ready", "read_only") else None

    def _opened(self, opened: Opened | None, error: Exception | None) -> None:
        if opened is None:
            self._close_tier(f"{self._folder.path}: {error}")
            return
        self._table, self._pool, self._generations = opened.table, opened.pool, opened.generations
        if opened.journal is not None:
            self._writer = LogWriter(opened.table, opened.pool, opened.journal, self._worker, self._stop_writing)
        early, self._early_clears = self._early_clears, []
        for ticket, prefix in early:
            self._clear(ticket, prefix)

    def _close_tier(self, why: str) -> None:
        log.error("L2 tier %s is closed: %s", self.name, why)
        self._closed = why
        self._end_waiting(TierOutcome.UNAVAILABLE, why)
        early, self._early_clears = self._early_clears, []
        for ticket, _ in early:
            self._end(ticket, TierOutcome.UNAVAILABLE, why)

    def _stop_writing(self, why: str) -> None:
        log.error("L2 tier %s is read-only from now on: %s", self.name, why)
        self._read_only = why
        self._counts.errors += 1
        self._end_waiting(TierOutcome.UNAVAILABLE, why)

    def _end_waiting(self, outcome: TierOutcome, why: str) -> None:
        while self._waiting:
            self._end(self._waiting.popleft().ticket, outcome, why)

    # ---- what there is --------------------------------------------------------------------------

    def holds(self, namespace: bytes, group: int, keys: bytes) -> int:
        table = self._readable()
        return table.holds(namespace, self._generations.of(namespace), group, keys) if table is not None else 0

    def probe(self, namespace: bytes, group: int, keys: bytes, chain: bool, deadline_ns: int) -> int:
        return self._end(self._ticket(), TierOutcome.DONE)

    def touch(self, namespace: bytes, group: int, keys: bytes) -> None:
        table = self._readable()
        if table is not None:
            table.touch(namespace, self._generations.of(namespace), group, keys)

    # ---- puts -----------------------------------------------------------------------------------

    def put(self, name: ObjectName, memory: ObjectMemory, parent: bytes, deadline_ns: int) -> int:
        ticket = self._ticket()
        table = self._table
        if table is None or self.state != "ready":
            return self._end(ticket, TierOutcome.UNAVAILABLE, self.failure or "it is opening")
        generation = self._generations.of(name.namespace)
        meaning = _meaning(memory)
        found = table.find(name.namespace, generation, name.group, name.key)
        if found is not None:
            if found[0] == meaning:
                table.touch(name.namespace, generation, name.group, name.key)
                return self._end(ticket, TierOutcome.DONE)
            self._remove(name, generation)
        record = self._record(name, memory, generation)
        pages = self._pool.pages_for(record.file_bytes)
        if pages > self._pool.pages - HEAD_PAGES:
            return self._end_full(ticket)
        self._waiting.append(_Put(ticket, name, generation, meaning, parent, record, pages, deadline_ns))
        self._start_puts()
        self._write_log()
        return ticket

    def _start_puts(self) -> None:
        while self._waiting:
            put = self._waiting[0]
            extents = self._pool.allocate_pages(put.pages)
            if extents is None:
                if self._make_room(put.pages):
                    return
                self._waiting.popleft()
                self._end_full(put.ticket)
                continue
            self._waiting.popleft()
            put.extents = extents
            self._puts[put.ticket] = put
            self._device.submit(put.ticket, True, put.record, extents, put.deadline_ns)

    def _make_room(self, pages: int) -> bool:
        """Evict until so many pages are free or will be; false if there is nothing to evict."""
        assert self._table is not None
        assert self._writer is not None
        while self._pool.unused_pages + self._writer.pending_pages < pages:
            evicted = self._table.evict()
            if evicted is None:
                return bool(self._reads.freed_after) or not self._table.swept
            self._counts.evictions += 1
            self._release(evicted[3])
        return True

    def _put_ended(self, put: _Put, outcome: FileOutcome, nanos: int, what: str) -> None:
        table = self._table
        assert table is not None
        current = self._generations.of(put.name.namespace)
        if outcome is FileOutcome.DONE and not put.void and put.generation == current and not self._closed:
            self._counts.written_objects += 1
            self._counts.written_bytes += put.record.bytes
            self._counts.write_nanos += nanos
            self._remove(put.name, current)  # one that was put meanwhile
            table.add(
                put.name.namespace, current, put.name.group, put.name.key, put.parent, put.meaning, put.extents
            )  # fmt: skip
            self._end(put.ticket, TierOutcome.DONE, bytes=put.record.bytes, nanos=nanos)
            return
        self._pool.free_pages(put.extents)  # no journal has had them
        if outcome is FileOutcome.DONE:
            self._end(put.ticket, TierOutcome.CANCELLED, "the object was dropped meanwhile")
        elif outcome is FileOutcome.FULL:
            self._end_full(put.ticket, what)
        else:
            self._count_failure(outcome)
            self._end(put.ticket, _OUTCOMES[outcome], what, nanos=nanos)

    def _end_full(self, ticket: int, what: str = "") -> int:
        self._counts.full += 1
        return self._end(ticket, TierOutcome.FULL, what)

    # ---- gets -----------------------------------------------------------------------------------

    def get(self, name: ObjectName, memory: ObjectMemory, deadline_ns: int) -> int:
        ticket = self._ticket()
        table = self._readable()
        if table is None:
            return self._end(ticket, TierOutcome.UNAVAILABLE, self.failure or "it is opening")
        generation = self._generations.of(name.namespace)
        found = table.find(name.namespace, generation, name.group, name.key)
        if found is None or found[0] != _meaning(memory):
            self._counts.misses += 1
            return self._end(ticket, TierOutcome.MISSING)
        record = self._record(name, memory, generation)
        self._device.submit(ticket, False, record, found[1], deadline_ns)
        self._gets[ticket] = _Get(ticket, name, generation, found[1], found[2])
        self._reads.counts[found[1]] += 1
        return ticket

    def _get_ended(self, get: _Get, outcome: FileOutcome, moved: int, nanos: int, what: str) -> None:
        self._unpin(get.extents)
        current = self._generations.of(get.name.namespace)
        if get.void or get.generation != current or self._closed:
            self._end(get.ticket, TierOutcome.CANCELLED, "the object was dropped meanwhile", nanos=nanos)
            return
        if outcome is FileOutcome.DONE:
            self._corrupt_in_a_row = 0
            self._counts.hits += 1
            self._counts.read_bytes += moved
            self._counts.read_nanos += nanos
        elif _OUTCOMES[outcome] is TierOutcome.CORRUPT:
            self._found_corrupt(get, current, what)
        else:
            self._count_failure(outcome)
        self._end(get.ticket, _OUTCOMES[outcome], what, moved if outcome is FileOutcome.DONE else 0, nanos)

    def _found_corrupt(self, get: _Get, generation: int, what: str) -> None:
        assert self._table is not None
        name = get.name
        self._counts.corrupt += 1
        log.warning("L2 tier %s: an object is corrupt and is dropped: %s", self.name, what)
        found = self._table.find(name.namespace, generation, name.group, name.key)
        if found is not None and found[1] == get.extents:
            self._remove(name, generation)
        if get.recovered:  # after a loss of power these are expected: nothing was fsynced
            return
        self._corrupt_in_a_row += 1
        if self._corrupt_in_a_row >= MOST_CORRUPT:
            self._close_tier(f"{MOST_CORRUPT} objects in a row were corrupt; the last one: {what}")

    def _count_failure(self, outcome: FileOutcome) -> None:
        if outcome is FileOutcome.LATE:
            self._counts.timeouts += 1
        elif outcome is FileOutcome.FAILED:
            self._counts.errors += 1

    # ---- removal --------------------------------------------------------------------------------

    def drop(self, namespace: bytes, group: int, keys: bytes) -> None:
        if self._table is None:
            return
        generation = self._generations.of(namespace)
        names = {ObjectName(namespace, group, keys[at : at + 32]) for at in range(0, len(keys), 32)}
        for name in names:
            self._remove(name, generation)
        for put in (*self._puts.values(), *self._waiting):
            put.void |= put.name in names
        for get in self._gets.values():
            get.void |= get.name in names
        self._write_log()

    def _remove(self, name: ObjectName, generation: int) -> None:
        assert self._table is not None
        extents = self._table.remove(name.namespace, generation, name.group, name.key)
        if extents is not None:
            self._release(extents)

    def _release(self, extents: bytes) -> None:
        """The record left the index. Its pages are free after its gets and its drop's entry."""
        if extents in self._reads.counts:
            self._reads.freed_after[extents] = extents
        elif self._writer is not None:
            self._writer.free_later(extents, _pages_of(extents))

    def _unpin(self, extents: bytes) -> None:
        counts = self._reads.counts
        counts[extents] -= 1
        if counts[extents]:
            return
        del counts[extents]
        freed = self._reads.freed_after.pop(extents, None)
        if freed is not None:
            self._release(freed)

    def clear(self, prefix: bytes) -> int:
        ticket = self._ticket()
        if self._closed:
            return self._end(ticket, TierOutcome.UNAVAILABLE, self._closed)
        if self._table is None:
            self._early_clears.append((ticket, prefix))
        else:
            self._clear(ticket, prefix)
        return ticket

    def _clear(self, ticket: int, prefix: bytes) -> None:
        assert self._table is not None
        self._generations.clear(prefix)
        for namespace, generation, group, _ in self._table.spaces():
            if generation != self._generations.of(namespace):
                self._table.drop_space(namespace, generation, group)
        for put in [put for put in self._waiting if put.generation != self._generations.of(put.name.namespace)]:
            self._waiting.remove(put)
            self._end(put.ticket, TierOutcome.CANCELLED)
        if self._folder.read_only_reason:
            self._end(ticket, TierOutcome.UNAVAILABLE, self._folder.read_only_reason)
            return
        self._unsaved_clears.append(ticket)
        self._generations_saved = False
        self._save_generations()

    def _save_generations(self) -> None:
        """Write them unless they are being written; then what changed meanwhile is written next."""
        if self._saving or self._generations_saved:
            return
        raw = self._generations.encode()
        tickets, self._unsaved_clears = self._unsaved_clears, []
        self._saving = self._generations_saved = True

        def saved(_: object, error: Exception | None) -> None:
            self._saving = False
            if error is not None:
                self._counts.errors += 1
                self._generations_saved = False  # tick() tries again
            for ticket in tickets:
                self._end(ticket, TierOutcome.UNAVAILABLE if error else TierOutcome.DONE, str(error or ""))
            if self._unsaved_clears:
                self._save_generations()

        self._worker.run(lambda: generations.write(self._folder, raw), saved)

    # ---- tickets --------------------------------------------------------------------------------

    def cancel(self, ticket: int) -> None:
        for put in self._waiting:
            if put.ticket == ticket:
                self._waiting.remove(put)
                self._end(ticket, TierOutcome.CANCELLED)
                return
        self._device.cancel(ticket)

    def drain(self) -> Sequence[TierEnd]:
        for ticket, outcome, moved, nanos, what in self._device.drain():
            if (put := self._puts.pop(ticket, None)) is not None:
                self._put_ended(put, outcome, nanos, what)
            else:
                self._get_ended(self._gets.pop(ticket), outcome, moved, nanos, what)
        self._worker.finish()
        more = self._sweep()
        if self._writer is not None:
            self._start_puts()
        if self._write_log() or more:
            self._device.notify()
        ends, self._ends = self._ends, []
        return ends

    def _sweep(self) -> bool:
        """A slice of what clears left. Its pages are free only once the generations are durable."""
        table = self._table
        if table is None or self._writer is None or table.swept or self._saving or not self._generations_saved:
            return False
        freed = table.sweep(_SWEEP)
        for first, count in _EXTENT.iter_unpack(freed):
            self._writer.free_later(_EXTENT.pack(first, count), count)
        return not table.swept

    def _write_log(self) -> bool:
        return self._writer is not None and self._writer.step()

    def tick(self, now_ns: int) -> None:
        self._device.expire()
        for put in [put for put in self._waiting if put.deadline_ns and put.deadline_ns < now_ns]:
            self._waiting.remove(put)
            self._counts.timeouts += 1
            self._end(put.ticket, TierOutcome.TIMEOUT, "no space was free before its deadline")
        longest_ns = max(self._device.stalled_nanos, self._worker.stalled_ns if self._table is not None else 0)
        stalled = longest_ns > self._timeout_ns + int(_STALLED_SECONDS * 1e9)
        self._stalled = f"a call of the file system has not ended for {longest_ns * 1e-9:.0f} s" if stalled else ""
        self._save_generations()
        if self._write_log():
            self._device.notify()

    def _ticket(self) -> int:
        self._next_ticket += 1
        return self._next_ticket

    def _end(self, ticket: int, outcome: TierOutcome, what: str = "", bytes: int = 0, nanos: int = 0) -> int:
        self._ends.append(TierEnd(ticket, outcome, bytes, nanos, what))
        self._device.notify()
        return ticket

    def _record(self, name: ObjectName, memory: ObjectMemory, generation: int) -> Record:
        return Record(
            self._region, self._page_bytes, name.namespace, name.group, name.key, memory.coverage, generation,
            memory.slots, memory.slot_bytes,
        )  # fmt: skip

    # ---- the end, status ------------------------------------------------------------------------

    def close(self, deadline_ns: int) -> None:
        """Once. A thread whose call hangs keeps L1 mapped, and the folder locked, until it ends."""
        if self._writer is not None:
            self._writer.write_last()
        worker_ended = self._worker.close(deadline_ns)
        self._worker.finish()
        if not self._device.close(max(0, deadline_ns - time.monotonic_ns())) or not worker_ended:
            log.warning(
                "L2 tier %s: a call of the file system has not ended; it keeps its memory until it does", self.name
            )
        self._closed = self._closed or "the daemon ends"
        if worker_ended:  # else its task uses the folder
            self._folder.close()

    def status(self) -> TierStatus:
        data = self._folder.data
        return TierStatus(
            name=self.name,
            kind=self.kind,
            url=self.url,
            state=self.state,
            failure=self.failure,
            size_bytes=data.pages * data.page_bytes,
            used_bytes=self._pool.used_pages * data.page_bytes,
            objects=len(self._table) if self._table is not None else 0,
            **vars(self._counts),
        )


def _meaning(memory: ObjectMemory) -> int:
    """What must agree before a record is read, but for its name and generation. The header has it in full."""
    return checksum(memory.coverage + struct.pack(f"<{len(memory.slot_bytes)}Q", *memory.slot_bytes))


def _pages_of(extents: bytes) -> int:
    return sum(count for _, count in _EXTENT.iter_unpack(extents))
