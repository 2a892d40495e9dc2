"""Tickets: the copies in flight, and their completions.

Owns: ticket numbers and the table of open tickets. Refuses to know: what follows from a completion; the handlers
decide that. Native devices move the bytes (`csrc/copy/device.h` is their contract), never under the GIL.

A ticket ends exactly once, by a completion that the loop's thread drains.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kvserver._native import Device, Mapping, Outcome
from kvserver.copy.devices import Devices


@dataclass(frozen=True, slots=True)
class Completion:
    """End of a ticket: outcome, bytes moved, nanoseconds from its first byte on, and the reason of a failure."""

    number: int
    outcome: Outcome
    bytes: int
    nanos: int
    what: str

    @property
    def done(self) -> bool:
        return self.outcome == Outcome.DONE


T = TypeVar("T")


class Tickets(Generic[T]):
    """Open tickets of all devices. `T` is the caller's value for a ticket, returned with its completion."""

    def __init__(self, devices: Devices) -> None:
        self.devices = devices
        self._open: dict[int, tuple[Device, T]] = {}
        self._next = 0

    @property
    def completion_fds(self) -> list[int]:
        return [device.completion_fd for device in self.devices.all]

    @property
    def open_tickets(self) -> int:
        return len(self._open)

    def queue_copy(self, device: Device, ticket: T, **job: Any) -> int:
        """Queue a copy; see `csrc/copy/device.h` for the arguments. Returns the ticket's number."""
        number = self._number(device, ticket)
        try:
            device.submit_copy(ticket=number, **job)
        except BaseException:
            del self._open[number]
            raise
        return number

    def queue_map(self, device: Device, ticket: T, mappings: list[Mapping]) -> int:
        number = self._number(device, ticket)
        device.submit_map(number, mappings)
        return number

    def queue_unmap(self, device: Device, ticket: T, mappings: list[Mapping]) -> int:
        number = self._number(device, ticket)
        device.submit_unmap(number, mappings)
        return number

    def cancel_copy(self, number: int) -> None:
        """End the copy at its next block; its completion still follows."""
        device, _ = self._open[number]
        device.cancel(number)

    def drain_completions(self) -> Iterator[tuple[T, Completion]]:
        for device in self.devices.all:
            for number, outcome, moved, nanos, what in device.drain():
                _, ticket = self._open.pop(number)
                yield ticket, Completion(number, outcome, moved, nanos, what)

    def drain_parts(self) -> Iterator[tuple[T, int]]:
        """Stores whose first slots count while others are copied, and the number of these. Drain completions first."""
        for device in self.devices.all:
            for number, slots in device.drain_parts():
                if number in self._open:
                    yield self._open[number][1], slots

    def _number(self, device: Device, ticket: T) -> int:
        self._next += 1
        self._open[self._next] = (device, ticket)
        return self._next
