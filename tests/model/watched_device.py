"""The native fake device, and a note of each copy that the server requested."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from support.memory import Memory
from support.simulators import FakeDevice
from support.turns import repeat

from kvserver import _native
from kvserver._native import BlockIds, Direction, Mapping, Outcome, WordPage


@dataclass
class Side:
    """What the device may touch of one worker: the same memory that the server maps."""

    memory: Memory
    words: WordPage


@dataclass
class Copy:
    ticket: int
    direction: Direction
    side: Side
    blocks: list[int]  # of each position one of each member
    cancelled: bool = False


class WatchedDevice(FakeDevice):
    """REQUIRES: expect(side) before the worker of that side registers."""

    def __init__(self, l1_bytes: int, page_bytes: int, seed: int, trouble: float) -> None:
        self.region = _native.HostRegion(l1_bytes)
        super().__init__(self.region, page_bytes, seed, trouble)
        self.newest: Copy | None = None
        self.runs = False  # by itself: all has ended when it is drained
        self.drained: list[tuple[int, Outcome]] = []  # by the last drain()
        self.parts: list[tuple[int, int]] = []  # by the last drain_parts(): ticket, slots
        self._copies: dict[int, Copy] = {}
        self._expected: deque[Side] = deque()
        self._sides: dict[Mapping, Side] = {}  # by the word page

    def expect(self, side: Side) -> None:
        """The next map is this side's."""
        self._expected.append(side)

    def copies_of(self, side: Side) -> list[Copy]:
        """Those that have not ended."""
        still_open = set(self.open)
        return [copy for number, copy in self._copies.items() if copy.side is side and number in still_open]

    # ---- what the server calls ----------------------------------------------------------------

    def submit_map(self, ticket: int, mappings: list[Mapping]) -> None:
        self._sides[mappings[-1]] = self._expected.popleft()
        super().submit_map(ticket, mappings)

    def submit_unmap(self, ticket: int, mappings: list[Mapping]) -> None:
        del self._sides[mappings[-1]]
        super().submit_unmap(ticket, mappings)

    def submit_copy(self, ticket: int, blocks: BlockIds, **job: Any) -> None:  # type: ignore[override]
        super().submit_copy(ticket, blocks, **job)
        self.newest = Copy(ticket, blocks.direction, self._sides[job["word_memory"]], list(self.newest_blocks))
        self._copies[ticket] = self.newest

    def cancel(self, ticket: int) -> None:
        super().cancel(ticket)
        if ticket in self._copies:
            self._copies[ticket].cancelled = True

    def drain(self) -> list[tuple[int, Outcome, int, int, str]]:
        if self.runs:
            repeat(lambda: self.step() or bool(self.open))
        ends = super().drain()
        self.drained = [(number, outcome) for number, outcome, *_ in ends]
        for number, _ in self.drained:
            self._copies.pop(number, None)
        return ends

    def drain_parts(self) -> list[tuple[int, int]]:
        self.parts = super().drain_parts()
        return self.parts
