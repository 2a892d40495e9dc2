"""How much the GPU benchmark moves, and in which shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvserver import _native

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30


class Batching(NamedTuple):
    """How a device cuts copies: bytes of a batch, and how many of them may be in flight a direction."""

    bytes: int
    slots: int

    def __str__(self) -> str:
        return f"{self.slots} x {self.bytes / MiB:g}"


DEFAULT_BATCHING = Batching(_native.GPU_BATCH_BYTES, _native.GPU_MOST_SLOTS)


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    memory: int  # bytes of L1, and of KV
    ceiling: int
    lengths: tuple[int, ...]  # of requests, tokens
    request: int  # tokens where one length is enough: two of it fit into one registration of L1
    run_kib: tuple[int, ...]
    run_bytes: int
    busy_run_kib: tuple[int, ...]
    batches: tuple[Batching, ...]
    samples: int  # of a latency
    seconds: float  # that another process works beside one kind of copy
    fewer_layers: int = 1


RUN_KIB = (4, 8, 12, 16, 20, 24, 28, 32, 48, 64, 96, 128, 256, 512, 1024)
BUSY_RUN_KIB = (4, 16, 28, 64, 128)

SIZES = {
    "full": Sizes(
        9 * GiB, GiB // 2, (256, 2048, 8192, 32768), 1024,
        RUN_KIB, 256 * MiB, BUSY_RUN_KIB,
        tuple(Batching(mib * MiB, slots) for mib, slots in ((8, 4), (8, 12), (16, 4), (32, 4), (64, 4))), 1000, 0.15,
    ),
    "small": Sizes(
        3 * GiB, GiB // 4, (256, 2048, 8192), 1024, RUN_KIB, 128 * MiB, BUSY_RUN_KIB,
        tuple(Batching(mib * MiB, slots) for mib, slots in ((8, 4), (8, 12), (32, 4))), 1000, 0.15,
    ),
    "tiny": Sizes(
        96 * MiB, 8 * MiB, (256, 512), 512, (4, 64), MiB, (4, 64), (Batching(64 * KiB, 4), Batching(64 * KiB, 12)), 20, 0.02,
        fewer_layers=16,
    ),
}  # fmt: skip


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


def one_plane(run_kib: int) -> Geometry:
    """Runs of this length, none beside another: no two go in one piece."""
    return Geometry("runs", "one plane", 1, run_kib << 10, 1)


def geometries(few: int = 1) -> list[Geometry]:
    """bf16, with so many times fewer layers. K and V apart, as [2, blocks, ...] has them: a plane each per layer."""
    per_layer = [
        Geometry("Llama-8B", "per layer", 2 * 32 // few, 16 * 8 * 128 * 2, 16),
        Geometry("Llama-70B TP8", "per layer", 2 * 80 // few, 16 * 1 * 128 * 2, 16),
        Geometry("DeepSeek MLA", "per layer", 61 // few, 64 * 576 * 2, 64),
    ]
    return [form for geometry in per_layer for form in (geometry, geometry.across_layers())]
