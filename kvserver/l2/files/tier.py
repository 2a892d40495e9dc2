"""The file tier: a StorageTier over one folder.

Bytes move in the native device's threads, all other file work in the worker; the loop's thread decides, in memory only.

Rules that keep wrong bytes out, in the order of a record's time:
- A put writes to pages that no record in the index or in the journal has, then enters the index and the journal.
- A get verifies the whole record against its name, coverage, lengths and generation (`csrc/l2/record.h`).
- Pages of a dropped record are used again once no get reads them and its drop is in the journal (`log_writer`).
- After a clear the namespace has another generation (`generations`): in the index at once, in the folder when the ticket ends. A
  put or get that began before it ends as CANCELLED.

Owns: its state, and which part does what: `puts`, `gets`, `clears`, over `records`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from kvserver._native import FileDevice, HostRegion
from kvserver.config import TierUrl
from kvserver.l2.base import READABLE, Changed, ObjectMemory, ObjectName, State, TierEnd, TierOutcome
from kvserver.l2.files.clears import FileClears
from kvserver.l2.files.folder import Folder
from kvserver.l2.files.gets import FileGets
from kvserver.l2.files.opening import Opened, open_tier
from kvserver.l2.files.puts import FilePuts
from kvserver.l2.files.records import FileRecords, L1Pages
from kvserver.l2.files.tickets import FileTickets
from kvserver.l2.files.worker import FileWorker
from kvserver.protocol import KEY_BYTES
from kvserver.protocol.status import TierStatus

log = logging.getLogger(__name__)

THREADS = 4  # that write, and as many that read: with three, puts of 256 KiB did not keep a fast disk busy
_STALLED_SECONDS = 10.0  # a call of the file system that runs so much longer than a get may


@dataclass(frozen=True)
class _Parts:
    """Parts that exist from the end of opening on."""

    records: FileRecords
    puts: FilePuts
    gets: FileGets
    clears: FileClears


class FileTier:
    """A tier in files. REQUIRES: the loop's thread uses it; close() closes `folder`."""

    kind = "file"
    shared = False

    def __init__(self, url: TierUrl, folder: Folder, region: HostRegion, page_bytes: int) -> None:
        self.name = url.name
        self.url = url.shown
        self._timeout_ns = int(url.timeout_seconds * 1e9)
        self._folder = folder
        self._l1 = L1Pages(region, page_bytes)
        data = folder.data
        self._device = FileDevice(data.fd, data.page_bytes, data.pages, THREADS, folder.disk.calls)
        self._worker = FileWorker(url.name, self._device.notify)
        self._tickets = FileTickets(url.name, self._device.notify)
        self._parts: _Parts | None = None
        self._watcher: Changed | None = None
        self._closed = ""
        self._read_only = folder.read_only_reason
        self._stalled = ""
        self._lost, self._looks = "", False  # why a restart would not find the files; the worker looks
        self._stalled_journal = ""  # puts and clears need the worker, gets do not
        self._early_clears: list[tuple[int, bytes]] = []  # before the end of opening
        self._worker.run(partial(open_tier, folder), self._opened)

    # ---- state ----------------------------------------------------------------------------------

    @property
    def completion_fd(self) -> int:
        return self._device.completion_fd

    @property
    def state(self) -> State:
        if self._closed:
            return "closed"
        if self._stalled or self._lost:
            return "unavailable"
        if self._parts is None:
            return "opening"
        return "read_only" if self._read_only or self._stalled_journal else "ready"

    @property
    def failure(self) -> str:
        return self._closed or self._stalled or self._lost or self._read_only or self._stalled_journal

    @property
    def direct(self) -> bool:
        """True if records move by O_DIRECT."""
        return self._folder.data.direct

    @property
    def journaled(self) -> bool:
        """All that changed is in the journal, or will never be."""
        return self._parts is None or self._parts.records.journaled

    def _readable(self) -> _Parts | None:
        return self._parts if self.state in READABLE else None

    def _opened(self, opened: Opened | None, error: Exception | None) -> None:
        if opened is None:
            self._close_tier(f"{self._folder.path}: {error}")
            return
        records = FileRecords(opened, self._worker, self._journal_fails, self._changed)
        self._parts = _Parts(
            records,
            FilePuts(records, self._device, self._l1, self._tickets),
            FileGets(records, self._device, self._l1, self._tickets, self._close_tier),
            FileClears(opened.generations, self._folder, self._worker, self._tickets),
        )
        early, self._early_clears = self._early_clears, []
        for ticket, prefix in early:
            self._clear(self._parts, ticket, prefix)

    def _close_tier(self, why: str) -> None:
        log.error("L2 tier %s is closed: %s", self.name, why, extra={"tier": self.name})
        self._closed = why
        if self._parts is not None:
            self._parts.puts.give_up(why)
        early, self._early_clears = self._early_clears, []
        for ticket, _ in early:
            self._tickets.end(ticket, TierOutcome.UNAVAILABLE, why)

    def _journal_fails(self, why: str) -> None:
        """Empty: no longer."""
        self._read_only = why
        if not why:
            log.info("L2 tier %s: its journal can be written again", self.name, extra={"tier": self.name})
            return
        log.error("L2 tier %s is read-only: %s", self.name, why, extra={"tier": self.name})
        self._tickets.counts.errors += 1
        if self._parts is not None:
            self._parts.puts.give_up(why)

    # ---- requests -------------------------------------------------------------------------------

    def holds(self, namespace: bytes, group: int, keys: bytes) -> int:
        parts = self._readable()
        return parts.records.holds(namespace, group, keys) if parts is not None else 0

    def watch(self, changed: Changed) -> None:
        self._watcher = changed

    def count(self, prefixes: tuple[bytes, ...]) -> int:
        return parts.records.count(prefixes) if (parts := self._readable()) is not None else 0

    def walk(self) -> Iterator[tuple[bytes, int, bytes]]:
        at: int | None = 0
        while at is not None and (parts := self._readable()) is not None:
            at, found = parts.records.walk(at)
            yield from found

    def _changed(self, stored: bool, name: ObjectName) -> None:
        if self._watcher is not None:
            self._watcher(stored, name)

    def probe(
        self, namespace: bytes, group: int, keys: bytes, chain: bool, deadline_ns: int, again: bool = False
    ) -> int:
        return self._tickets.end(self._tickets.number(), TierOutcome.DONE)

    def touch(self, namespace: bytes, group: int, keys: bytes) -> None:
        if (parts := self._readable()) is not None:
            parts.records.touch(namespace, group, keys)

    def put(self, name: ObjectName, memory: ObjectMemory, parent: bytes, deadline_ns: int) -> int:
        ticket, parts = self._tickets.number(), self._parts
        if parts is None or self.state != "ready":
            return self._end_unavailable(ticket)
        parts.puts.begin(ticket, name, memory, parent, deadline_ns)
        parts.records.write_log()
        return ticket

    def get(self, name: ObjectName, memory: ObjectMemory, deadline_ns: int) -> int:
        ticket, parts = self._tickets.number(), self._readable()
        if parts is None:
            return self._end_unavailable(ticket)
        return parts.gets.begin(ticket, name, memory, deadline_ns)

    def _end_unavailable(self, ticket: int) -> int:
        return self._tickets.end(ticket, TierOutcome.UNAVAILABLE, self.failure or "it is opening")

    def drop(self, namespace: bytes, group: int, keys: bytes) -> None:
        if (parts := self._parts) is None:
            return
        names = {ObjectName(namespace, group, keys[at : at + KEY_BYTES]) for at in range(0, len(keys), KEY_BYTES)}
        for name in names:
            parts.records.remove(name)
        parts.puts.drop(names)
        parts.gets.drop(names)
        parts.records.write_log()

    def clear(self, prefix: bytes) -> int:
        ticket = self._tickets.number()
        if self._closed:
            return self._tickets.end(ticket, TierOutcome.UNAVAILABLE, self._closed)
        if self._parts is None:
            self._early_clears.append((ticket, prefix))
        else:
            self._clear(self._parts, ticket, prefix)
        return ticket

    def _clear(self, parts: _Parts, ticket: int, prefix: bytes) -> None:
        parts.records.generations.clear(prefix)
        parts.records.drop_other_generations()
        parts.puts.drop_other_generations()
        parts.clears.begin(ticket)

    def generation(self, namespace: bytes) -> int | None:
        return self._parts.records.generations.of(namespace) if self._parts is not None else None

    def learn_generations(self, namespaces: Sequence[bytes]) -> None:
        """Nothing to do: the opening reads all of them."""

    def cancel(self, ticket: int) -> None:
        if self._parts is None or not self._parts.puts.cancel(ticket):
            self._device.cancel(ticket)

    # ---- ends -----------------------------------------------------------------------------------

    def drain(self) -> Sequence[TierEnd]:
        if (parts := self._parts) is not None:
            for ticket, outcome, moved, nanos, what in self._device.drain():
                if not parts.puts.ended(ticket, outcome, nanos, what, bool(self._closed)):
                    parts.gets.ended(ticket, outcome, moved, nanos, what, bool(self._closed))
        else:
            self._device.drain()  # no ticket of it is open, but its descriptor is readable
        self._worker.finish()
        if (parts := self._parts) is not None:
            # The pages of what was cleared are free only once none of it can come back.
            more = parts.clears.durable and parts.records.sweep()
            parts.puts.start()
            if parts.records.write_log() or more:
                self._device.notify()
        return self._tickets.drain()

    def tick(self, now_ns: int) -> None:
        self._device.expire()
        opening_ns = self._worker.stalled_ns if self._parts is None else 0
        self._stalled = self._stall("a call of the file system", max(self._device.stalled_nanos, opening_ns))
        if (parts := self._parts) is not None:
            self._stalled_journal = self._stall("a call for the journal or the generations", self._worker.stalled_ns)
            parts.puts.expire(now_ns)
            parts.records.try_again(now_ns)
            parts.clears.save()
            self._look_at_paths()
            if parts.records.write_log():
                self._device.notify()

    def _look_at_paths(self) -> None:
        """A folder that was removed, unmounted or replaced is noticed within a second: what is written there is lost at a restart."""
        if not self._looks:
            self._looks = True
            self._worker.run(self._folder.lost, self._looked)

    def _looked(self, lost: str | None, error: Exception | None) -> None:
        lost, self._looks = lost or str(error or ""), False
        if lost and not self._lost:
            log.error("L2 tier %s is unavailable: %s", self.name, lost, extra={"tier": self.name})
        self._lost = lost

    def _stall(self, what: str, nanos: int) -> str:
        late = nanos > self._timeout_ns + int(_STALLED_SECONDS * 1e9)
        return f"{what} has not ended for {nanos * 1e-9:.0f} s" if late else ""

    # ---- the end, status ------------------------------------------------------------------------

    def close(self, deadline_ns: int) -> None:
        """Once. A thread whose call hangs keeps L1 mapped, and the folder locked, until it ends."""
        if self._parts is not None:
            self._parts.records.write_last()
        worker_ended = self._worker.close(deadline_ns)
        self._worker.finish()
        if not self._device.close(max(0, deadline_ns - time.monotonic_ns())) or not worker_ended:
            log.warning(
                "L2 tier %s: a call of the file system has not ended; it keeps its memory until it does", self.name,
                extra={"tier": self.name},
            )  # fmt: skip
        self._closed = self._closed or "the daemon ends"
        if worker_ended:  # else its task uses the folder
            self._folder.close()

    def status(self) -> TierStatus:
        data, records = self._folder.data, self._parts.records if self._parts is not None else None
        return TierStatus(
            name=self.name,
            kind=self.kind,
            url=self.url,
            state=self.state,
            failure=self.failure,
            size_bytes=data.pages * data.page_bytes,
            used_bytes=records.used_bytes if records is not None else 0,
            objects=len(records) if records is not None else 0,
            **vars(self._tickets.counts),
        )
