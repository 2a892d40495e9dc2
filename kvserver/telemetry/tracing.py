"""Spans: one for each traced request, with children for its lookups, stores and loads, and in those for the copy.

A request begins with its first lookup, whose trace context is the parent. It ends when the engine reports its end or disconnects;
its span has the facts of `explain` at that time. Copies that end later still belong to it. A copy that was refused is a child
without a duration. Requests that are not sampled are not remembered.

Owns: the open requests, the span processor. Refuses to know: how spans get to the collector (`otlp`). Runs in the bus's thread.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from opentelemetry.sdk.environment_variables import OTEL_TRACES_SAMPLER
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import Attributes

from kvserver import __version__
from kvserver.events import CopyEnded, CopyRefused, Event, InstanceDisconnected, LookupEnded, RequestEnded, Subscriber
from kvserver.protocol.status import TracesStatus
from kvserver.telemetry.benefit import COPY_BUCKETS, PHASES
from kvserver.telemetry.families import Exemplar, Labels
from kvserver.telemetry.otlp import CLOSE_SECONDS, CountedSpans, Delivery

_USUAL_SAMPLER = ParentBased(TraceIdRatioBased(0.01))
MOST_REQUESTS = 4096  # remembered, traced ones only; beyond them the oldest is forgotten


@dataclass(slots=True)
class _Request:
    span: Span
    wall_ns: int  # what wall time was ahead of monotonic time when it began: its spans agree, whatever the clock does
    ended: bool = False  # remembered on, for copies that end late


class Traces(Subscriber):
    name = "traces"
    handles = frozenset({LookupEnded, CopyEnded, CopyRefused, RequestEnded, InstanceDisconnected})

    def __init__(
        self,
        exporter: SpanExporter,
        sender: Resource,
        most_requests: int = MOST_REQUESTS,
        attributes: Callable[[str, str], Attributes] = lambda instance_id, request_id: None,
    ) -> None:
        """`attributes`: what is known at its end of the request of an instance."""
        self._attributes = attributes
        self.forgotten = 0  # requests that did not end while they were remembered: their own span is not sent
        self.exemplars: dict[str, dict[Labels, dict[int, Exemplar]]] = {}  # by family; read by any thread
        self._spans = 0  # ended; those not sent, failed or waiting were too many for the processor
        self._most = most_requests
        self._delivery = Delivery("traces over OTLP")
        self._requests: OrderedDict[tuple[str, str], _Request] = OrderedDict()  # by instance id and request id
        self._context = TraceContextTextMapPropagator()
        sampler = None if os.environ.get(OTEL_TRACES_SAMPLER) else _USUAL_SAMPLER  # None: the one of the environment
        self._provider = TracerProvider(sampler, sender, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(CountedSpans(exporter, self._delivery)))
        self._tracer = self._provider.get_tracer("kvserver", __version__)

    def handle(self, event: Event) -> None:
        match event:
            case LookupEnded():
                self._looked_up(event)
            case CopyEnded():
                self._copied(event)
            case CopyRefused():
                if (request := self._requests.get((event.instance_id, event.request_id))) is not None:
                    at = event.time_ns
                    self._child(request, event.direction, at, at, {"rank": event.rank}, event.code)
            case RequestEnded():
                self._end((event.instance_id, event.request_id), event.time_ns)
            case InstanceDisconnected():
                for name in [name for name in self._requests if name[0] == event.instance_id]:
                    self._end(name, event.time_ns, "the engine disconnected")
                    del self._requests[name]
                for family, found in self.exemplars.items():
                    self.exemplars[family] = {at: of for at, of in found.items() if at[0] != event.instance_id}

    def close(self) -> None:
        """End open requests and send waiting spans; give up after CLOSE_SECONDS."""
        for name in list(self._requests):
            self._end(name, time.monotonic_ns(), "the daemon stopped")
        self._requests.clear()
        ending = threading.Thread(target=self._provider.shutdown, name="last traces", daemon=True)
        ending.start()
        ending.join(CLOSE_SECONDS)

    def status(self) -> TracesStatus:
        sent = self._delivery
        return TracesStatus(
            requests=len(self._requests),
            forgotten=self.forgotten,
            spans=self._spans,
            sent=sent.sent,
            failed=sent.failed,
            last_error=sent.last_error,
        )

    # ---- inside -------------------------------------------------------------------------------

    def _looked_up(self, event: LookupEnded) -> None:
        name = (event.instance_id, event.request_id)
        found = {
            "chunks": event.outcome.chunks,
            "hit_chunks": event.outcome.hit_chunks,
            "tokens": event.tokens,
            "hit_tokens": event.hit_tokens,
        }
        request = self._requests.get(name)
        if request is None or request.ended:
            request = self._begin(name, event, found)
        if request is not None:
            self._child(request, "lookup", event.began_ns, event.time_ns, found)

    def _begin(self, name: tuple[str, str], event: LookupEnded, found: Mapping[str, int]) -> _Request | None:
        """Span of a request that begins with this lookup; None if it is not sampled."""
        wall_ns = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(
            "request",
            self._context.extract({"traceparent": event.traceparent}) if event.traceparent else None,
            SpanKind.SERVER,
            {"instance_id": name[0], "request_id": name[1], "model_name": event.model_name, **found},
            start_time=event.began_ns + wall_ns,
        )
        self._requests.pop(name, None)
        if not span.is_recording():
            return None
        if len(self._requests) >= self._most:
            _, oldest = self._requests.popitem(last=False)
            self.forgotten += not oldest.ended
        request = self._requests[name] = _Request(span, wall_ns)
        return request

    def _copied(self, event: CopyEnded) -> None:
        request = self._requests.get((event.instance_id, event.request_id))
        if request is None:
            return
        attributes: dict[str, str | int] = {
            "rank": event.rank,
            "chunks": event.chunks,
            "bytes": event.bytes,
            "device_ns": event.device_ns,
            "outcome": event.outcome,
        }
        failure = "" if event.outcome == "done" else event.outcome
        whole = self._child(request, event.direction, event.began_ns, event.time_ns, attributes, failure)
        if not failure:
            self._note_exemplars(event, whole)
        if event.device_ns and not failure:  # when the device was at it, as far as its end is the end
            copied_ns = max(event.began_ns, event.time_ns - event.device_ns)
            self._child(request, "copy", copied_ns, event.time_ns, {"bytes": event.bytes}, parent=whole)

    def _note_exemplars(self, event: CopyEnded, span: Span) -> None:
        """Remember the span as the last one of its buckets. Nothing is changed in place: other threads read."""
        copy, waited = event.device_ns * 1e-9, event.waited_ns * 1e-9
        family, ids = f"kvserver_{event.direction}_duration_seconds", span.get_span_context()
        found = dict(self.exemplars.get(family, {}))
        for phase, value in zip(PHASES, (max(0.0, waited - copy), copy), strict=True):
            at = event.instance_id, event.model_name, phase
            exemplar = Exemplar(value, time.time(), ids.trace_id, ids.span_id)
            found[at] = found.get(at, {}) | {bisect_left(COPY_BUCKETS, value): exemplar}
        self.exemplars[family] = found

    def _child(
        self,
        request: _Request,
        name: str,
        began_ns: int,
        ended_ns: int,
        attributes: Mapping[str, str | int],
        failure: str = "",
        parent: Span | None = None,
    ) -> Span:
        """Child span of the request, or of another child of it."""
        context = set_span_in_context(parent or request.span)
        span = self._tracer.start_span(name, context, attributes=attributes, start_time=began_ns + request.wall_ns)
        if failure:
            span.set_status(Status(StatusCode.ERROR, failure))
        span.end(ended_ns + request.wall_ns)
        self._spans += 1
        return span

    def _end(self, name: tuple[str, str], time_ns: int, failure: str = "") -> None:
        request = self._requests.get(name)
        if request is None or request.ended:
            return
        request.ended = True
        request.span.set_attributes(self._attributes(*name) or {})
        if failure:
            request.span.set_status(Status(StatusCode.ERROR, failure))
        request.span.end(time_ns + request.wall_ns)
        self._spans += 1
