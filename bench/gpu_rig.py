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
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from common import Buffer
from support.gpu_memory import FAKE_UUID, SimulatedVmmMemory, VmmMemory

from kvserver import _native
from kvserver._native import (
    Direction,
    FakeGpu,
    GpuCopier,
    GpuMapping,
    HostRegion,
    Outcome,
    Pinner,
    PlaneTable,
    Way,
)
from kvserver.pool import PagePool, page_bytes_for

try:
    import torch
except ImportError:
    torch = None

WAYS = {"dma": Way.DMA, "staged": Way.STAGED, "chosen": None}
STORE, LOAD = Direction.STORE, Direction.LOAD
ONE_WAY = {"store": STORE, "load": LOAD}


@dataclass(frozen=True)
class Geometry:
    """`planes` planes of `run` bytes per block, each an array of blocks of its own."""

    name: str
    layout: str
    planes: int
    run: int
    block_tokens: int

    @property
    def block_bytes(self) -> int:
        return self.planes * self.run

    def blocks(self, tokens: int) -> int:
        return max(1, tokens // self.block_tokens)

    def across_layers(self) -> Geometry:
        return Geometry(self.name, "cross-layer", 1, self.block_bytes, self.block_tokens)


def geometries(simulated: bool) -> list[Geometry]:
    """bf16. K and V apart, as [2, blocks, ...] has them: a plane each per layer."""
    few = 16 if simulated else 1  # so many times fewer layers
    per_layer = [
        Geometry("Llama-8B", "per layer", 2 * 32 // few, 16 * 8 * 128 * 2, 16),
        Geometry("Llama-70B TP8", "per layer", 2 * 80 // few, 16 * 1 * 128 * 2, 16),
        Geometry("DeepSeek MLA", "per layer", 61 // few, 64 * 576 * 2, 64),
    ]
    return [form for geometry in per_layer for form in (geometry, geometry.across_layers())]


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

    def __init__(self, simulated: bool, l1_bytes: int, kv_bytes: int) -> None:
        self.simulated = simulated
        self.uuid: str
        self.name: str
        self.uuid, self.name = (FAKE_UUID, "simulated") if simulated else _native.cuda_gpus()[0][:2]
        self.gpu = FakeGpu(self.uuid) if simulated else _native.cuda_gpu(self.uuid)
        self.page_bytes = page_bytes_for(l1_bytes)
        self.region = HostRegion(l1_bytes)
        self.kv = (SimulatedVmmMemory if simulated else VmmMemory)(kv_bytes)
        self.mapping = GpuMapping.by_fd(self.gpu, os.dup(self.kv.fds[0]), 0, kv_bytes)
        self.devices = {name: GpuCopier(self.region, self.page_bytes, self.gpu, way=way) for name, way in WAYS.items()}
        self._tickets = iter(range(1, 1 << 60))
        self.wait(self.devices["dma"], self._map())
        self.tensor = self._tensor(kv_bytes)
        self.fill()
        self.pinner = Pinner(self.region, self.gpu, 4)
        self.wait_pinned(self.pinner)

    def _map(self) -> set[int]:
        self.devices["dma"].submit_map(0, [self.mapping])
        return {0}

    def _tensor(self, size: int) -> Any:
        if torch is None:
            return None
        return torch.frombuffer(self.kv.view, dtype=torch.uint8) if self.simulated else tensor_at(self.kv.address, size)

    def fill(self) -> None:
        """Noise: zeros can move faster than data does."""
        if self.tensor is None:
            self.kv.fill()
        else:
            self.tensor.view(torch.int64).random_()
            self.synchronize()

    def synchronize(self) -> None:
        if torch is not None and not self.simulated:
            torch.cuda.synchronize()

    @staticmethod
    def wait_pinned(pinner: Pinner) -> float:
        """Seconds. RuntimeError says why not all could be pinned."""
        began = time.perf_counter()
        while not pinner.done:
            time.sleep(0.001)
        if pinner.error:
            raise RuntimeError(pinner.error)
        return time.perf_counter() - began

    @staticmethod
    def wait(device: GpuCopier, tickets: set[int]) -> None:
        while tickets:
            select.select([device.completion_fd], [], [])
            for ticket, outcome, _, _, what in device.drain():
                assert outcome == Outcome.DONE, what
                tickets.discard(ticket)

    def next_ticket(self) -> int:
        return next(self._tickets)

    def close(self) -> None:
        self.devices.clear()
        del self.pinner


class Transfer:
    """One request of so many tokens each way: two sets of shuffled blocks, two slots.

    REQUIRES: the board's L1 and KV have room for both.
    """

    def __init__(self, board: Board, geometry: Geometry, tokens: int) -> None:
        self.board, self.geometry = board, geometry
        self.blocks = geometry.blocks(tokens)
        self.payload = self.blocks * geometry.block_bytes
        num_blocks = 2 * self.blocks + 1
        rows = [(0, p * num_blocks * geometry.run, geometry.run, geometry.run, 0) for p in range(geometry.planes)]
        self.table = PlaneTable([board.mapping], rows, num_blocks)
        self.num_blocks = num_blocks
        ids = list(range(1, num_blocks))
        random.Random(0).shuffle(ids)
        self.ids = {STORE: ids[: self.blocks], LOAD: ids[self.blocks :]}
        pool = PagePool(board.region.size, board.page_bytes)
        self.pages = pool.pages_for(self.payload)
        self.slots = {direction: pool.take(self.pages) for direction in (STORE, LOAD)}
        assert None not in self.slots.values(), "L1 is too small"
        board.wait(board.devices["dma"], {self._submit("dma", STORE, LOAD)})  # what a load loads is noise, too

    def submit(self, way: str, direction: Direction) -> int:
        return self._submit(way, direction, direction)

    def _submit(self, way: str, direction: Direction, which: Direction) -> int:
        ticket = self.board.next_ticket()
        blocks, slot = array("I", self.ids[which]).tobytes(), self.slots[which]
        assert slot is not None
        self.board.devices[way].submit_copy(ticket, direction, self.table, blocks, slot, self.pages, self.blocks)
        return ticket

    def seconds(self, way: str, *directions: Direction) -> float:
        """From the submission to the completion's arrival here."""
        began = time.perf_counter()
        tickets = {self.submit(way, direction) for direction in directions}
        self.board.wait(self.board.devices[way], tickets)
        return time.perf_counter() - began

    def gb_per_second(self, way: str, *directions: Direction) -> float:
        return self.payload * len(directions) / self.seconds(way, *directions) / 1e9


class Ceiling:
    """One large copy between pinned and GPU memory each way, both ways on a stream each."""

    def __init__(self, board: Board, size: int) -> None:
        self._board, self._size = board, size
        if board.simulated or torch is None:
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
        began = time.perf_counter()
        if self._board.simulated or torch is None:
            self._copy_on_host(directions)
        else:
            for direction in directions:
                host, gpu = self._tensors[direction]
                to, from_ = (host, gpu) if direction == STORE else (gpu, host)
                with torch.cuda.stream(self._streams[direction]):
                    to.copy_(from_, non_blocking=True)
            torch.cuda.synchronize()
        return self._size * len(directions) / (time.perf_counter() - began) / 1e9

    def _copy_on_host(self, directions: tuple[Direction, ...]) -> None:
        def copy(direction: Direction) -> None:
            to, from_ = self._buffers[direction]
            ctypes.memmove(to.address, from_.address, self._size)

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
