"""Metric families as plain data: what every exporter reads. A `Metric` is the one declaration of a family.

Owns: the shape. Refuses to know: where values come from (`metrics`) and how they are exported (Prometheus, OTLP).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from kvserver.protocol import Buckets

T = TypeVar("T")
Labels: TypeAlias = tuple[str, ...]
Value: TypeAlias = float | Buckets


class Exemplar(NamedTuple):
    """An observed value and the span of the trace that it belongs to."""

    value: float
    time_seconds: float  # since 1970
    trace_id: int
    span_id: int


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(slots=True)
class Family:
    """A metric family; `name` is without `_total`. A point is (label values, value); there may be none."""

    name: str
    help: str
    kind: Kind
    labels: tuple[str, ...] = ()
    points: list[tuple[tuple[str, ...], Value]] = field(default_factory=list)
    bounds: tuple[float, ...] = ()  # of a histogram's buckets, ascending
    exemplars: Mapping[Labels, Mapping[int, Exemplar]] = field(default_factory=dict)  # the last one of each bucket

    def add(self, value: Value, *labels: str) -> Family:
        assert len(labels) == len(self.labels), f"{self.name} has labels {self.labels}"
        self.points.append((labels, value))
        return self


@dataclass(frozen=True, slots=True)
class Metric(Generic[T]):
    """Family that is read from objects: `read` gives the value of one, or its values by further labels, which `by` names.

    None is no value.
    """

    name: str
    help: str
    kind: Kind
    read: Callable[[T], Value | Mapping[Any, Value] | None]
    by: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()


def families_of(
    metrics: Iterable[Metric[T]], objects: Iterable[tuple[T, tuple[str, ...]]], labels: tuple[str, ...] = ()
) -> Iterator[Family]:
    """`objects`: with the values of their `labels`."""
    rows = list(objects)
    for metric in metrics:
        family = Family(metric.name, metric.help, metric.kind, (*labels, *metric.by), bounds=metric.bounds)
        for one, names in rows:
            value = metric.read(one)
            if isinstance(value, int | float | Buckets):
                family.add(value, *names)
            elif value is not None:
                for key, part in value.items():
                    family.add(part, *names, *((key,) if isinstance(key, str) else key))
        yield family
