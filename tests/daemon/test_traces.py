"""Traces of a daemon, and of the subscriber alone, at real OpenTelemetry collectors."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from support.collector import Collected, labels_of, over_grpc, over_http, that_hangs, that_is_down
from support.daemon import wait_until
from support.registration import identity
from support.worker import Worker, make_keys

from kvserver.cache import LookupOutcome
from kvserver.config import parse_otlp_endpoint
from kvserver.events import CopyEnded, LookupEnded, RequestEnded
from kvserver.telemetry.otlp import resource, span_exporter
from kvserver.telemetry.tracing import Traces

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = f"00-{TRACE}-{PARENT}-01"
AT_ONCE = {"OTEL_BSP_SCHEDULE_DELAY": "20"}  # milliseconds that spans gather
ALL = {"OTEL_TRACES_SAMPLER": "always_on"}
ALL_AT_ONCE = AT_ONCE | ALL
IMPATIENT = {"OTEL_EXPORTER_OTLP_TIMEOUT": "0.5"}  # seconds


def traces_to(url: str) -> Traces:
    endpoint = parse_otlp_endpoint(url)
    assert endpoint is not None
    return Traces(span_exporter(endpoint), resource("boot"))


def one_request(traces: Traces, request_id: str = "r") -> None:
    now = time.monotonic_ns()
    traces.handle(LookupEnded(now + 10, "e", "m", request_id, now, b"", LookupOutcome(4, 3), 256, traceparent=SAMPLED))
    traces.handle(CopyEnded(now + 90, "e", "m", 0, "load", request_id, now + 20, 3, 4096, 60, "done"))
    traces.handle(RequestEnded(now + 100, "e", "m", request_id))


# ---- the subscriber alone ---------------------------------------------------------------------


@pytest.mark.parametrize("collector", [over_http, over_grpc])
def test_spans_arrive_with_their_parents_times_and_attributes(collector: Callable[[], Any]) -> None:
    with collector() as collected:
        traces = traces_to(collected.url)
        one_request(traces)
        traces.close()
        spans = {span.name: span for span in collected.spans()}
        assert spans.keys() == {"request", "lookup", "load", "copy"}
        request = spans["request"]
        assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, PARENT)
        for name, of, began, ended in (
            ("lookup", request, 0, 10),
            ("load", request, 20, 90),
            ("copy", spans["load"], 30, 90),
        ):
            child = spans[name]
            assert (child.trace_id, child.parent_span_id) == (request.trace_id, of.span_id)
            assert child.start_time_unix_nano - request.start_time_unix_nano == began
            assert child.end_time_unix_nano - request.start_time_unix_nano == ended
        assert labels_of(request).items() >= {"instance_id": "e", "model_name": "m", "request_id": "r"}.items()
        assert {a.key: a.value.int_value for a in spans["load"].attributes}["device_ns"] == 60
        assert (traces.status().sent, traces.status().failed) == (4, 0)


@pytest.mark.parametrize("scheme", ["http", "grpc"])
@pytest.mark.parametrize("fault", ["is down", "hangs"])
def test_a_collector_that_is_not_there_holds_up_nothing(
    monkeypatch: pytest.MonkeyPatch, scheme: str, fault: str
) -> None:
    monkeypatch.setenv(*next(iter(IMPATIENT.items())))
    with contextlib.ExitStack() as at_end:
        address = at_end.enter_context(that_is_down() if fault == "is down" else that_hangs())
        traces = traces_to(f"{scheme}://{address}")
        one_request(traces)
        traces.close()
        wait_until(lambda: traces.status().failed == 4, 30)
        assert traces.status().sent == 0


# ---- a daemon ---------------------------------------------------------------------------------


def traced_request(worker: Worker, request_id: str, traceparent: str = "") -> None:
    """A lookup, a store and a load of a request, and its end."""
    keys = make_keys(2)
    worker.store(keys, worker.blocks_for(2), request_id=request_id + "-before")
    assert worker.lookup(keys, request_id, traceparent=traceparent) == 2
    worker.load(keys, worker.blocks_for(2, first=1 + 2 * worker.chunk_blocks), request_id=request_id)
    worker.store(make_keys(1), worker.blocks_for(1), request_id=request_id)
    worker.end_request(request_id)


def names(collected: Collected) -> list[str]:
    return sorted(span.name for span in collected.spans())


def test_a_daemon_traces_a_request_from_lookup_to_end(make_daemon, make_worker):
    with over_http() as collector:
        daemon = make_daemon(
            otlp_endpoint=collector.url, env={**AT_ONCE, "OTEL_TRACES_SAMPLER": "parentbased_always_off"}
        )
        worker = make_worker(daemon)
        assert worker.hello.traces, "engines are asked to name requests"
        before_ns = time.time_ns()
        traced_request(worker, "traced", SAMPLED)
        traced_request(worker, "not traced")
        wait_until(lambda: names(collector) == ["copy", "copy", "load", "lookup", "request", "store"])
        spans = {span.name: span for span in collector.spans()}
        request = spans["request"]
        assert request.parent_span_id.hex() == PARENT
        assert {span.trace_id.hex() for span in spans.values()} == {TRACE}
        assert labels_of(request).items() >= {"instance_id": worker.instance_id, "request_id": "traced"}.items()
        assert {a.key: a.value.int_value for a in spans["load"].attributes}["bytes"] == 2 * worker.chunk_bytes
        for span in spans.values():
            assert before_ns <= span.start_time_unix_nano <= span.end_time_unix_nano <= time.time_ns()
        assert "request_id" not in daemon.http("/metrics")[1]
        wait_until(lambda: daemon.status()["traces"]["sent"] == 6)
        assert daemon.metric("kvserver_otlp_sent_total", signal="traces") == 6
        assert daemon.metric("kvserver_otlp_failed_total", signal="traces") == 0
        assert daemon.metric("kvserver_trace_spans_total") == 6
        assert daemon.metric("kvserver_trace_forgotten_requests_total") == 0
        assert daemon.terminate() == 0


def test_the_span_of_a_request_states_what_was_missing_and_which_fields_differ(make_daemon, make_worker):
    with over_http() as collector:
        daemon = make_daemon(otlp_endpoint=collector.url, env=ALL_AT_ONCE)
        keys = make_keys(2)
        owner = make_worker(daemon)
        owner.store(keys, owner.blocks_for(2))
        worker = make_worker(daemon, identity=identity(dtype="float16"))
        assert worker.lookup(keys, "r", tokens=130) == 0
        assert worker.error_of(worker.load_message(keys, worker.blocks_for(2), request_id="r")).code == "not_found"
        worker.end_request("r", prompt_tokens=130, loads=1, failed_loads=1)
        wait_until(lambda: "request" in {span.name for span in collector.spans()})
        spans = {span.name: span for span in collector.spans()}
        values = {a.key: a.value for a in spans["request"].attributes}
        numbers = {key: value.int_value for key, value in values.items() if key.endswith("_tokens")}
        assert numbers["prompt_tokens"] == numbers["computed_tokens"] == 130
        assert (numbers["l0_tokens"], numbers["l1_tokens"], numbers["l2_tokens"]) == (0, 0, 0)
        assert (values["outcome"].string_value, values["miss_reason"].string_value) == (
            "load_failed",
            "other_namespace",
        )
        assert (values["missing_chunk"].int_value, values["missing_token"].int_value) == (0, 0)
        assert [value.string_value for value in values["differing_fields"].array_value.values] == ["dtype"]
        assert spans["load"].status.message == "not_found"


def test_a_daemon_without_a_collector_requests_no_names(make_daemon, make_worker):
    daemon = make_daemon(env=ALL)
    assert not make_worker(daemon).hello.traces
    for name in ("otlp_sent", "otlp_failed"):
        assert [daemon.metric(f"kvserver_{name}_total", signal=signal) for signal in ("metrics", "traces")] == [0, 0]
    assert daemon.metric("kvserver_trace_spans_total") == 0
    assert "traces" not in [s["name"] for s in daemon.status()["events"]["subscribers"]]


def test_spans_that_wait_are_sent_when_the_daemon_stops(make_daemon, make_worker):
    with over_http() as collector:
        daemon = make_daemon(otlp_endpoint=collector.url, env={**ALL, "OTEL_BSP_SCHEDULE_DELAY": "60000"})
        traced_request(make_worker(daemon), "r")
        assert daemon.terminate() == 0
        assert names(collector) == ["copy", "copy", "load", "lookup", "request", "store"]


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_a_daemon_whose_traces_hang_serves(make_daemon, make_worker, scheme):
    with that_hangs() as address:
        daemon = make_daemon(otlp_endpoint=f"{scheme}://{address}", env=ALL_AT_ONCE | IMPATIENT)
        worker = make_worker(daemon)

        def failed() -> bool:
            worker.round_trip()
            status = daemon.status()
            assert status["events"]["dropped"] == 0
            return status["traces"]["failed"] >= 1

        wait_until(failed, 30)


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_a_daemon_stops_though_its_collector_has_minutes_to_answer(make_daemon, make_worker, scheme):
    with that_hangs() as address:
        daemon = make_daemon(
            otlp_endpoint=f"{scheme}://{address}", env=ALL_AT_ONCE | {"OTEL_EXPORTER_OTLP_TIMEOUT": "300"}
        )
        make_worker(daemon).round_trip()
        wait_until(lambda: daemon.metric("kvserver_trace_spans_total"))
        assert daemon.terminate(120) == 0


# ---- memory -----------------------------------------------------------------------------------

# In a process of its own, set up as a daemon is: nothing looks for reference cycles but among what is young.
PROGRAM = """
import gc, sys, threading
from kvserver.telemetry import otlp
from kvserver.config import parse_otlp_endpoint
from kvserver.telemetry.families import Family, Kind

stop = threading.Event()
def families():
    if failed() >= 8:
        stop.set()
    return [Family(f"kvserver_{n}", "Text.", Kind.COUNTER, ("label",)).add(n, "x") for n in range(100)]
def failed():
    return sender.status().failed
sender = otlp.OtlpMetrics(parse_otlp_endpoint(sys.argv[1]), otlp.resource("boot"))
gc.collect()
gc.freeze()
gc.disable()
sender.start(families)
while not stop.wait(0.03):
    gc.collect(0)
sender.close(families())
print(failed(), gc.collect())
"""


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_failures_leave_no_garbage_that_a_daemon_does_not_find(scheme: str) -> None:
    with that_hangs() as address:
        run = subprocess.run(
            [sys.executable, "-c", PROGRAM, f"{scheme}://{address}"], capture_output=True, text=True, timeout=60, check=False,
            env={**os.environ, "OTEL_METRIC_EXPORT_INTERVAL": "100", "OTEL_EXPORTER_OTLP_TIMEOUT": "0.1"},
        )  # fmt: skip
    assert run.returncode == 0, run.stderr
    failures, garbage = map(int, run.stdout.split())
    assert failures >= 8
    assert garbage < 300, "less than the metrics of one attempt"
