"""The native copier alone: store and load of one request between an engine's memory on CPU and L1, in any layout of KV."""

from __future__ import annotations

import os
import random
import select
import time
from dataclasses import dataclass

from kvserver._native import (
    BlockIds,
    CpuDevice,
    Direction,
    FileMapping,
    HostRegion,
    Outcome,
    PlaneTable,
    WordMapping,
    WordPage,
    pack_blocks,
)
from kvserver.cache import PagePool, page_bytes_for

_COPY_SECONDS = 60.0  # only a copier that hangs takes as long


@dataclass
class KvLayout:
    """Layout of KV: `planes` planes of `run` bytes per block, each an array of blocks of its own."""

    name: str
    planes: int
    run: int
    block_tokens: int

    @property
    def block_bytes(self) -> int:
        return self.planes * self.run


def llama_8b(block_tokens: int = 32) -> dict[str, KvLayout]:
    """32 layers x 8 KV heads x 128 x bf16."""
    token = 8 * 128 * 2 * 2  # one layer, K and V
    runs = {
        "per layer": (32, token),
        "K and V apart": (64, token // 2),
        "head-major": (32 * 8, token // 8),
        "cross-layer": (1, 32 * token),
    }
    return {name: KvLayout(name, planes, block_tokens * bytes, block_tokens) for name, (planes, bytes) in runs.items()}


def _file_region(folder: str, size: int) -> HostRegion:
    """L1 in a file without a name."""
    fd = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        os.ftruncate(fd, size)
        region = HostRegion(size, fd=fd)
    finally:
        os.close(fd)
    if not region.populate(0, size):
        raise OSError(f"{folder} has no {size} bytes left")
    return region


class CopierRig:
    """A copier over L1 and one worker's memory, both touched. `l1_folder`: L1 is a file of this tmpfs, as of --l1-file."""

    def __init__(self, layout: KvLayout, tokens: int, threads: int, l1_folder: str = "") -> None:
        self.blocks = tokens // layout.block_tokens
        payload = self.blocks * layout.block_bytes
        num_blocks = self.blocks + 1
        fd = os.memfd_create("bench")
        size = num_blocks * layout.block_bytes
        os.ftruncate(fd, size)
        page_bytes = page_bytes_for(20 << 30)
        self.pool = PagePool(payload + payload // 16, page_bytes)
        l1_bytes = self.pool.pages * page_bytes
        self.region = _file_region(l1_folder, l1_bytes) if l1_folder else HostRegion(l1_bytes)
        self.copier = CpuDevice(self.region, page_bytes, threads)
        memory = FileMapping(os.dup(fd), size)
        words = WordPage(1)
        os.close(fd)
        word_page = WordMapping(os.dup(words.fd), 8)
        self.copier.submit_map(0, [memory, word_page])
        self._wait()
        rows = [(0, p * num_blocks * layout.run, layout.run, layout.run, 0) for p in range(layout.planes)]
        self.table = PlaneTable([memory], rows, num_blocks)
        ids = list(range(1, num_blocks))
        random.Random(0).shuffle(ids)
        packed = pack_blocks(ids)
        self.ids = {
            direction: BlockIds(self.table, direction, packed, self.blocks, self.blocks)
            for direction in (Direction.STORE, Direction.LOAD)
        }
        self.pages = self.pool.pages_for(payload)
        slot = self.pool.allocate_pages(self.pages)
        assert slot is not None
        self.slot = slot
        self.payload = payload

    def _wait(self) -> None:
        select.select([self.copier.completion_fd], [], [], _COPY_SECONDS)
        ((_, outcome, _, _, what),) = self.copier.drain()
        assert outcome == Outcome.DONE, what

    def gb_per_second(self, direction: Direction) -> float:
        began = time.perf_counter()
        self.copier.submit_copy(1, self.ids[direction], self.slot, self.pages, self.blocks)
        self._wait()
        return self.payload / (time.perf_counter() - began) / 1e9
