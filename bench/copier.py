"""The native copier alone: store and load of one request, against memcpy at the same thread count.

python bench/copier.py [--tokens 8192] [--rounds 9]
"""

from __future__ import annotations

import argparse
import os
import random
import select
import time
from dataclasses import dataclass

from common import MemcpyCeiling, alternate, median, table

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


@dataclass
class Geometry:
    """`planes` planes of `run` bytes per block, each an array of blocks of its own."""

    name: str
    planes: int
    run: int
    block_tokens: int

    @property
    def block_bytes(self) -> int:
        return self.planes * self.run


def llama_8b(layout: str) -> Geometry:
    """32 layers x 8 KV heads x 128 x bf16, blocks of 32 tokens."""
    token = 8 * 128 * 2 * 2  # one layer, K and V
    return {
        "per layer": Geometry("per layer", 32, 32 * token, 32),
        "K and V apart": Geometry("K and V apart", 64, 32 * token // 2, 32),
        "head-major": Geometry("head-major", 32 * 8, 32 * token // 8, 32),
        "cross-layer": Geometry("cross-layer", 1, 32 * 32 * token, 32),
    }[layout]


class Rig:
    """A copier over L1 and one worker's memory, both touched."""

    def __init__(self, geometry: Geometry, tokens: int, threads: int) -> None:
        self.blocks = tokens // geometry.block_tokens
        payload = self.blocks * geometry.block_bytes
        num_blocks = self.blocks + 1
        fd = os.memfd_create("bench")
        size = num_blocks * geometry.block_bytes
        os.ftruncate(fd, size)
        page_bytes = page_bytes_for(20 << 30)
        self.pool = PagePool(payload + payload // 16, page_bytes)
        self.region = HostRegion(self.pool.pages * page_bytes)
        self.copier = CpuDevice(self.region, page_bytes, threads)
        memory = FileMapping(os.dup(fd), size)
        words = WordPage(1)
        word_page = WordMapping(os.dup(words.fd), 8)
        self.copier.submit_map(0, [memory, word_page])
        self._wait()
        rows = [(0, p * num_blocks * geometry.run, geometry.run, geometry.run, 0) for p in range(geometry.planes)]
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
        select.select([self.copier.completion_fd], [], [])
        ((_, outcome, _, _, what),) = self.copier.drain()
        assert outcome == Outcome.DONE, what

    def gb_per_second(self, direction: Direction) -> float:
        began = time.perf_counter()
        self.copier.submit_copy(1, self.ids[direction], self.slot, self.pages, self.blocks)
        self._wait()
        return self.payload / (time.perf_counter() - began) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    rows: list[list[object]] = []
    for threads in (1, 2):
        for layout in ("per layer", "K and V apart", "head-major", "cross-layer"):
            geometry = llama_8b(layout)
            rig = Rig(geometry, options.tokens, threads)
            ceiling = MemcpyCeiling(rig.payload, threads)
            memcpy, store, load = (
                median(values)
                for values in alternate(
                    options.rounds,
                    ceiling.gb_per_second,
                    lambda r=rig: r.gb_per_second(Direction.STORE),
                    lambda r=rig: r.gb_per_second(Direction.LOAD),
                )
            )
            rows.append([threads, layout, geometry.run, memcpy, store, load, store / memcpy, load / memcpy])
    print(table(["threads", "layout", "run", "memcpy GB/s", "store", "load", "store ratio", "load ratio"], rows))


if __name__ == "__main__":
    main()
