"""Over OTLP every series began with the daemon, also those that had ended and begun anew with an instance that returned: a collector
takes a sum that falls under an unchanged start for a fault."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from support.collector import Collected, labels_of, over_http
from support.daemon import wait_until

from kvserver.config import parse_otlp_endpoint
from kvserver.protocol import Buckets
from kvserver.telemetry import Family, Kind
from kvserver.telemetry.otlp import OtlpMetrics, resource


class Sent:
    """Metrics of a made-up source, one round at a time, as a collector got them."""

    def __init__(self, collector: Collected) -> None:
        self.collector = collector
        self.families: list[Family] = []

    def read(self) -> list[Family]:
        return self.families

    def round(self, **values: float | Buckets) -> dict[str, Any]:
        """Their points, by instance, after these values were sent: counters, histograms of Buckets."""
        counter = Family("kvserver_lookups", "", Kind.COUNTER, ("instance_id",))
        histogram = Family("kvserver_waits_seconds", "", Kind.HISTOGRAM, ("instance_id",), bounds=(1.0,))
        for instance, value in values.items():
            (histogram if isinstance(value, Buckets) else counter).add(value, instance)
        self.families = [counter, histogram]
        before = len(self.collector.metrics)
        wait_until(lambda: len(self.collector.metrics) >= before + 2)  # one may have been read before
        metrics = self.collector.latest().values()
        points = [p for m in metrics for p in (*m.sum.data_points, *m.histogram.data_points)]
        return {labels_of(point)["instance_id"]: point for point in points}


@contextlib.contextmanager
def sending() -> Iterator[Sent]:
    with over_http() as collector:
        sent = Sent(collector)
        endpoint = parse_otlp_endpoint(collector.url)
        assert endpoint is not None
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
            metrics = OtlpMetrics(endpoint, resource("boot"))
        metrics.start(sent.read)
        try:
            yield sent
        finally:
            metrics.close([])


def restarted(first: dict[str, Any], then: dict[str, Any], name: str) -> bool:
    """Whether the series began anew, and not before the value that it had."""
    assert then[name].start_time_unix_nano < then[name].time_unix_nano
    if then[name].start_time_unix_nano == first[name].start_time_unix_nano:
        return False
    assert then[name].start_time_unix_nano >= first[name].time_unix_nano
    return True


def test_a_series_that_goes_on_keeps_its_start() -> None:
    with sending() as sent:
        first = sent.round(a=5, h=Buckets([1, 0], 0.5))
        then = sent.round(a=6, h=Buckets([1, 1], 3.5))
        assert not restarted(first, then, "a")
        assert not restarted(first, then, "h")


def test_a_series_that_ended_and_returned_has_another_start() -> None:
    with sending() as sent:
        first = sent.round(a=5, b=5, h=Buckets([1, 0], 0.5))
        sent.round(b=5)
        then = sent.round(a=9, b=6, h=Buckets([4, 0], 0.5))
        assert (restarted(first, then, "a"), restarted(first, then, "h")) == (True, True)
        assert not restarted(first, then, "b")


def test_a_series_that_fell_between_two_rounds_has_another_start() -> None:
    with sending() as sent:
        first = sent.round(a=5, b=5, h=Buckets([3, 1], 9.0))
        then = sent.round(a=2, b=5, h=Buckets([1, 0], 0.5))
        assert (restarted(first, then, "a"), restarted(first, then, "h")) == (True, True)
        assert not restarted(first, then, "b")
        later = sent.round(a=3, b=5, h=Buckets([2, 0], 0.6))
        assert not restarted(then, later, "a")


def test_series_that_appears_later_starts_after_the_round_before_it() -> None:
    with sending() as sent:
        first = sent.round(a=5)
        then = sent.round(a=5, b=1)
        assert then["b"].start_time_unix_nano >= first["a"].time_unix_nano
