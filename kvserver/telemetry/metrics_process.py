"""Metric families of this process, under the names that all Prometheus clients give them: `process_*`.

Read when they are exported, in whichever thread does that.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import ProcessCollector

from kvserver.telemetry.families import Family, Kind

_collector = ProcessCollector(registry=None)


def process_families() -> Iterable[Family]:
    """Families of this process; none where there is no /proc."""
    for metric in _collector.collect():
        family = Family(metric.name, metric.documentation, Kind(metric.type))
        for sample in metric.samples:
            family.add(sample.value)
        yield family
