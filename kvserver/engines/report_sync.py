"""Completeness of one instance's reports: whether they state all that its block pools did.

Owns: their source and sequence, what is lost of them, and the pools whose full state is missing. Refuses to know: what reports
contain.
"""

from __future__ import annotations

from kvserver.protocol import ErrorCode, KVServerError

MAX_POOLS = 64  # of one instance
_DEMAND_SECONDS = 1.0  # between two demands for a full state: each ends block lifetimes, and the bus needs time


class ReportSync:
    def __init__(self) -> None:
        self.source = ""  # "exact" or "reported", once the instance has reported
        self.refused = 0  # reports of the other source
        self.gap = False  # reports were lost since the last event that was published
        self._next_sequence: int | None = None  # of ReportBlockAllocations and EndRequest
        self._pools: dict[int, bool] = {}  # those reported: whether the full state has arrived since the last loss
        self._demand_after = 0.0

    @property
    def in_sync(self) -> bool:
        return all(self._pools.values())

    def check(self, source: str, pool: int) -> None:
        """KVServerError(BAD_RECORDS) if the instance cannot send such a report after those that it has sent."""
        if self.source not in ("", source):
            self.refused += 1
            raise KVServerError(
                ErrorCode.BAD_RECORDS, f"the instance sent {self.source} records before; these are {source}"
            )
        if pool not in self._pools and len(self._pools) >= MAX_POOLS:
            raise KVServerError(ErrorCode.BAD_RECORDS, f"more than {MAX_POOLS} block pools")

    def receive(self, sequence: int) -> bool:
        """Count a message; True if messages before it are missing."""
        missing = self._next_sequence not in (None, sequence)
        self._next_sequence = sequence + 1
        if missing:
            self.lose()
            self._demand_after = 0.0
        return missing

    def add_report(self, source: str, pool: int, full: bool, now: float) -> None:
        """REQUIRES: check()."""
        self.source = source
        self._pools[pool] = full or self._pools.get(pool, False)
        if full:
            self._demand_after = now + _DEMAND_SECONDS

    def lose(self) -> None:
        """Reports are lost: the next event states it."""
        self.gap = True
        self.lose_states()

    def lose_states(self) -> None:
        """The state of no pool is known: full states are needed."""
        self._pools = dict.fromkeys(self._pools, False)

    def demands(self, now: float) -> bool:
        """True if the full state is to be requested with this report. Rare, except at a gap."""
        due = not self.in_sync and now >= self._demand_after
        if due:
            self._demand_after = now + _DEMAND_SECONDS
        return due
