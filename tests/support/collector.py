"""An OpenTelemetry collector for tests: a real server over HTTP or gRPC that keeps what it was sent."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics_service
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_rpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace_service
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_rpc
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from .ports import reserved_port
from .tls import Authority


@dataclass
class Collected:
    """What has come. `answer`: the HTTP code of what comes next."""

    url: str = ""
    metrics: list[Any] = field(default_factory=list)  # ExportMetricsServiceRequest
    traces: list[Any] = field(default_factory=list)  # ExportTraceServiceRequest
    answer: int = 200

    def resources(self) -> list[dict[str, str]]:
        """The attributes of every sender."""
        found = [r.resource for m in self.metrics for r in m.resource_metrics]
        found += [r.resource for t in self.traces for r in t.resource_spans]
        return [{a.key: a.value.string_value for a in resource.attributes} for resource in found]

    def latest(self) -> dict[str, Metric]:
        """The metrics that arrived last, by name."""
        if not self.metrics:
            return {}
        found = [m for r in self.metrics[-1].resource_metrics for scope in r.scope_metrics for m in scope.metrics]
        by_name = {metric.name: metric for metric in found}
        assert len(by_name) == len(found), "a metric was sent twice"
        return by_name

    def counter(self, name: str, **labels: str) -> float | None:
        """Its last value; None if there is no such point."""
        metric = self.latest().get(name)
        for point in metric.sum.data_points if metric else ():
            if labels_of(point) == labels:
                return float(point.as_int or point.as_double)
        return None

    def spans(self) -> list[Span]:
        return [s for t in self.traces for r in t.resource_spans for scope in r.scope_spans for s in scope.spans]


def labels_of(point: Any) -> dict[str, str]:
    return {attribute.key: attribute.value.string_value for attribute in point.attributes}


@contextlib.contextmanager
def over_http(port: int = 0) -> Iterator[Collected]:
    """OTLP over HTTP on a port of this machine."""
    collected = Collected()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.headers["Content-Type"] == "application/x-protobuf"
            answer = collected.answer
            if answer != 200:
                pass
            elif self.path == "/v1/metrics":
                collected.metrics.append(metrics_service.ExportMetricsServiceRequest.FromString(body))
            elif self.path == "/v1/traces":
                collected.traces.append(trace_service.ExportTraceServiceRequest.FromString(body))
            else:
                answer = 404
            self.send_response(answer)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    collected.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield collected
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def over_grpc(authority: Authority | None = None) -> Iterator[Collected]:
    """OTLP over gRPC on a port of this machine. `authority`: with TLS, and a certificate of it."""
    collected = Collected()

    class Metrics(metrics_rpc.MetricsServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            collected.metrics.append(request)
            return metrics_service.ExportMetricsServiceResponse()

    class Traces(trace_rpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:
            collected.traces.append(request)
            return trace_service.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    metrics_rpc.add_MetricsServiceServicer_to_server(Metrics(), server)
    trace_rpc.add_TraceServiceServicer_to_server(Traces(), server)
    if authority is None:
        collected.url = f"grpc://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    else:
        certificate, key = (path.read_bytes() for path in authority.certificate())
        credentials = grpc.ssl_server_credentials([(key, certificate)])
        collected.url = f"grpcs://127.0.0.1:{server.add_secure_port('127.0.0.1:0', credentials)}"
    server.start()
    try:
        yield collected
    finally:
        server.stop(None).wait()


@contextlib.contextmanager
def that_hangs() -> Iterator[str]:
    """host:port of a server that accepts connections and never sends a byte."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(16)  # the kernel accepts them
        yield f"127.0.0.1:{server.getsockname()[1]}"


@contextlib.contextmanager
def that_is_down() -> Iterator[str]:
    """host:port where no socket listens."""
    reservation, port = reserved_port()
    with reservation:
        yield f"127.0.0.1:{port}"
