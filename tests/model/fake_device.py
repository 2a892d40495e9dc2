"""A device whose copies move one block when the test says so, and end in any order and any way.

It keeps the contract of `csrc/core.h` to the letter and to its limits: it looks at a cancel only now
and then, finishes jobs out of order, reports ends late, and fails when it likes. What it is asked to
do is checked against the rules that the caller must keep.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from dataclasses import dataclass

from support.slots import pages_of
from support.worker import Memory

from kvserver import _native
from kvserver._native import NO_BLOCK, Direction, Mapping, Outcome, PlaneTable, State, WordPage


@dataclass
class Side:
    """What the device may touch of one worker: the same memory that the server maps."""

    memory: Memory
    words: WordPage
    mappings: list[Mapping]
    mapped: bool = False


@dataclass
class Copy:
    """One job and how far it came."""

    ticket: int
    direction: Direction
    side: Side
    blocks: list[tuple[int, ...]]  # one of each group for each position
    places: list[int]  # L1 address of every byte of every position, one after the other
    pages: list[int]
    word: int
    sequence: int
    moved: int = 0
    running: bool = False
    stop: bool = False


class FakeDevice:
    """Implements kvserver.copier.Device. REQUIRES: expect(side) before the worker of that side registers."""

    def __init__(self, l1_bytes: int, page_bytes: int, rng: random.Random, trouble: float) -> None:
        self.page_bytes = page_bytes
        self.l1 = bytearray(rng.randbytes(l1_bytes))
        self.open: dict[int, Copy] = {}
        self.newest: Copy | None = None
        self.drained: list[tuple[int, Outcome]] = []  # by the last drain()
        self._rng = rng
        self._trouble = trouble  # how often a step fails
        self._mapper = _native.Copier(_native.HostRegion(4096), 4096, 1)  # maps for real
        self._expected: deque[Side] = deque()
        self._sides: dict[int, Side] = {}
        self._ends: list[tuple[int, Outcome, int, int, str]] = []

    # ---- what the server calls ----------------------------------------------------------------

    @property
    def completion_fd(self) -> int:
        return self._mapper.completion_fd

    def submit_map(self, ticket: int, mappings: list[Mapping]) -> None:
        side = self._expected.popleft()
        side.mappings = mappings
        self._mapper.submit_map(ticket, mappings)
        self._wait_for_mapper()
        side.mapped = self._ends[-1][1] == Outcome.DONE
        self._sides[id(mappings[-1])] = side

    def submit_unmap(self, ticket: int, mappings: list[Mapping]) -> None:
        side = self._sides.pop(id(mappings[-1]))
        assert not any(job.side is side for job in self.open.values()), "unmapped under a copy"
        side.mapped = False
        self._mapper.submit_unmap(ticket, mappings)
        self._wait_for_mapper()

    def submit_copy(
        self,
        ticket: int,
        direction: Direction,
        planes: PlaneTable,
        blocks: bytes,
        extents: bytes,
        pages_per_slot: int,
        blocks_per_slot: int,
        skip: int = 0,
        word_memory: Mapping | None = None,
        word_index: int = 0,
        sequence: int = 0,
        deadline_nanos: int = 0,
    ) -> None:
        side = self._sides[id(word_memory)]
        assert side.mapped, "a copy of memory that is not mapped"
        ids, page_list = array("I", blocks), pages_of(extents)
        named = [id for id in ids if id != NO_BLOCK]
        assert named, "a copy of nothing"
        assert len(set(named)) == len(named), "a block is named twice"
        assert max(named) < planes.num_blocks
        assert len(ids) % planes.groups == 0
        assert len(named) == len(ids) or (direction == Direction.LOAD and planes.groups > 1), "a hole in a store"
        block_list = list(zip(*(ids[group :: planes.groups] for group in range(planes.groups)), strict=True))
        assert len(page_list) % pages_per_slot == 0
        assert (max(page_list) + 1) * self.page_bytes <= len(self.l1)
        if direction == Direction.STORE:
            assert len(set(page_list)) == len(page_list), "a page is in two slots of one store"
        for other in self.open.values():
            both_read = direction == other.direction == Direction.LOAD
            assert both_read or not set(page_list) & set(other.pages), "a page under a copy was given away"
        size = planes.block_bytes
        places: list[int] = []
        for position in range(skip, skip + len(block_list)):
            slot, inner = divmod(position, blocks_per_slot)
            for offset in range(inner * size, (inner + 1) * size):
                page = page_list[slot * pages_per_slot + offset // self.page_bytes]
                assert offset // self.page_bytes < pages_per_slot
                places.append(page * self.page_bytes + offset % self.page_bytes)
        self.newest = Copy(ticket, direction, side, block_list, places, page_list, word_index, sequence)
        self.open[ticket] = self.newest

    def cancel(self, ticket: int) -> None:
        if ticket in self.open:
            self.open[ticket].stop = True

    def drain(self) -> list[tuple[int, Outcome, int, int, str]]:
        self._rng.shuffle(self._ends)
        keep = self._rng.choice([0, 0, 0, 1, 2])  # some are heard of later
        ends, self._ends = self._ends[keep:], self._ends[:keep]
        self.drained = [(end[0], end[1]) for end in ends]
        return ends

    # ---- what the test calls ------------------------------------------------------------------

    def expect(self, side: Side) -> None:
        """The next map is this side's."""
        self._expected.append(side)

    def step(self) -> None:
        """Some copy comes some way, or to an end."""
        if not self.open:
            return
        job = self.open[self._rng.choice(list(self.open))]
        if not job.running:
            self._begin(job)
            return
        for _ in range(self._rng.randint(1, 4)):
            looks = self._rng.random() < 0.5
            if looks and (job.stop or job.side.words.state(job.word) != State.RUNNING):
                self._finish(job, Outcome.CANCELLED)
                return
            if job.moved == len(job.blocks):
                self._finish(job, Outcome.DONE)
                return
            self._move_block(job)
            if self._rng.random() < self._trouble:
                self._finish(job, self._rng.choice([Outcome.FAILED, Outcome.MEMORY_LOST]))
                return

    def finish_everything(self) -> None:
        while self.open:
            self.step()

    @property
    def idle(self) -> bool:
        return not self.open and not self._ends

    # ---- inside -------------------------------------------------------------------------------

    def _begin(self, job: Copy) -> None:
        move = job.side.words.move
        late = self._rng.random() < self._trouble
        if not late and not job.stop and move(job.word, job.sequence, State.PENDING, State.RUNNING):
            job.running = True
            return
        move(job.word, job.sequence, State.PENDING, State.FAILED)
        self._end(job, Outcome.LATE if late else Outcome.CANCELLED)

    def _move_block(self, job: Copy) -> None:
        size = job.side.memory.geometry.block_bytes
        block = job.blocks[job.moved]
        places = job.places[job.moved * size : (job.moved + 1) * size]
        if job.direction == Direction.STORE:
            for place, byte in zip(places, job.side.memory.read(block), strict=True):
                self.l1[place] = byte
        else:
            job.side.memory.write(block, bytes(self.l1[place] for place in places))
        job.moved += 1

    def _finish(self, job: Copy, outcome: Outcome) -> None:
        move = job.side.words.move
        whole = outcome == Outcome.DONE and not job.stop
        if whole and move(job.word, job.sequence, State.RUNNING, State.DONE):
            self._end(job, Outcome.DONE)
            return
        if not move(job.word, job.sequence, State.CANCELLING, State.CANCELLED):
            move(job.word, job.sequence, State.RUNNING, State.FAILED)
        self._end(job, Outcome.CANCELLED if outcome == Outcome.DONE else outcome)

    def _end(self, job: Copy, outcome: Outcome) -> None:
        del self.open[job.ticket]
        size = job.side.memory.geometry.block_bytes
        what = "" if outcome == Outcome.DONE else "the test made it so"
        self._ends.append((job.ticket, outcome, job.moved * size, 1, what))

    def _wait_for_mapper(self) -> None:
        ends: list[tuple[int, Outcome, int, int, str]] = []
        while not ends:
            ends = self._mapper.drain()
        self._ends += ends
