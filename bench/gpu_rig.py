"""What the GPU benchmark moves and where: L1, the engine's KV, the device by each way, and the ceiling.

Everything real is real here but the engine: its KV is one allocation of this process, which the device maps by a
descriptor, as it would map another process's. `Board(simulated=True)` is the same over the simulated GPU.
"""

from __future__ import annotations

import ctypes
import os
import random
import select
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from common import Buffer
from gpu_bytes import KvBytes
from gpu_sizes import DEFAULT_BATCHING, Batching, Geometry
from support.gpu_memory import FAKE_UUID, SimulatedVmmMemory, VmmMemory
from support.simulators import FakeGpu

from kvserver import _native
from kvserver._native import (
    BlockIds,
    Direction,
    GpuDevice,
    GpuMapping,
    HostRegion,
    Outcome,
    Pinner,
    PlaneTable,
    Way,
    pack_blocks,
)
from kvserver.cache import PagePool, page_bytes_for
from kvserver.cache.pages import extents

try:
    import torch
except ImportError:
    torch = None

WAYS = {"dma": Way.DMA, "staged": Way.STAGED, "chosen": None}
WAIT_SECONDS = 60  # for one copy: a GPU that hangs shall cost one section
STORE, LOAD = Direction.STORE, Direction.LOAD
ONE_WAY = {"store": STORE, "load": LOAD}


class _CudaArray:
    """Memory that torch shall see as a tensor of bytes."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


def tensor_at(address: int, size: int) -> Any:
    return torch.as_tensor(_CudaArray(address, size), device="cuda:0")


class Board:
    """One GPU, L1 pinned for it, KV on it, and a device for each way."""

    def __init__(self, simulated: bool, size: int, **limits: int) -> None:
        """`limits`: of the devices, see GpuDevice."""
        if not simulated and (torch is None or not torch.cuda.is_available()):
            sys.exit("no torch that sees a GPU: the ceiling must be CUDA's, and is measured by torch (or: --simulated)")
        self.simulated = simulated
        self.uuid: str
        self.name: str
        self.uuid, self.name = (FAKE_UUID, "simulated") if simulated else _native.cuda_gpus()[0][:2]
        self.gpu = FakeGpu(self.uuid) if simulated else _native.cuda_gpu(self.uuid)
        self.page_bytes = page_bytes_for(size)
        self.region = HostRegion(size)
        self.kv = (SimulatedVmmMemory if simulated else VmmMemory)(size)
        self.mapping = GpuMapping.by_fd(self.gpu, os.dup(self.kv.fds[0]), 0, size)
        self._limits = limits
        self._devices: dict[tuple[str, Batching], GpuDevice] = {}
        self._tickets = iter(range(1, 1 << 60))
        self.device("dma").submit_map(0, [self.mapping])
        self.wait(self.device("dma"), {0})
        self.fill()
        self.pinner = Pinner(self.region, self.gpu, 4)
        self.wait_pinned(self.pinner)

    def device(self, way: str, batching: Batching = DEFAULT_BATCHING) -> GpuDevice:
        """The same one for the same arguments."""
        found = self._devices.get((way, batching))
        if found is None:
            size, slots = batching
            found = GpuDevice(self.region, self.page_bytes, self.gpu, size, WAYS[way], most_slots=slots, **self._limits)
            self._devices[way, batching] = found
        return found

    def drop_devices(self) -> None:
        """Their staging memory is free again."""
        self._devices.clear()

    @property
    def kv_address(self) -> int:
        """In this process, without the device's mapping."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.kv.view)) if self.simulated else self.kv.address

    def gpu_words(self) -> Any:
        """The KV as a tensor of words of 8 bytes. REQUIRES: a real GPU."""
        return tensor_at(self.kv.address, len(self.kv.view)).view(torch.int64)

    def fill(self) -> None:
        """Noise: zeros can move faster than data does."""
        if self.simulated:
            self.kv.fill()
        else:
            self.gpu_words().random_()
            self.synchronize()

    def synchronize(self) -> None:
        if not self.simulated:
            torch.cuda.synchronize()

    @staticmethod
    def wait_pinned(pinner: Pinner) -> float:
        """Seconds. RuntimeError with the reason if not all could be pinned."""
        began = time.perf_counter()
        while not pinner.done:
            time.sleep(0.001)
        if pinner.error:
            raise RuntimeError(pinner.error)
        return time.perf_counter() - began

    @staticmethod
    def wait(device: GpuDevice, tickets: set[int]) -> None:
        while tickets:
            if not select.select([device.completion_fd], [], [], WAIT_SECONDS)[0]:
                raise TimeoutError(f"{len(tickets)} copies did not end within {WAIT_SECONDS} s")
            for ticket, outcome, _, _, what in device.drain():
                assert outcome == Outcome.DONE, what
                tickets.discard(ticket)

    def next_ticket(self) -> int:
        return next(self._tickets)

    def close(self) -> None:
        self.drop_devices()
        del self.pinner


@dataclass
class Transfer:
    """One request of so many tokens each way: two sets of shuffled blocks, two slots. What `gb_per_second` times it checks.

    REQUIRES: the board's L1 and KV have room for both.
    """

    board: Board
    geometry: Geometry
    tokens: int
    batching: Batching = DEFAULT_BATCHING
    ids: dict[Direction, list[int]] = field(init=False)

    def __post_init__(self) -> None:
        board, geometry = self.board, self.geometry
        self.blocks = geometry.blocks(self.tokens)
        self.payload = self.blocks * geometry.block_bytes
        self.num_blocks = num_blocks = 2 * self.blocks + 1
        rows = [(0, p * num_blocks * geometry.run, geometry.run, geometry.run, 0) for p in range(geometry.planes)]
        self.table = PlaneTable([board.mapping], rows, num_blocks)
        ids = list(range(1, num_blocks))
        random.Random(0).shuffle(ids)
        self.ids = {STORE: ids[: self.blocks], LOAD: ids[self.blocks :]}
        self._block_ids: dict[tuple[Direction, Direction], BlockIds] = {}
        pool = PagePool(board.region.size, board.page_bytes)
        self.pages = pool.pages_for(self.payload)
        self.slots = {direction: pool.allocate_pages(self.pages) for direction in (STORE, LOAD)}
        assert None not in self.slots.values(), "L1 is too small"
        self.kv = KvBytes(board, geometry.planes, geometry.run, num_blocks)
        board.wait(
            board.device("dma", self.batching), {self._submit("dma", STORE, LOAD)}
        )  # what a load loads is noise, too

    def l1_offset(self, direction: Direction) -> int:
        slot = self.slots[direction]
        assert slot is not None
        ((first, _),) = extents(slot)  # of a fresh pool
        return first * self.board.page_bytes

    def submit(self, way: str, direction: Direction) -> int:
        return self._submit(way, direction, direction)

    def _submit(self, way: str, direction: Direction, which: Direction) -> int:
        ticket = self.board.next_ticket()
        slot = self.slots[which]
        assert slot is not None
        if (direction, which) not in self._block_ids:
            packed = pack_blocks(self.ids[which])
            self._block_ids[direction, which] = BlockIds(self.table, direction, packed, self.blocks, self.blocks)
        device = self.board.device(way, self.batching)
        device.submit_copy(ticket, self._block_ids[direction, which], slot, self.pages, self.blocks)
        return ticket

    def seconds(self, way: str, *directions: Direction) -> float:
        """From the submission to the completion's arrival here."""
        began = time.perf_counter()
        tickets = {self.submit(way, direction) for direction in directions}
        self.board.wait(self.board.device(way, self.batching), tickets)
        return time.perf_counter() - began

    def check(self, way: str, direction: Direction, chunk_blocks: int = 1) -> None:
        """REQUIRES: the KV changed before the copy, and not since."""
        what = (
            f"a {direction.name.lower()} of {self.geometry.name}, {self.geometry.layout}, {self.tokens} tokens, {way}"
        )
        self.kv.check(what, self.ids[direction], self.l1_offset(direction), chunk_blocks)

    def gb_per_second(self, way: str, *directions: Direction) -> float:
        self.kv.change()
        seconds = self.seconds(way, *directions)
        for direction in directions:
            self.check(way, direction)
        return self.payload * len(directions) / seconds / 1e9


class Ceiling:
    """One large copy between pinned and GPU memory each way, both ways on a stream each."""

    def __init__(self, board: Board, size: int) -> None:
        self._board, self._size = board, size
        if board.simulated:
            self._buffers = {direction: (Buffer(size), Buffer(size)) for direction in (STORE, LOAD)}
            return
        self._streams = {direction: torch.cuda.Stream() for direction in (STORE, LOAD)}
        self._tensors = {
            direction: (
                torch.randint(0, 256, (size,), dtype=torch.uint8).pin_memory(),
                torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda:0"),
            )
            for direction in (STORE, LOAD)
        }
        torch.cuda.synchronize()

    def gb_per_second(self, *directions: Direction) -> float:
        return self._size * len(directions) / self.seconds(self._size, *directions) / 1e9

    def seconds(self, size: int, *directions: Direction) -> float:
        """Of one copy of so many bytes a direction, until the host knows that it has ended."""
        assert size <= self._size
        began = time.perf_counter()
        if self._board.simulated:
            self._copy_on_host(size, directions)
        else:
            for direction in directions:
                host, gpu = (tensor[:size] for tensor in self._tensors[direction])
                to, from_ = (host, gpu) if direction == STORE else (gpu, host)
                with torch.cuda.stream(self._streams[direction]):
                    to.copy_(from_, non_blocking=True)
            torch.cuda.synchronize()
        return time.perf_counter() - began

    def _copy_on_host(self, size: int, directions: tuple[Direction, ...]) -> None:
        def copy(direction: Direction) -> None:
            to, from_ = self._buffers[direction]
            ctypes.memmove(to.address, from_.address, size)

        threads = [threading.Thread(target=copy, args=(direction,)) for direction in directions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


class Paced:
    """Copies at a given rate until it is left; `gb_per_second` is what it reached."""

    def __init__(self, copy: Callable[[], int], gb_per_second: float) -> None:
        self._copy, self._rate = copy, gb_per_second * 1e9
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._bytes = 0

    def _run(self) -> None:
        while not self._over.is_set():
            due = self._began + self._bytes / self._rate - time.perf_counter()
            if due > 0:
                time.sleep(due)
            self._bytes += self._copy()

    def __enter__(self) -> Paced:
        self._began = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.gb_per_second = self._bytes / (time.perf_counter() - self._began) / 1e9
