"""Every layout that engines use, as planes: the cases of `tests/native/kernel_layouts.h`, for a device."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from support.memory import Geometry

from kvserver.protocol import Plane

LAYERS = 3
SIZES = {"L": LAYERS, "2": 2, "N": 16, "H": 2, "1": 1}


@dataclass
class Layout:
    """Tensors one behind the other in one memory."""

    num_blocks: int
    planes: list[Plane] = field(default_factory=list)
    bytes: int = 0

    def add(self, order: str, channels: int, element_bytes: int, padding: int = 0, group: int = 0) -> None:
        """A contiguous tensor but for `padding` bytes behind each B. `order` names its dimensions, outermost first."""
        sizes = {**SIZES, "B": self.num_blocks, "C": channels}
        stride, block_stride = element_bytes, 0
        dims: list[tuple[int, int]] = []  # size, stride
        for name in reversed(order):
            if name == "B":
                stride += padding
                block_stride = stride
            else:
                dims.insert(0, (sizes[name], stride))
            stride *= sizes[name]
        run = element_bytes
        while dims and dims[-1][1] == run:  # the contiguous tail is the run, the rest enumerates planes
            run *= dims.pop()[0]
        for indices in itertools.product(*(range(size) for size, _ in dims)):
            offset = sum(index * step for index, (_, step) in zip(indices, dims, strict=True))
            self.planes.append(Plane(0, self.bytes + offset, block_stride, run, group))
        self.bytes += stride

    def geometry(self, misaligned: int = 0) -> Geometry:
        planes = tuple(Plane(0, p.offset + misaligned, p.stride_bytes, p.run_bytes, p.group) for p in self.planes)
        return Geometry(self.num_blocks, 16, (self.bytes + misaligned,), planes)


def _same(num_blocks: int, tensors: int, order: str, channels: int, element_bytes: int, padding: int = 0) -> Layout:
    layout = Layout(num_blocks)
    for _ in range(tensors):
        layout.add(order, channels, element_bytes, padding)
    return layout


def engine_layouts(num_blocks: int, element_bytes: int) -> dict[str, Layout]:
    simple = {
        "cross-layer": (1, "BL2NHC", 40, 0),
        "per-layer [2, NB, ...]": (LAYERS, "2BNHC", 40, 0),
        "per-layer [NB, 2, ...]": (LAYERS, "B2NHC", 40, 0),
        "MLA": (LAYERS, "BNC", 576, 0),
        "SGLang MHA": (2 * LAYERS, "BNHC", 40, 0),
        "SGLang MLA": (LAYERS, "BN1C", 576, 0),
        "head-major": (LAYERS, "2HBNC", 40, 0),
        **{order: (1, order, 80, 0) for order in ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")},
        "padded pages": (LAYERS, "BNHC", 40, 256),
        "pages padded by an odd count": (LAYERS, "BNHC", 40, 77),
    }
    layouts = {
        name: _same(num_blocks, tensors, order, channels, element_bytes, padding)
        for name, (tensors, order, channels, padding) in simple.items()
    }
    indexed, hybrid = Layout(num_blocks), Layout(num_blocks)
    for layer in range(LAYERS):
        indexed.add("BNC", 656, element_bytes)
        indexed.add("BNC", 132, element_bytes)
        hybrid.add("B2NHC", 64 if layer == 0 else 200, element_bytes, group=layer % 2)
    return {**layouts, "fp8 MLA with an indexer": indexed, "two groups": hybrid}


def of_runs(runs: list[int], num_blocks: int, padding: int = 0) -> Layout:
    """A plane for each run."""
    layout = Layout(num_blocks)
    for run in runs:
        layout.add("BC", run, 1, padding)
    return layout


def boundary_runs() -> list[int]:
    """Around every count of vectors at which a warp's loop changes its course, for each vector."""
    runs = set()
    for vector in (16, 8, 4, 1):
        for vectors in (1, 2, 32, 64, 96, 128, 160, 256, 512):
            for run in ((vectors - 1) * vector, vectors * vector, (vectors + 1) * vector):
                runs |= {run - 1, run, run + 1}
    return sorted(run for run in runs if run > 0)
