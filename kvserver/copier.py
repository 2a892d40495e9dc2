"""Tickets: copies in flight, and how their end comes back to the loop.

Owns: ticket numbers and the table of open tickets. Refuses to know: what a ticket's end means; the
handlers decide that. The bytes are moved by a native device (`csrc/core.h` is its contract), never under
the GIL.

A ticket ends exactly once, by a completion drained in the loop thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kvserver import _native
from kvserver._native import NO_BLOCK, Device, Direction, HostRegion, Mapping, Outcome, PlaneTable
from kvserver.placement import Placement

__all__ = ["NO_BLOCK", "Completion", "Copier", "Device", "Direction", "HostRegion", "Mapping", "Outcome", "PlaneTable"]


@dataclass(frozen=True, slots=True)
class Completion:
    """How a ticket ended: bytes moved, nanoseconds from its first byte, and why if it failed."""

    number: int
    outcome: Outcome
    bytes: int
    nanos: int
    what: str

    @property
    def done(self) -> bool:
        return self.outcome == Outcome.DONE


T = TypeVar("T")


class Copier(Generic[T]):
    """Open tickets of one device. `T` is what the caller wants back when a ticket ends."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._open: dict[int, T] = {}
        self._next = 0

    @property
    def completion_fd(self) -> int:
        return self.device.completion_fd

    @property
    def lost(self) -> str:
        """Why no copy can succeed any more; empty while it can."""
        return self.device.lost

    @property
    def open_tickets(self) -> int:
        return len(self._open)

    def copy(self, ticket: T, direction: Direction, planes: PlaneTable, **job: Any) -> int:
        """Queue a copy; see `csrc/core.h` for the arguments. Returns the ticket's number."""
        number = self._number(ticket)
        try:
            self.device.submit_copy(ticket=number, direction=direction, planes=planes, **job)
        except BaseException:
            del self._open[number]
            raise
        return number

    def map(self, ticket: T, mappings: list[Mapping]) -> int:
        number = self._number(ticket)
        self.device.submit_map(number, mappings)
        return number

    def unmap(self, ticket: T, mappings: list[Mapping]) -> int:
        number = self._number(ticket)
        self.device.submit_unmap(number, mappings)
        return number

    def cancel(self, number: int) -> None:
        """End it at its next block; its completion still comes."""
        self.device.cancel(number)

    def drain(self) -> Iterator[tuple[T, Completion]]:
        for number, outcome, moved, nanos, what in self.device.drain():
            yield self._open.pop(number), Completion(number, outcome, moved, nanos, what)

    def _number(self, ticket: T) -> int:
        self._next += 1
        self._open[self._next] = ticket
        return self._next


def l1_region(size: int, placement: Placement) -> HostRegion:
    """L1 memory. RuntimeError if it cannot be had; that the nodes are not heeded is no error: see `numa_error`."""
    return HostRegion(size, placement.huge_page_bytes, placement.transparent, list(placement.nodes), placement.bound)


def cpu_device(region: HostRegion, page_bytes: int, threads: int, delay_micros: int) -> Device:
    """The threads that copy to and from L1."""
    return _native.Copier(region, page_bytes, threads, delay_micros)
