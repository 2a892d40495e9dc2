"""Metric families as plain data: what every exporter reads.

Owns: the shape. Refuses to know: where figures come from (`metrics`) and how they leave (Prometheus, OTLP).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(slots=True)
class Buckets:
    """One histogram's figures. `counts[i]` is in (bounds[i-1], bounds[i]], the last one beyond every bound."""

    counts: list[int]
    sum: float


@dataclass(slots=True)
class Family:
    """`name` without `_total`. A point is (label values, figure); there may be none."""

    name: str
    help: str
    kind: Kind
    labels: tuple[str, ...] = ()
    points: list[tuple[tuple[str, ...], float | Buckets]] = field(default_factory=list)
    bounds: tuple[float, ...] = ()  # of a histogram's buckets, ascending

    def add(self, figure: float | Buckets, *labels: str) -> Family:
        assert len(labels) == len(self.labels), f"{self.name} has labels {self.labels}"
        self.points.append((labels, figure))
        return self
