"""The parts of measurements: histograms, their buckets, and bounds on label values that peers choose.

Refuses to know: metric families (`families`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection

import msgspec

# Times that KV stays in one place: the buckets of vLLM's own KV cache residency histograms.
RESIDENCY_SECONDS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5,
    1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0,
)  # fmt: skip

# From a bare loopback echo (~0.1 ms) to a copy of gigabytes.
WAIT_SECONDS = (
    0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0,
)  # fmt: skip

DEPARTED_SECONDS = 300.0  # the series of a disconnected instance stay for so long, and continue if it reconnects

MOST_DEPARTED = 64  # disconnected instances whose series stay; of more, the newest
MOST_MODELS = 256  # models with series of their own, for measurements that outlive instances
OTHER = "(other)"


def bounded(value: str, known: Collection[str], most: int = MOST_MODELS) -> str:
    """The label for `value`, which a peer chose: itself if it is known or fewer than `most` are known, else OTHER."""
    return value if value in known or len(known) < most else OTHER


class Buckets(msgspec.Struct, frozen=True):
    """Counts of one histogram: `counts[i]` for (bounds[i-1], bounds[i]], the last one beyond all bounds."""

    counts: list[int] = []
    sum: float = 0.0


class Histogram:
    """Counts of observed values. One thread observes; `snapshot()` returns a copy."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self._sum += value

    def add_counts(self, other: Histogram) -> None:
        """Add the counts of `other`. REQUIRES: the same bounds."""
        self._counts = [mine + its for mine, its in zip(self._counts, other._counts, strict=True)]
        self._sum += other._sum

    def snapshot(self) -> Buckets:
        return Buckets(list(self._counts), self._sum)
