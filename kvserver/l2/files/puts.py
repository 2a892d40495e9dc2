"""Puts of a file tier: each waits for space, is written, and enters the index.

A put writes to pages that no record in the index or in the journal has. Writes end in any order. A record enters the index behind
its parent, for it would not be found without it.

Units. Small puts wait for the end of the loop's turn. Then neighbours of a chain share a unit: one ticket of the device, one entry
of the journal, and what a unit of the index shares. No put waits longer for a neighbour. Each has its own ticket and outcome.

Owns: the puts that wait and the units that are being written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Set
from dataclasses import dataclass, field
from itertools import islice

from kvserver._native import MOST_IN_UNIT, FileDevice, FileOutcome, Record, part_of_extents
from kvserver.l2.base import ObjectMemory, ObjectName, TierOutcome
from kvserver.l2.files.records import FileRecords, L1Pages, meaning_of
from kvserver.l2.files.tickets import OUTCOMES, FileTickets

UNIT_BYTES = 4 << 20  # a unit has no more, but for a single larger record
_PARTS = 16  # of the tier: a unit has one at most, so that small tiers keep what others use


@dataclass(eq=False)
class _Put:
    ticket: int
    name: ObjectName
    generation: int
    meaning: int
    parent: bytes
    record: Record
    pages: int
    deadline_ns: int
    void: bool = False  # it was dropped or cancelled meanwhile

    def follows(self, last: _Put) -> bool:
        """True if it can share a unit with its neighbour."""
        return (
            self.parent == last.name.key
            and self.meaning == last.meaning
            and self.generation == last.generation
            and self.name[:2] == last.name[:2]
        )


@dataclass(eq=False)
class _Unit:
    """Puts that are written together. Its device's ticket is that of the first one."""

    puts: list[_Put]
    extents: bytes
    before: _Unit | None = None  # has the first one's parent, and has not entered the index
    behind: list[_Unit] = field(default_factory=list)
    end: tuple[FileOutcome, int, str] | None = None  # of its write: how, nanoseconds, and why not

    @property
    def written(self) -> bool:
        return self.end is not None and self.end[0] is FileOutcome.DONE

    def extents_of(self, place: int) -> bytes:
        pages = self.puts[0].pages
        return part_of_extents(self.extents, place * pages, pages)


class FilePuts:
    """Puts under way. REQUIRES: one thread uses it, the tier is open and writable."""

    def __init__(self, records: FileRecords, device: FileDevice, l1: L1Pages, tickets: FileTickets) -> None:
        self._records = records
        self._device = device
        self._l1 = l1
        self._tickets = tickets
        self._waiting: deque[_Put] = deque()  # for the end of the turn, or for space
        self._running: dict[int, _Unit] = {}  # until they enter the index; some are written and wait for their parent
        self._unit_of: dict[ObjectName, _Unit] = {}  # of these, the last one with that name

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
        if self._most_in_unit(pages) == 1:
            self.start()
        elif len(self._waiting) == 1:
            self._device.notify()  # the next turn begins with start()
        return ticket

    def start(self) -> None:
        """Write those that there is space for."""
        while self._waiting and self._records.writable:
            puts = self._neighbours()
            extents = self._room_for(puts)
            if extents is None and len(puts) > 1:
                puts = puts[:1]
                extents = self._room_for(puts)
            if extents is None:
                self._tickets.end_full(self._waiting.popleft().ticket)
                continue
            if not extents:
                return
            for _ in puts:
                self._waiting.popleft()
            self._write(_Unit(puts, extents, self._unit_of.get(puts[0].name._replace(key=puts[0].parent))))

    def _room_for(self, puts: list[_Put]) -> bytes | None:
        """Extents for these; b"" while they are made free; None if they never will be."""
        pool, pages = self._records.pool, len(puts) * puts[0].pages
        if (extents := self._records.allocate(pages)) is not None:
            return extents
        waiting = min(sum(each.pages for each in self._waiting), pool.pages // 2)  # a small tier keeps some
        possible, evictions = self._records.make_room(pages, max(pages, waiting))
        self._tickets.counts.evictions += evictions
        return b"" if possible or self._running else None  # what is being written can be evicted after its end

    def _most_in_unit(self, pages: int) -> int:
        pool = self._records.pool
        most = min(UNIT_BYTES // pool.page_bytes, pool.pages // _PARTS) // pages
        return max(1, min(most, MOST_IN_UNIT)) if self._records.takes_units else 1

    def _neighbours(self) -> list[_Put]:
        """The first put that waits, and those behind it that share its unit."""
        puts = [self._waiting[0]]
        for put in islice(self._waiting, 1, self._most_in_unit(puts[0].pages)):
            if not put.follows(puts[-1]) or any(put.name.key == each.name.key for each in puts):
                break
            puts.append(put)
        return puts

    def _write(self, unit: _Unit) -> None:
        first = unit.puts[0]
        self._running[first.ticket] = unit
        self._unit_of.update(dict.fromkeys([put.name for put in unit.puts], unit))
        if unit.before is not None:
            unit.before.behind.append(unit)
        deadlines = [put.deadline_ns for put in unit.puts]
        deadline_ns = 0 if 0 in deadlines else max(deadlines)  # of its begin: one late put does not end the others
        self._device.submit(first.ticket, True, [put.record for put in unit.puts], unit.extents, deadline_ns)

    def ended(self, ticket: int, outcome: FileOutcome, nanos: int, what: str, closed: bool) -> bool:
        """False if it is the ticket of no put. `closed`: the tier is."""
        unit = self._running.get(ticket)
        if unit is None:
            return False
        unit.end = outcome, nanos, what
        ready = [unit]
        while ready:
            unit = ready.pop()
            if unit.end is None or (unit.written and unit.before is not None):
                continue
            if unit.before is not None:
                unit.before.behind.remove(unit)
            self._ended(unit, *unit.end, closed)
            for each in unit.behind:
                each.before = None
            ready += reversed(unit.behind)
        return True

    def _ended(self, unit: _Unit, outcome: FileOutcome, nanos: int, what: str, closed: bool) -> None:
        tickets, records = self._tickets, self._records
        del self._running[unit.puts[0].ticket]
        for put in unit.puts:
            if self._unit_of.get(put.name) is unit:
                del self._unit_of[put.name]
        good = [unit.written and not put.void and self._is_current(put) and not closed for put in unit.puts]
        for place, put in enumerate(unit.puts):
            if not good[place]:
                records.pool.free_pages(unit.extents_of(place))  # no journal has had them
                self._end_without_record(put, outcome, nanos, what)
        if not any(good):
            return
        puts = [put for place, put in enumerate(unit.puts) if good[place]]
        extents = unit.extents
        if len(puts) < len(unit.puts):
            extents = b"".join([unit.extents_of(place) for place, stays in enumerate(good) if stays])
        records.add([put.name for put in puts], puts[0].parent, puts[0].meaning, extents)
        for put in puts:
            tickets.counts.written_objects += 1
            tickets.counts.written_bytes += put.record.bytes
            tickets.end(put.ticket, TierOutcome.DONE, bytes=put.record.bytes, nanos=nanos)

    def _end_without_record(self, put: _Put, outcome: FileOutcome, nanos: int, what: str) -> None:
        tickets = self._tickets
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
        for put in (*[put for unit in self._running.values() for put in unit.puts], *self._waiting):
            put.void |= put.name in names

    def drop_other_generations(self) -> None:
        self._end_waiting([put for put in self._waiting if not self._is_current(put)], TierOutcome.CANCELLED)

    def cancel(self, ticket: int) -> bool:
        """False if it is the ticket of no put. One that shares a unit ends with it, unless all are cancelled."""
        if waits := [put for put in self._waiting if put.ticket == ticket]:
            self._end_waiting(waits, TierOutcome.CANCELLED)
            return True
        for device_ticket, unit in self._running.items():
            if put := next((put for put in unit.puts if put.ticket == ticket), None):
                put.void |= len(unit.puts) > 1
                if len(unit.puts) == 1 or all(put.void for put in unit.puts):
                    self._device.cancel(device_ticket)
                return True
        return False

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
