"""One run of the GPU benchmark: what it has, what it found, and how it measures."""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from common import alternate, percentile
from gpu_rig import Board, Ceiling, Direction
from gpu_sizes import Geometry, Sizes, geometries

ENOUGH = 1000  # samples of a percentile


@dataclass
class Run:
    board: Board
    ceiling: Ceiling
    sizes: Sizes
    options: argparse.Namespace
    results: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    save: Callable[[Run], None] = lambda run: None  # after every row: what was measured stays if the next never ends
    until: float = math.inf  # by time.monotonic(): no section begins later, nor the next part of a long one

    @property
    def simulated(self) -> bool:
        return self.board.simulated

    @functools.cached_property
    def geometries(self) -> list[Geometry]:
        """Per layer and cross-layer, in turn; of the models that --models names."""
        found = geometries(self.sizes.fewer_layers)
        return [geometry for geometry in found if geometry.name in (self.options.models or geometry.name)]

    @property
    def per_layer(self) -> list[Geometry]:
        return self.geometries[::2]

    def add(self, section: str, **row: Any) -> dict[str, Any]:
        self.results.setdefault(section, []).append(row)
        self.save(self)
        return row

    def is_over(self, what: str) -> bool:
        """Whether there is no time for it; then the report names it."""
        if time.monotonic() < self.until:
            return False
        self.left_out.append(f"{what}: --seconds {self.options.seconds:.0f} were over")
        return True

    def compare(self, directions: tuple[Direction, ...], **measures: Callable[[], float]) -> dict[str, Any]:
        """GB/s of each and of the ceiling, in turn: {name: {median, spread, ratio, all}}."""
        names = ["ceiling", *measures]
        found = alternate(
            self.options.rounds, functools.partial(self.ceiling.gb_per_second, *directions), *measures.values()
        )
        top = statistics.median(found[0])
        return {name: {**summary(values), "ratio": statistics.median(values) / top}
                for name, values in zip(names, found, strict=True)}  # fmt: skip

    def ceiling_of(self, direction: Direction) -> float:
        return statistics.median(self.ceiling.gb_per_second(direction) for _ in range(self.options.rounds))


def summary(values: list[float]) -> dict[str, Any]:
    """`spread`: from the least to the most, over the median."""
    median = statistics.median(values)
    return {"median": median, "spread": (max(values) - min(values)) / median, "all": values}


def latencies(milliseconds: Sequence[float]) -> dict[str, Any]:
    """Percentiles, or None where there are too few samples for them."""
    enough = len(milliseconds) >= ENOUGH
    return {
        "samples": len(milliseconds),
        "p50_ms": percentile(milliseconds, 0.5) if enough else None,
        "p99_ms": percentile(milliseconds, 0.99) if enough else None,
    }


def rate_of(copy: Callable[[], int]) -> Callable[[], float]:
    """GB/s of a copy that returns its bytes."""

    def gb_per_second() -> float:
        began = time.perf_counter()
        moved = copy()
        return moved / (time.perf_counter() - began) / 1e9

    return gb_per_second
