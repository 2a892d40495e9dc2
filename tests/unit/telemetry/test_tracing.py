"""Spans of requests, made from events."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import StatusCode
from support.daemon import wait_until

from kvserver.cache import LookupOutcome
from kvserver.events import Bus, CopyBegan, CopyEnded, InstanceDisconnected, LookupEnded, RequestEnded
from kvserver.protocol.status import SubscriberStatus
from kvserver.telemetry.otlp import resource
from kvserver.telemetry.tracing import Traces

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"
T0 = 1_000_000_000_000  # monotonic nanoseconds at which stories begin


class Kept(SpanExporter):
    """Keeps what it is given, or fails."""

    def __init__(self, fails: bool = False) -> None:
        self.spans: list[ReadableSpan] = []
        self.fails = fails
        self.is_shut = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self.fails:
            raise ConnectionError("no collector is there")
        self.spans += spans
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self.is_shut = True


class Story:
    """Traces, and the events of engines `e` and others."""

    def __init__(self, fails: bool = False, **options: int) -> None:
        self.kept = Kept(fails)
        self.traces = Traces(self.kept, resource("boot"), **options)

    def lookup(self, request: str = "r", at: int = 0, traceparent: str = "", engine: str = "e") -> None:
        self.traces.handle(
            LookupEnded(
                T0 + at + 5, engine, "m", request, T0 + at, b"", LookupOutcome(4, 3), 256, traceparent=traceparent
            )
        )

    def copy(
        self, request: str = "r", at: int = 10, outcome: str = "done", direction: str = "load", device_ns: int = 0
    ) -> None:
        of = ("e", "m", 1, direction, request)
        self.traces.handle(CopyBegan(T0 + at, *of))
        self.traces.handle(CopyEnded(T0 + at + 7, *of, T0 + at, 2, 4096, device_ns, outcome))

    def end(self, request: str = "r", at: int = 100, engine: str = "e") -> None:
        self.traces.handle(RequestEnded(T0 + at, engine, "m", request))

    def spans(self) -> list[ReadableSpan]:
        """All of one request, in order of their beginning. Ends the story."""
        self.traces.close()
        assert self.kept.is_shut
        return sorted(self.kept.spans, key=lambda span: (span.start_time, span.name != "request"))


@pytest.fixture
def story(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Story]]:
    stories: list[Story] = []

    def make(rate: float | None = 1.0, **options: int) -> Story:
        if rate is not None:
            monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
            monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", str(rate))
        stories.append(Story(**options))
        return stories[-1]

    yield make
    for one in stories:
        one.traces.close()


def test_a_store_and_a_load_have_a_child_for_what_the_device_did(story: Callable[..., Story]) -> None:
    it = story()
    it.lookup()
    it.copy(at=10, device_ns=6)
    it.copy(at=50, device_ns=6, outcome="cancelled")
    it.copy(at=90, direction="store", device_ns=600)  # no longer than the whole
    it.end(at=100)
    spans = it.spans()
    wholes = {span.context.span_id: span for span in spans}
    copies = [span for span in spans if span.name == "copy"]
    exported = [
        (wholes[c.parent.span_id].name, c.start_time - spans[0].start_time, c.end_time - c.start_time) for c in copies
    ]
    assert exported == [("load", 11, 6), ("store", 90, 7)]
    assert copies[0].attributes == {"bytes": 4096}


def test_a_request_has_a_child_for_each_step_with_its_times_and_counts(story: Callable[..., Story]) -> None:
    wall_ns = time.time_ns() - time.monotonic_ns()
    it = story()
    it.lookup()
    it.copy(at=10)
    it.copy(at=50, direction="store")
    it.end(at=100)
    request, lookup, load, store = it.spans()
    assert [span.name for span in (request, lookup, load, store)] == ["request", "lookup", "load", "store"]
    assert request.parent is None
    assert request.attributes == {
        "instance_id": "e", "model_name": "m", "request_id": "r",
        "chunks": 4, "hit_chunks": 3, "tokens": 1024, "hit_tokens": 768,
    }  # fmt: skip
    assert lookup.attributes == {"chunks": 4, "hit_chunks": 3, "tokens": 1024, "hit_tokens": 768}
    assert load.attributes == {"rank": 1, "chunks": 2, "bytes": 4096, "device_ns": 0, "outcome": "done"}
    for child, began, ended in ((lookup, 0, 5), (load, 10, 17), (store, 50, 57)):
        assert child.parent is not None
        assert child.parent.span_id == request.context.span_id
        assert child.context.trace_id == request.context.trace_id
        assert (child.start_time - request.start_time, child.end_time - request.start_time) == (began, ended)
        assert child.status.status_code is StatusCode.UNSET
    assert request.end_time - request.start_time == 100
    assert abs(request.start_time - (T0 + wall_ns)) < 60 * 10**9, "monotonic time taken for wall time"
    assert request.resource.attributes["service.name"] == "kvserver"


def test_the_engines_trace_context_is_the_parent_and_decides(story: Callable[..., Story]) -> None:
    it = story(rate=0.0)
    it.lookup("wanted", traceparent=SAMPLED)
    it.lookup("unwanted", traceparent=UNSAMPLED)
    it.lookup("untraced")
    for request in ("wanted", "unwanted", "untraced"):
        it.end(request)
    request, lookup = it.spans()
    assert request.attributes["request_id"] == "wanted"
    assert request.parent.is_remote
    assert f"{request.parent.span_id:016x}" == PARENT
    assert f"{request.context.trace_id:032x}" == f"{lookup.context.trace_id:032x}" == TRACE


def test_request_with_an_unsampled_context_has_no_span(story: Callable[..., Story]) -> None:
    it = story(rate=1.0)
    it.lookup(traceparent=UNSAMPLED)
    it.end()
    assert it.spans() == []


@pytest.mark.parametrize(
    "broken", ["x", "00-0-0-01", f"00-{'0' * 32}-{PARENT}-01", "ff-" + SAMPLED[3:], "\0", "ü" * 55]
)
def test_request_with_a_broken_context_has_a_span_without_parent(story: Callable[..., Story], broken: str) -> None:
    it = story()
    it.lookup(traceparent=broken)
    it.end()
    request, _ = it.spans()
    assert request.parent is None


@pytest.mark.parametrize(("rate", "least", "most"), [(0.25, 400, 600), (None, 1, 43)])
def test_as_many_requests_are_traced_as_the_rate_states(
    story: Callable[..., Story], rate: float | None, least: int, most: int
) -> None:
    it = story(rate=rate, most_requests=2000)
    for number in range(2000):
        it.lookup(f"r{number}")
    traced = it.traces.status().requests
    assert least <= traced <= most, "further than 5 standard deviations from 500, or from 20 where none is given"
    assert it.traces.forgotten == 0


def test_a_copy_that_failed_states_why(story: Callable[..., Story]) -> None:
    it = story()
    it.lookup()
    it.copy(outcome="cancelled")
    it.end()
    _, _, load = it.spans()
    assert load.status.status_code is StatusCode.ERROR
    assert load.status.description == "cancelled"
    assert load.attributes["outcome"] == "cancelled"


def test_a_store_that_ends_after_its_request_still_belongs_to_it(story: Callable[..., Story]) -> None:
    it = story()
    it.lookup()
    it.end(at=20)
    it.copy(at=30, direction="store")
    request, _, store = it.spans()
    assert store.parent.span_id == request.context.span_id
    assert request.end_time - request.start_time == 20


def test_an_id_that_comes_again_is_another_request(story: Callable[..., Story]) -> None:
    it = story()
    it.lookup()
    it.end(at=20)
    it.lookup(at=40)
    it.copy(at=50)
    it.end(at=60)
    it.traces.close()
    # As they ended: each request has its own idea of how far the two clocks are apart, so that starts do not compare.
    _, first, _, load, second = it.kept.spans
    assert (first.name, load.name, second.name) == ("request", "load", "request")
    assert first.context.trace_id != second.context.trace_id
    assert load.parent.span_id == second.context.span_id


def test_a_second_lookup_of_an_open_request_is_another_child(story: Callable[..., Story]) -> None:
    it = story()
    it.lookup()
    it.lookup(at=20)
    it.end(at=60)
    assert [span.name for span in it.spans()] == ["request", "lookup", "lookup"]


def test_copies_of_untraced_requests_are_not_exported(story: Callable[..., Story]) -> None:
    it = story()
    it.copy("never looked up")
    it.copy("")
    it.end("never looked up")
    assert it.spans() == []


def test_requests_of_a_disconnected_engine_end_with_it(story: Callable[..., Story]) -> None:
    it = story()
    it.lookup("its own")
    it.lookup("another's", at=1, engine="other")
    it.traces.handle(InstanceDisconnected(T0 + 30, "e", "m", died=True))
    assert it.traces.status().requests == 1
    its_own = next(span for span in it.spans() if span.attributes.get("request_id") == "its own")
    assert its_own.end_time - its_own.start_time == 30
    assert its_own.status.status_code is StatusCode.ERROR
    assert its_own.status.description == "the engine disconnected"


def test_of_requests_that_never_end_the_oldest_is_forgotten_and_counted(story: Callable[..., Story]) -> None:
    it = story(most_requests=3)
    for number in range(5):
        it.lookup(f"r{number}", at=10 * number)
    assert (it.traces.status().requests, it.traces.forgotten) == (3, 2)
    it.end("r0")
    it.end("r4", at=100)
    ended = {span.attributes["request_id"] for span in it.spans() if span.name == "request"}
    assert ended == {"r2", "r3", "r4"}


def test_requests_that_have_ended_are_not_counted_as_forgotten(story: Callable[..., Story]) -> None:
    it = story(most_requests=3)
    for number in range(50):
        it.lookup(f"r{number}")
        it.end(f"r{number}")
    assert (it.traces.status().requests, it.traces.forgotten) == (3, 0)
    assert len(it.spans()) == 100


def test_requests_that_are_open_at_the_end_are_sent(story: Callable[..., Story]) -> None:
    it = story()
    it.lookup()
    request, _ = it.spans()
    assert request.status.description == "the daemon stopped"


def test_the_collectors_failures_are_counted_and_harm_no_request(story: Callable[..., Story]) -> None:
    it = story(fails=True)
    it.lookup()
    it.end()
    assert it.spans() == []
    status = it.traces.status()
    assert (status.spans, status.sent, status.failed) == (2, 0, 2)
    assert status.last_error == "ConnectionError: no collector is there"


def test_traces_follow_a_bus(story: Callable[..., Story]) -> None:
    it = story()
    bus = Bus([it.traces])
    bus.start()
    bus.publish(LookupEnded(T0 + 5, "e", "m", "r", T0, b"", LookupOutcome(4, 3), 256, traceparent=SAMPLED))
    bus.publish(RequestEnded(T0 + 9, "e", "m", "r"))
    assert bus.flush()
    assert it.traces.status().spans == 2
    bus.close()
    wait_until(lambda: len(it.kept.spans) == 2)
    assert bus.status().subscribers == [SubscriberStatus(name="traces")]
