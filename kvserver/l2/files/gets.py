"""The gets of a file tier: each is verified as a whole against its name, coverage, lengths and generation (`csrc/l2/record.h`).

Owns: the gets under way, and the count of corrupt records in a row.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Set
from dataclasses import dataclass

from kvserver._native import FileDevice, FileOutcome
from kvserver.l2.base import ObjectMemory, ObjectName, TierOutcome
from kvserver.l2.failures import MOST_OBJECTS
from kvserver.l2.files.records import FileRecords, L1Pages, meaning_of
from kvserver.l2.files.tickets import OUTCOMES, FileTickets

log = logging.getLogger(__name__)

_FAILURES_TO_DROP = 2
MOST_CORRUPT = 8  # gets in a row, of records that this process wrote


@dataclass
class _Get:
    ticket: int
    name: ObjectName
    generation: int
    extents: bytes
    recovered: bool
    void: bool = False  # it was dropped meanwhile


class FileGets:
    """Gets under way. REQUIRES: one thread uses it, the tier is open. `failed` gets the reason why the tier should be used no more."""

    def __init__(
        self,
        records: FileRecords,
        device: FileDevice,
        l1: L1Pages,
        tickets: FileTickets,
        failed: Callable[[str], None],
    ) -> None:
        self._records = records
        self._device = device
        self._l1 = l1
        self._tickets = tickets
        self._failed = failed
        self._running: dict[int, _Get] = {}
        self._corrupt_in_a_row = 0

    def begin(self, ticket: int, name: ObjectName, memory: ObjectMemory, deadline_ns: int) -> int:
        found = self._records.find(name)
        if found is None or found.meaning != meaning_of(memory):
            self._tickets.counts.misses += 1
            return self._tickets.end(ticket, TierOutcome.MISSING)
        generation = self._records.generation_of(name)
        self._device.submit(ticket, False, [self._l1.record(name, memory, generation)], found.extents, deadline_ns)
        self._running[ticket] = _Get(ticket, name, generation, found.extents, found.recovered)
        self._records.pin(found.extents)
        return ticket

    def ended(self, ticket: int, outcome: FileOutcome, moved: int, nanos: int, what: str, closed: bool) -> None:
        """`closed`: the tier is."""
        get, tickets = self._running.pop(ticket), self._tickets
        self._records.unpin(get.extents)
        if get.void or get.generation != self._records.generation_of(get.name) or closed:
            tickets.end(ticket, TierOutcome.CANCELLED, "the object was dropped meanwhile", nanos=nanos)
            return
        if outcome is FileOutcome.DONE:
            self._corrupt_in_a_row = 0
            self._records.failures.forget(get.name)
            tickets.counts.hits += 1
            tickets.counts.read_bytes += moved
        elif OUTCOMES[outcome] is TierOutcome.CORRUPT:
            self._found_corrupt(get, what)
        else:
            tickets.counts.add_failure(outcome is FileOutcome.LATE, outcome is FileOutcome.FAILED, of_get=True)
            if outcome is FileOutcome.FAILED:
                self._failed_to_read(get, what)
        tickets.end(ticket, OUTCOMES[outcome], what, moved if outcome is FileOutcome.DONE else 0, nanos)

    def _failed_to_read(self, get: _Get, what: str) -> None:
        """The disk failed at this object: it is not promised for a while, and once it failed twice not at all."""
        failures = self._records.failures.note(get.name, time.monotonic_ns())
        found = self._records.find(get.name)
        if found is None or found.extents != get.extents or not self._records.writable:
            return
        if len(self._records.unreadable) < MOST_OBJECTS:
            self._records.unreadable.add(get.extents)
        if failures >= _FAILURES_TO_DROP:
            self._log("L2 tier %s: an object cannot be read and is dropped: %s", what)
            self._records.give_up(get.name)

    def _log(self, text: str, what: str) -> None:
        log.warning(text, self._tickets.tier, what, extra={"tier": self._tickets.tier})

    def _found_corrupt(self, get: _Get, what: str) -> None:
        self._tickets.counts.corrupt += 1
        self._log("L2 tier %s: an object is corrupt and is dropped: %s", what)
        found = self._records.find(get.name)
        if found is not None and found.extents == get.extents:
            self._records.remove(get.name)
        if get.recovered:  # after a loss of power these are expected: nothing was fsynced
            return
        self._corrupt_in_a_row += 1
        if self._corrupt_in_a_row >= MOST_CORRUPT:
            self._failed(f"{MOST_CORRUPT} objects in a row were corrupt; the last one: {what}")

    def drop(self, names: Set[ObjectName]) -> None:
        for get in self._running.values():
            get.void |= get.name in names
