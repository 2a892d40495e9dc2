"""Export to an OpenTelemetry collector: the metrics, and the exporter of traces.

A collector that is down or hangs costs a counted failure: only threads of this module wait. Only a daemon with an endpoint
imports this module: its imports cost time and memory. Families without points are not sent: OTLP has no form for them that
collectors accept.

Owns: the thread that reads the families and sends them, the exporters, the counts of what was sent and what failed. Refuses to
know: where values come from.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import requests
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import (
    OTEL_EXPORTER_OTLP_METRICS_ENDPOINT,
    OTEL_EXPORTER_OTLP_TIMEOUT,
    OTEL_EXPORTER_OTLP_TRACES_ENDPOINT,
    OTEL_METRIC_EXPORT_INTERVAL,
)
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from kvserver import __version__
from kvserver.config import OtlpEndpoint, without_user
from kvserver.protocol import Buckets, ConfigError
from kvserver.protocol.status import OtlpStatus
from kvserver.telemetry.families import Family, Kind

log = logging.getLogger(__name__)

CLOSE_SECONDS = 2.0  # for the last values at the end of the daemon
# For ids made of names: https://opentelemetry.io/docs/specs/semconv/registry/attributes/service/
_INSTANCE_IDS = uuid.UUID("4d63009a-8d0f-11ee-aad7-4c796ed8e320")
_UNITS = {"seconds": "s", "bytes": "By"}  # by the last word of a name


# ---- deliveries -------------------------------------------------------------------------------


class _ExporterLog(logging.Handler):
    """The exporters' log lines, kept per thread: they alone state why an export failed, and are too many to be shown."""

    def __init__(self) -> None:
        super().__init__()
        self._of_thread = threading.local()
        logger = logging.getLogger("opentelemetry")
        logger.addHandler(self)
        logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        self._of_thread.text = record.getMessage()

    def drain_text(self) -> str:
        """The last line of this thread; empty until there is another."""
        text: str = getattr(self._of_thread, "text", "")
        self._of_thread.text = ""
        return text


_exporter_log = _ExporterLog()

# One export at a time, and a garbage collection after each: errors hold the whole message in reference
# cycles, and the loop, which looks for garbage every second, does so only among what is younger than that.
_sending = threading.Lock()


class Delivery:
    """Counter of sent and failed items. An outage is logged once, and its end. Written by one thread."""

    def __init__(self, what: str) -> None:
        self.sent = 0
        self.failed = 0
        self.last_error = ""
        self._what = what
        self._down = False

    def attempt(self, send: Callable[[], bool], count: int = 1) -> bool:
        """Call `send` and count the result; return whether it succeeded. Any exception is a failure."""
        _exporter_log.drain_text()
        with _sending:
            try:
                ok, error = send(), ""
            except Exception as caught:
                ok, error = False, f"{type(caught).__name__}: {caught}"
            gc.collect(1)
        if ok:
            self.sent += count
        else:
            self.failed += count
            self.last_error = (_exporter_log.drain_text() or error or self.last_error)[:500]
        if not ok and not self._down:
            log.warning("%s do not reach the collector (logged once for each outage): %s", self._what, self.last_error)
        elif ok and self._down:
            log.info("%s reach the collector again", self._what)
        self._down = not ok
        return ok


# ---- exporters --------------------------------------------------------------------------------


class _Session(requests.Session):
    """Tries once: the exporter takes an OSError for final. The next values come soon."""

    def request(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().request(*args, **kwargs)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        raise OSError(text)


def metric_exporter(endpoint: OtlpEndpoint) -> MetricExporter:
    """ConfigError if OTEL_EXPORTER_OTLP_TIMEOUT is invalid; span_exporter() likewise."""
    url = os.environ.get(OTEL_EXPORTER_OTLP_METRICS_ENDPOINT, "")
    if endpoint.grpc:
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as OverGrpc

        return OverGrpc(**_grpc_target(endpoint, url), timeout=_answer_seconds())
    return OTLPMetricExporter(url or f"{endpoint.base}/v1/metrics", timeout=_answer_seconds(), session=_Session())


def span_exporter(endpoint: OtlpEndpoint) -> SpanExporter:
    url = os.environ.get(OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, "")
    if endpoint.grpc:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as OverGrpc

        return OverGrpc(**_grpc_target(endpoint, url), timeout=_answer_seconds())
    return OTLPSpanExporter(url or f"{endpoint.base}/v1/traces", timeout=_answer_seconds(), session=_Session())


def _grpc_target(endpoint: OtlpEndpoint, url: str) -> dict[str, Any]:
    """`url`: of the signal alone, or ""."""
    if url:
        return {"endpoint": url, "insecure": url.startswith("http://")}
    return {"endpoint": endpoint.base, "insecure": not endpoint.tls}


def _answer_seconds() -> float:
    """Time-out for connecting, and for the answer. In seconds, as OpenTelemetry's own exporters for Python read the variable."""
    return _from_environment(OTEL_EXPORTER_OTLP_TIMEOUT, 5.0, (0.1, 300), "seconds")


def _from_environment(name: str, default: float, bounds: tuple[float, float], unit: str) -> float:
    text = os.environ.get(name) or str(default)
    least, most = bounds
    try:
        if least <= (number := float(text)) <= most:
            return number
    except ValueError:
        pass
    raise ConfigError(f"{name} {text!r}: write {least} to {most} {unit}")


class CountedSpans(SpanExporter):
    """Wrapper that counts another exporter's spans."""

    def __init__(self, exporter: SpanExporter, delivery: Delivery) -> None:
        self._exporter = exporter
        self._delivery = delivery

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        done = self._delivery.attempt(lambda: self._exporter.export(spans) is SpanExportResult.SUCCESS, len(spans))
        return SpanExportResult.SUCCESS if done else SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self._exporter.shutdown()


def resource(endpoint: str) -> Resource:
    """The sender, by the endpoint for engines. OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win, as in any SDK."""
    ours = {"service.name": "kvserver", "service.version": __version__, "service.instance.id": _instance_id(endpoint)}
    return Resource.create(ours).merge(OTELResourceDetector().detect())


def _instance_id(endpoint: str) -> str:
    """An id that stays after a restart, and that no other daemon of the machine has.

    Pods of one name in two clusters would have the same: their OTEL_RESOURCE_ATTRIBUTES name another (deploy/kubernetes).
    """
    with contextlib.suppress(OSError):
        endpoint += "\n" + Path("/etc/machine-id").read_text().strip()
    return str(uuid.uuid5(_INSTANCE_IDS, f"{socket.gethostname()}\n{endpoint}"))


# ---- metrics ----------------------------------------------------------------------------------


class OtlpMetrics:
    """Sender of the families: at once and then every interval, from start() until close()."""

    def __init__(self, endpoint: OtlpEndpoint, sender: Resource) -> None:
        """ConfigError if a variable of OpenTelemetry is invalid."""
        self._endpoint = endpoint
        self._exporter = metric_exporter(endpoint)
        self._sender = sender
        millis = _from_environment(OTEL_METRIC_EXPORT_INTERVAL, 15000, (100, 3_600_000), "milliseconds")
        self._interval_seconds = millis / 1000
        self._starts = _Starts(time.time_ns())
        self._delivery = Delivery("metrics over OTLP")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)

    def start(self, read: Callable[[], Iterable[Family]]) -> None:
        self._read = read
        self._thread.start()

    def close(self, last: Iterable[Family]) -> None:
        """Send these as well, then end; gives up after CLOSE_SECONDS. A thread that hangs then holds on to nothing."""
        self._read = lambda: last
        self._stop.set()
        self._thread.join(CLOSE_SECONDS)
        self._exporter.shutdown(timeout_millis=100)

    def status(self) -> OtlpStatus:
        sent = self._delivery
        return OtlpStatus(
            endpoint=without_user(self._endpoint.base), sent=sent.sent, failed=sent.failed, last_error=sent.last_error
        )

    def _run(self) -> None:
        self._delivery.attempt(self._send)
        while not self._stop.wait(self._interval_seconds):
            self._delivery.attempt(self._send)
        self._delivery.attempt(self._send)

    def _send(self) -> bool:
        now_ns = time.time_ns()  # before it is read: what is counted meanwhile is not from before a series' start
        data = metrics_data(list(self._read()), self._sender, self._starts, now_ns)
        return self._exporter.export(data) is MetricExportResult.SUCCESS


Series: TypeAlias = tuple[str, tuple[str, ...]]  # name and label values


class _Starts:
    """Since when each counter and histogram counts, in wall time.

    A series that was not there the last time, or that fell, starts over: with an instance that registered, or registered again
    after its series had ended. It counts since the last time.
    """

    def __init__(self, began_ns: int) -> None:
        self._last_ns = began_ns
        self._series: dict[Series, tuple[int, float]] = {}  # of the last time: start and value

    def look_at(self, families: Iterable[Family], now_ns: int) -> None:
        """Note the families that are sent now."""
        seen = {}
        for family in families:
            for labels, value in family.points:
                number = sum(value.counts) if isinstance(value, Buckets) else value
                start_ns, before = self._series.get((family.name, labels), (self._last_ns, 0.0))
                fell = number < before and family.kind is not Kind.GAUGE
                seen[family.name, labels] = (self._last_ns if fell else start_ns, number)
        self._last_ns, self._series = now_ns, seen

    def of(self, name: str, labels: tuple[str, ...]) -> int:
        return self._series[name, labels][0]


def metrics_data(families: Sequence[Family], sender: Resource, starts: _Starts, now_ns: int) -> MetricsData:
    """`now_ns` is wall time."""
    starts.look_at(families, now_ns)
    metrics = [_metric(family, starts, now_ns) for family in families if family.points]
    scope = ScopeMetrics(InstrumentationScope("kvserver", __version__), metrics, "")
    return MetricsData([ResourceMetrics(sender, [scope], "")])


def _metric(family: Family, starts: _Starts, now_ns: int) -> Metric:
    points = [
        (dict(zip(family.labels, labels, strict=True)), starts.of(family.name, labels), value)
        for labels, value in family.points
    ]
    if family.kind is Kind.HISTOGRAM:
        histograms = [_histogram(labels, cast(Buckets, f), family.bounds, began, now_ns) for labels, began, f in points]
        data: Histogram | Gauge | Sum = Histogram(histograms, AggregationTemporality.CUMULATIVE)
    else:
        numbers = [
            NumberDataPoint(labels, began, now_ns, value)
            for labels, began, value in points
            if not isinstance(value, Buckets) and math.isfinite(value)
        ]
        counts = family.kind is Kind.COUNTER
        data = Sum(numbers, AggregationTemporality.CUMULATIVE, is_monotonic=True) if counts else Gauge(numbers)
    return Metric(family.name, family.help, _UNITS.get(family.name.rpartition("_")[2], ""), data)


def _histogram(
    labels: Mapping[str, str], buckets: Buckets, bounds: tuple[float, ...], began_ns: int, now_ns: int
) -> HistogramDataPoint:
    unknown = cast(float, None)  # the least and the largest; optional in OTLP, and the encoder leaves None out
    return HistogramDataPoint(
        labels, began_ns, now_ns, sum(buckets.counts), buckets.sum, buckets.counts, bounds, min=unknown, max=unknown
    )
