"""The answer to a scrape: metric families as Prometheus text or, with exemplars, as OpenMetrics, plain or with gzip.

Owns: the choice of the form, which is that of the Prometheus client. Refuses to know: where the families come from.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from itertools import accumulate
from typing import Any, cast

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder, gzip_accepted
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Exemplar

from kvserver.protocol import Buckets
from kvserver.telemetry.families import Family, Kind

_LEVEL = 6  # of gzip


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
        counts: list[Any] = list(zip(bounds, accumulate(value.counts), strict=True))
        for bucket, seen in family.exemplars.get(labels, {}).items():
            ids = {"trace_id": f"{seen.trace_id:032x}", "span_id": f"{seen.span_id:016x}"}
            counts[bucket] = (*counts[bucket], Exemplar(ids, seen.value, round(seen.time_seconds, 3)))
        histogram.add_metric(labels, counts, value.sum)
    return histogram


def render(families: Iterable[Family], accept: str = "", accept_encoding: str = "") -> tuple[bytes, dict[str, str]]:
    """The body and its headers, for these headers of a request."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(families))
    encode, content_type = choose_encoder(accept)
    body, headers = encode(registry), {"Content-Type": content_type, "Vary": "Accept, Accept-Encoding"}
    if not gzip_accepted(accept_encoding):
        return body, headers
    return gzip.compress(body, _LEVEL), headers | {"Content-Encoding": "gzip"}
