"""L1 and its device under test, engines' memory mapped into it, and the reference they are compared with."""

from __future__ import annotations

import functools
import os
import select
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from support.daemon import wait_until
from support.memory import Geometry, Memory, Piece, SharedMemory
from support.simulators import FakeDevice, slow_cpu
from support.slots import slot_of
from support.worker import packed

from kvserver._native import (
    NO_BLOCK,
    BlockIds,
    CpuDevice,
    Direction,
    FileMapping,
    Gpu,
    GpuDevice,
    GpuMapping,
    HostRegion,
    Mapping,
    Outcome,
    Pinner,
    PlaneTable,
    Way,
    WordMapping,
    WordPage,
)
from kvserver.protocol import Plane

WORDS = 64


@dataclass(frozen=True)
class End:
    """How a ticket ended."""

    ticket: int
    outcome: Outcome
    bytes: int
    nanos: int
    what: str


class L0:
    """Memory of a made-up engine and its state words; `table` once it was mapped."""

    def __init__(self, device: Device, geometry: Geometry) -> None:
        self.geometry = geometry
        self.memory = Memory(geometry, device.allocate)
        weakref.finalize(self, self.memory.close)
        self.words = WordPage(WORDS)
        self.mappings = [
            device.mapping(os.dup(fd), size) for fd, size in zip(self.memory.fds, geometry.sizes, strict=True)
        ] + [WordMapping(os.dup(self.words.fd), WORDS * 8)]
        end = device.map(self.mappings)
        assert end.outcome == Outcome.DONE, end.what
        rows = [(p.memory, p.offset, p.stride_bytes, p.run_bytes, p.group) for p in geometry.planes]
        self.table = PlaneTable(self.mappings[:-1], rows, geometry.num_blocks)


@dataclass
class Job:
    """One copy's arguments: `pages` slot after slot, `blocks` from position `skip` on, a tuple each for groups."""

    blocks: Sequence[Any]
    pages: Sequence[int]
    pages_per_slot: int
    blocks_per_slot: int
    skip: int = 0

    def block_ids(self, direction: Direction, table: PlaneTable) -> BlockIds:
        """Block 0 is a block like any other here."""
        packed_ids = packed(chain.from_iterable(b if isinstance(b, tuple) else (b,) for b in self.blocks))
        return BlockIds(table, direction, packed_ids, 0, len(self.blocks), NO_BLOCK)

    def arguments(self, direction: Direction, table: PlaneTable) -> dict[str, Any]:
        return {
            "blocks": self.block_ids(direction, table),
            "extents": slot_of(self.pages),
            "pages_per_slot": self.pages_per_slot,
            "blocks_per_slot": self.blocks_per_slot,
            "skip": self.skip,
        }


class Device:
    """A device over an L1 of `pages` pages, whose tickets it numbers. On a fake one, waiting moves things.

    `gpu`: a real or simulated one, whose streams run by themselves; small batches, so that a copy has several.
    `pinned`: L1 is pinned for that GPU before the first copy; else no copy ever finds it so.
    `allocate`: engines' memory; each piece of it has one descriptor. `region`: another device's L1. `limits`: of a GPU's ways.
    `pause`: of a CPU's copies, see slow_cpu.
    """

    def __init__(
        self,
        pages: int = 64,
        page_bytes: int = 4096,
        threads: int = 2,
        delay_micros: int = 0,
        fake_seed: int = 0,
        gpu: Gpu | None = None,
        way: Way | None = None,
        batch_bytes: int = 16384,
        pinned: bool = False,
        allocate: Callable[[int], Piece] = SharedMemory,
        region: HostRegion | None = None,
        pause: dict[str, Any] | None = None,
        **limits: int,
    ) -> None:
        self.pages = pages
        self.page_bytes = page_bytes
        self.region = region = region or HostRegion(pages * page_bytes)
        self.gpu = gpu
        self.allocate = allocate
        self.fake = FakeDevice(region, page_bytes, fake_seed, delay_micros=delay_micros) if fake_seed else None
        self.native: CpuDevice | FakeDevice | GpuDevice
        if gpu is not None:
            self.native = GpuDevice(region, page_bytes, gpu, batch_bytes, way, **limits)
        else:
            self.native = self.fake or slow_cpu(region, page_bytes, threads, delay_micros, **pause or {})
        self.pinner = self._pin() if pinned else None
        self.ended: dict[int, End] = {}
        self.tickets = 0

    def _pin(self) -> Pinner:
        assert self.gpu is not None, "only GPUs pin"
        pinner = Pinner(self.region, self.gpu, 2)
        wait_until(lambda: pinner.done)
        assert (pinner.error, self.region.pinned_bytes) == ("", self.region.size)
        return pinner

    def mapping(self, fd: int, size: int) -> Mapping:
        """An engine's memory, as this device takes it."""
        return FileMapping(fd, size) if self.gpu is None else GpuMapping.by_fd(self.gpu, fd, 0, size)

    # ---- tickets ------------------------------------------------------------------------------

    def next_ticket(self) -> int:
        self.tickets += 1
        return self.tickets

    def drain(self) -> list[End]:
        ends = [End(*raw) for raw in self.native.drain()]
        for end in ends:
            assert end.ticket not in self.ended, f"ticket {end.ticket} ended twice"
            self.ended[end.ticket] = end
        return ends

    def wait(self, ticket: int, seconds: float = 20.0) -> End:
        deadline = time.monotonic() + seconds
        while ticket not in self.ended:
            assert time.monotonic() < deadline, f"ticket {ticket} did not end within {seconds} s"
            if self.fake is not None:
                self.fake.step()
            else:
                select.select([self.native.completion_fd], [], [], 0.1)
            self.drain()
        return self.ended[ticket]

    def map(self, mappings: list[Mapping]) -> End:
        ticket = self.next_ticket()
        self.native.submit_map(ticket, mappings)
        return self.wait(ticket)

    def unmap(self, mappings: list[Mapping]) -> End:
        ticket = self.next_ticket()
        self.native.submit_unmap(ticket, mappings)
        return self.wait(ticket)

    def submit(self, direction: Direction, l0: L0, job: Job, **word: Any) -> int:
        ticket = self.next_ticket()
        self.native.submit_copy(ticket, **job.arguments(direction, l0.table), **word)
        return ticket

    def submit_with_word(self, direction: Direction, l0: L0, job: Job, index: int = 0, sequence: int = 1) -> int:
        """Armed as an engine does it."""
        l0.words.arm(index, sequence)
        return self.submit(direction, l0, job, word_memory=l0.mappings[-1], word_index=index, sequence=sequence)

    def store(self, l0: L0, job: Job) -> End:
        return self.wait(self.submit(Direction.STORE, l0, job))

    def load(self, l0: L0, job: Job) -> End:
        return self.wait(self.submit(Direction.LOAD, l0, job))

    # ---- L1 itself: read and written page by page through the plainest geometry ------------------

    @functools.cached_property
    def _plain(self) -> tuple[L0, Job]:
        plane = Plane(0, 0, self.page_bytes, self.page_bytes)
        l0 = L0(self, Geometry(self.pages, 1, (self.pages * self.page_bytes,), (plane,)))
        return l0, Job(range(self.pages), range(self.pages), 1, 1)

    def read_l1(self) -> bytes:
        l0, job = self._plain
        assert self.load(l0, job).outcome == Outcome.DONE
        return l0.memory.image()[0]

    def fill_l1(self) -> bytes:
        """Noise everywhere; returns it."""
        l0, job = self._plain
        l0.memory.fill()
        assert self.store(l0, job).outcome == Outcome.DONE
        return l0.memory.image()[0]


def slot_places(job: Job, block_bytes: int, page_bytes: int) -> Iterable[tuple[Any, list[tuple[int, int]]]]:
    """For each block of a job where its bytes lie in L1, byte by byte in runs: (block id, [(address, bytes)])."""
    for index, block in enumerate(job.blocks):
        slot, inner = divmod(job.skip + index, job.blocks_per_slot)
        pages = job.pages[slot * job.pages_per_slot : (slot + 1) * job.pages_per_slot]
        runs, offset, left = [], inner * block_bytes, block_bytes
        while left:
            page, within = divmod(offset, page_bytes)
            piece = min(left, page_bytes - within)
            runs.append((pages[page] * page_bytes + within, piece))
            offset, left = offset + piece, left - piece
        yield block, runs


def l1_after_store(before: bytes, job: Job, memory: Memory, page_bytes: int) -> bytes:
    """What L1 should hold when `job` has stored from `memory`."""
    l1 = bytearray(before)
    for block, runs in slot_places(job, memory.geometry.block_bytes, page_bytes):
        content, done = memory.read(block), 0
        for address, piece in runs:
            l1[address : address + piece] = content[done : done + piece]
            done += piece
    return bytes(l1)


def l0_after_load(l1: bytes, job: Job, memory: Memory, page_bytes: int) -> list[bytes]:
    """What `memory` should hold when `job` has loaded into it."""
    contents = {
        block: b"".join(l1[address : address + piece] for address, piece in runs)
        for block, runs in slot_places(job, memory.geometry.block_bytes, page_bytes)
    }
    return memory.image_with(contents)


def flat(num_blocks: int, block_bytes: int) -> Geometry:
    """One plane without gaps."""
    return Geometry(num_blocks, 16, (num_blocks * block_bytes,), (Plane(0, 0, block_bytes, block_bytes),))
