"""How many pieces a copy of 8,192 tokens by DMA is cut into, and what it was with one for each run. Needs no GPU.

What the device would give to the driver is counted by its own code; no byte moves.
"""

from __future__ import annotations

import os
import random
import select
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from common import table
from support.simulators import FakeGpu

from kvserver._native import (
    GPU_SHORT_LOAD_BYTES,
    GPU_SHORT_STORE_BYTES,
    BlockIds,
    Direction,
    GpuDevice,
    GpuMapping,
    HostRegion,
    Outcome,
    PlaneTable,
    dma_pieces,
    pack_blocks,
)

TOKENS, CHUNK_TOKENS, PAGE = 8192, 256, 4096
NUM_BLOCKS = 2048  # of the engine


@dataclass(frozen=True)
class Model:
    """`runs`: bytes of each plane of a layer's block. With groups, layer n of each shares the memory of n of the others."""

    name: str
    layers: int
    runs: Sequence[int]
    block_tokens: int
    groups: int = 1

    @property
    def block_bytes(self) -> int:
        return self.groups * self.layers * sum(self.runs)

    @property
    def blocks(self) -> int:
        return TOKENS // self.block_tokens


MODELS = [
    Model("Llama-3-8B", 32, [16 * 8 * 128 * 2] * 2, 16),
    Model("Llama-70B TP8", 80, [16 * 1 * 128 * 2] * 2, 16),
    Model("DeepSeek MLA", 61, [64 * 576 * 2], 64),
    Model("DeepSeek MLA fp8, indexer", 61, [64 * 656, 64 * 132], 64),
    Model("hybrid, 2 groups of 12", 12, [16 * 8 * 64 * 2] * 2, 16, groups=2),
]


class Board:
    """A simulated GPU, and memory on it that is never touched."""

    def __init__(self) -> None:
        self.gpu = FakeGpu("GPU-0")
        self.region = HostRegion(2 << 30)
        self.device = GpuDevice(self.region, PAGE, self.gpu)

    def memory(self, size: int) -> GpuMapping:
        fd = os.memfd_create("kv")
        os.ftruncate(fd, size)
        mapping = GpuMapping.by_fd(self.gpu, fd, 0, size)
        self.device.submit_map(1, [mapping])
        select.select([self.device.completion_fd], [], [])
        assert self.device.drain()[0][1] == Outcome.DONE
        return mapping

    def planes(self, model: Model, one_allocation: bool) -> PlaneTable:
        """Each plane's blocks lie together, the planes of a layer behind each other."""
        layer = sum(model.runs) * NUM_BLOCKS
        memories = [self.memory(layer * model.layers)] if one_allocation else [
            self.memory(layer) for _ in range(model.layers)
        ]  # fmt: skip
        rows = []
        for n in range(model.layers):
            for group in range(model.groups):
                offset = n * layer if one_allocation else 0
                for run in model.runs:
                    rows.append((0 if one_allocation else n, offset, run, run, group))
                    offset += run * NUM_BLOCKS
        return PlaneTable(memories, rows, NUM_BLOCKS)

    def pieces(
        self,
        model: Model,
        planes: PlaneTable,
        ids: Sequence[int],
        chunk_tokens: int = CHUNK_TOKENS,
        apart: bool = False,
    ) -> int:
        """Of one copy, slot behind slot in one extent, or `apart`. Groups have other blocks of the same order."""
        per_slot = chunk_tokens // model.block_tokens
        pages, slots = -(-per_slot * model.block_bytes // PAGE), model.blocks // per_slot
        if apart:
            extent = array("I", [n for slot in range(slots) for n in (slot * (pages + 1), pages)]).tobytes()
        else:
            extent = array("I", [0, pages * slots]).tobytes()
        packed = pack_blocks([block + group * model.blocks for block in ids for group in range(model.groups)])
        blocks = BlockIds(planes, Direction.LOAD, packed, len(ids), len(ids))
        return len(dma_pieces(self.region, PAGE, blocks, extent, pages, per_slot))


def row(board: Board, model: Model, one_allocation: bool) -> list[object]:
    planes = board.planes(model, one_allocation)
    in_order = list(range(1, model.blocks + 1))
    scattered = random.Random(0).sample(in_order, model.blocks)
    before = model.blocks * model.groups * model.layers * len(model.runs)
    after, neighbours = (board.pieces(model, planes, ids) for ids in (scattered, in_order))
    each = model.blocks * model.block_bytes // after
    return [
        model.name, "one" if one_allocation else "one a layer", model.blocks * model.block_bytes >> 20, before, after,
        f"{before / after:.0f}x", f"{each / 1024:.0f}", neighbours,
        *("staged" if each < limit else "dma" for limit in (GPU_SHORT_STORE_BYTES, GPU_SHORT_LOAD_BYTES)),
    ]  # fmt: skip


def main() -> None:
    board = Board()
    print(
        table(
            [
                "model",
                "allocations",
                "MiB",
                "runs",
                "pieces",
                "fewer",
                "KiB each",
                "consecutive",
                "stores by",
                "loads by",
            ],
            [row(board, model, one) for model in MODELS for one in (True, False)],
        )
    )


if __name__ == "__main__":
    main()
