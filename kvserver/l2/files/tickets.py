"""The tickets of a file tier: their numbers, their ends until drain() returns them, and what is counted of them.

Owns: these, and which outcome of the device is which of the tier. Refuses to know: what a ticket moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvserver._native import FileOutcome
from kvserver.l2.base import TierCounts, TierEnd, TierOutcome

OUTCOMES = {
    FileOutcome.DONE: TierOutcome.DONE,
    FileOutcome.OTHER: TierOutcome.CORRUPT,  # the index has another one than the file
    FileOutcome.CORRUPT: TierOutcome.CORRUPT,
    FileOutcome.FULL: TierOutcome.FULL,
    FileOutcome.LATE: TierOutcome.TIMEOUT,
    FileOutcome.FAILED: TierOutcome.UNAVAILABLE,
    FileOutcome.CANCELLED: TierOutcome.CANCELLED,
}


class FileTickets:
    """Open and ended tickets. REQUIRES: one thread uses it. `notify` makes the loop call drain()."""

    def __init__(self, tier: str, notify: Callable[[], None]) -> None:
        self.tier = tier  # its name
        self.counts = TierCounts()
        self._notify = notify
        self._last = 0
        self._ends: list[TierEnd] = []

    def number(self) -> int:
        self._last += 1
        return self._last

    def end(self, ticket: int, outcome: TierOutcome, what: str = "", bytes: int = 0, nanos: int = 0) -> int:
        self._ends.append(TierEnd(ticket, outcome, bytes, nanos, what))
        self._notify()
        return ticket

    def end_full(self, ticket: int, what: str = "") -> int:
        self.counts.full += 1
        return self.end(ticket, TierOutcome.FULL, what)

    def drain(self) -> Sequence[TierEnd]:
        ends, self._ends = self._ends, []
        return ends
