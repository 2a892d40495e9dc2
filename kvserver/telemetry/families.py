"""Metric families as plain data: what every exporter reads.

Owns: the shape. Refuses to know: where values come from (`metrics`) and how they are exported (Prometheus, OTLP).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvserver.protocol import Buckets


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(slots=True)
class Family:
    """`name` without `_total`. A point is (label values, value); there may be none."""

    name: str
    help: str
    kind: Kind
    labels: tuple[str, ...] = ()
    points: list[tuple[tuple[str, ...], float | Buckets]] = field(default_factory=list)
    bounds: tuple[float, ...] = ()  # of a histogram's buckets, ascending

    def add(self, value: float | Buckets, *labels: str) -> Family:
        assert len(labels) == len(self.labels), f"{self.name} has labels {self.labels}"
        self.points.append((labels, value))
        return self
