"""Puts of a file tier: each waits for space, is written, and enters the index.

A put writes to pages that no record in the index or in the journal has. Writes end in any order. A record enters the index behind
its parent, for it would not be found without it.

Owns: the puts that wait and those that are being written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Set
from dataclasses import dataclass

from kvserver._native import FileDevice, FileOutcome, Record
from kvserver.l2.base import ObjectMemory, ObjectName, TierOutcome
from kvserver.l2.files.records import FileRecords, L1Pages, meaning_of
from kvserver.l2.files.tickets import OUTCOMES, FileTickets


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
    end: tuple[FileOutcome, int, str] | None = None  # of its write: how, nanoseconds, and why not


class FilePuts:
    """Puts under way. REQUIRES: one thread uses it, the tier is open and writable."""

    def __init__(self, records: FileRecords, device: FileDevice, l1: L1Pages, tickets: FileTickets) -> None:
        self._records = records
        self._device = device
        self._l1 = l1
        self._tickets = tickets
        self._waiting: deque[_Put] = deque()  # for space
        self._running: dict[int, _Put] = {}  # in the order of their begin; some are written and wait for their parent

    def begin(self, ticket: int, name: ObjectName, memory: ObjectMemory, parent: bytes, deadline_ns: int) -> int:
        records, meaning = self._records, meaning_of(memory)
        found = records.find(name)
        if found is not None:
            if found.extents in records.unreadable:
                records.give_up(name)
            elif found.meaning == meaning:
                records.touch(name.namespace, name.group, name.key)
                return self._tickets.end(ticket, TierOutcome.DONE)
            else:
                records.remove(name)
        generation = records.generation_of(name)
        record = self._l1.record(name, memory, generation)
        pages = records.pages_for(record)
        if not records.can_have(pages):
            return self._tickets.end_full(ticket)
        self._waiting.append(_Put(ticket, name, generation, meaning, parent, record, pages, deadline_ns))
        self.start()
        return ticket

    def start(self) -> None:
        """Write those that there is space for."""
        while self._waiting and self._records.writable:
            put = self._waiting[0]
            extents = self._records.allocate(put.pages)
            if extents is None:
                possible, evictions = self._records.make_room(put.pages, sum(each.pages for each in self._waiting))
                self._tickets.counts.evictions += evictions
                if possible:
                    return
                self._waiting.popleft()
                self._tickets.end_full(put.ticket)
                continue
            self._waiting.popleft()
            put.extents = extents
            self._running[put.ticket] = put
            self._device.submit(put.ticket, True, put.record, extents, put.deadline_ns)

    def ended(self, ticket: int, outcome: FileOutcome, nanos: int, what: str, closed: bool) -> bool:
        """False if it is the ticket of no put. `closed`: the tier is."""
        if ticket not in self._running:
            return False
        self._running[ticket].end = outcome, nanos, what
        unended: set[ObjectName] = set()
        for put in list(self._running.values()):
            written = put.end is not None and put.end[0] is FileOutcome.DONE
            if put.end is None or (written and put.name._replace(key=put.parent) in unended):
                unended.add(put.name)
            else:
                del self._running[put.ticket]
                self._ended(put, *put.end, closed)
        return True

    def _ended(self, put: _Put, outcome: FileOutcome, nanos: int, what: str, closed: bool) -> None:
        tickets = self._tickets
        if outcome is FileOutcome.DONE and not put.void and self._is_current(put) and not closed:
            tickets.counts.written_objects += 1
            tickets.counts.written_bytes += put.record.bytes
            self._records.add(put.name, put.parent, put.meaning, put.extents)
            tickets.end(put.ticket, TierOutcome.DONE, bytes=put.record.bytes, nanos=nanos)
            return
        self._records.pool.free_pages(put.extents)  # no journal has had them
        if outcome is FileOutcome.DONE:
            tickets.end(put.ticket, TierOutcome.CANCELLED, "the object was dropped meanwhile")
        elif outcome is FileOutcome.FULL:
            tickets.end_full(put.ticket, what)
        else:
            tickets.counts.add_failure(outcome is FileOutcome.LATE, outcome is FileOutcome.FAILED, of_get=False)
            tickets.end(put.ticket, OUTCOMES[outcome], what, nanos=nanos)

    def _is_current(self, put: _Put) -> bool:
        return put.generation == self._records.generation_of(put.name)

    # ---- ends before the write ------------------------------------------------------------------

    def drop(self, names: Set[ObjectName]) -> None:
        for put in (*self._running.values(), *self._waiting):
            put.void |= put.name in names

    def drop_other_generations(self) -> None:
        self._end_waiting([put for put in self._waiting if not self._is_current(put)], TierOutcome.CANCELLED)

    def cancel(self, ticket: int) -> bool:
        """False if it does not wait for space."""
        found = [put for put in self._waiting if put.ticket == ticket]
        self._end_waiting(found, TierOutcome.CANCELLED)
        return bool(found)

    def expire(self, now_ns: int) -> None:
        late = [put for put in self._waiting if put.deadline_ns and put.deadline_ns < now_ns]
        self._tickets.counts.timeouts += len(late)
        self._end_waiting(late, TierOutcome.TIMEOUT, "no space was free before its deadline")

    def give_up(self, why: str) -> None:
        """End all waiting puts: nothing more will be written."""
        self._end_waiting(list(self._waiting), TierOutcome.UNAVAILABLE, why)

    def _end_waiting(self, puts: list[_Put], outcome: TierOutcome, why: str = "") -> None:
        for put in puts:
            self._waiting.remove(put)
            self._tickets.end(put.ticket, outcome, why)
