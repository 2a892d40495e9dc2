"""The Prometheus text of metric families.

Owns: that form. Refuses to know: where the families come from.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import cast

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from kvserver.protocol import Buckets
from kvserver.telemetry.families import Family, Kind


class _Collector:
    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return map(_metric, self._families)


def _metric(family: Family) -> Metric:
    if family.kind is not Kind.HISTOGRAM:
        of_kind = CounterMetricFamily if family.kind is Kind.COUNTER else GaugeMetricFamily
        numbers = of_kind(family.name, family.help, labels=family.labels)
        for labels, value in family.points:
            numbers.add_metric(labels, cast(float, value))
        return numbers
    histogram = HistogramMetricFamily(family.name, family.help, labels=family.labels)
    bounds = [*map(repr, family.bounds), "+Inf"]
    for labels, value in family.points:
        assert isinstance(value, Buckets)
        histogram.add_metric(labels, list(zip(bounds, accumulate(value.counts), strict=True)), value.sum)
    return histogram


def render(families: Iterable[Family]) -> bytes:
    """What GET /metrics answers."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(families))
    return generate_latest(registry)
