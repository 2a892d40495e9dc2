"""A daemon's metrics and traces over OTLP, to a collector that is there, is down for a while, or hangs."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import time
from typing import Any

import pytest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AGGREGATION_TEMPORALITY_CUMULATIVE
from prometheus_client.parser import text_string_to_metric_families
from support.block_lifetimes import accessed, allocated, evicted, exact, released
from support.collector import labels_of, over_grpc, over_http, that_hangs, that_is_down
from support.daemon import Daemon, wait_until
from support.tls import Authority
from support.worker import make_keys

from kvserver import __version__
from kvserver.config import read_configuration
from kvserver.protocol import WAIT_SECONDS, ConfigError

OFTEN = {"env": {"OTEL_METRIC_EXPORT_INTERVAL": "100", "OTEL_EXPORTER_OTLP_TIMEOUT": "0.5"}}  # milliseconds; seconds


def prometheus(daemon: Daemon) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(daemon.http("/metrics")[1])}


def stop(daemon: Daemon) -> None:
    assert daemon.terminate(60) == 0, daemon.log


# ---- a collector that is there ----------------------------------------------------------------


def test_every_family_with_a_value_arrives_with_its_type(make_daemon, make_worker):
    with over_http() as collector:
        daemon = make_daemon(otlp_endpoint=collector.url, **OFTEN)
        wait_until(collector.latest, what="the first metrics, before any engine connects")
        assert {
            "kvserver_build_info",
            "kvserver_l1_size_bytes",
            "kvserver_l1_evicted_chunks",
        } <= collector.latest().keys()
        make_worker(daemon).round_trip()
        shown = prometheus(daemon)
        expected = {name for name, family in shown.items() if family.samples}
        wait_until(lambda: expected <= collector.latest().keys())
        forms = {"counter": "sum", "gauge": "gauge", "histogram": "histogram"}
        for name, metric in collector.latest().items():
            assert metric.WhichOneof("data") == forms[shown[name].type], name
            assert metric.description == shown[name].documentation
            assert metric.unit == ("By" if name.endswith("_bytes") else "s" if name.endswith("_seconds") else "")
        assert shown.keys() - collector.latest().keys() <= {name for name, f in shown.items() if not f.samples}


def test_the_sender_is_named_with_its_version_and_keeps_its_id_over_a_restart(make_daemon):
    with over_http() as collector:
        daemon = make_daemon(otlp_endpoint=collector.url)
        wait_until(collector.latest)
        stop(daemon)
        daemon.start()
        wait_until(lambda: len(collector.metrics) > 2)
        other = make_daemon(otlp_endpoint=collector.url)
        stop(daemon)
        stop(other)
    senders = collector.resources()
    assert {(sender["service.name"], sender["service.version"]) for sender in senders} == {("kvserver", __version__)}
    ids = [sender["service.instance.id"] for sender in senders]
    assert len(set(ids)) == 2
    assert ids[0] == ids[2], "the first one before and after its restart"


def test_names_of_the_sender_in_opentelemetrys_variables_win(make_daemon):
    given = {"OTEL_SERVICE_NAME": "cache-a", "OTEL_RESOURCE_ATTRIBUTES": "service.instance.id=pod-1,k8s.pod.name=p"}
    with over_http() as collector:
        make_daemon(otlp_endpoint=collector.url, env=given)
        wait_until(collector.latest)
        wanted = {"service.name": "cache-a", "service.instance.id": "pod-1", "k8s.pod.name": "p"}
        assert collector.resources()[0].items() >= (wanted | {"service.version": __version__}).items()


@pytest.mark.parametrize(("collector", "protocol"), [(over_http, ""), (over_grpc, "grpc")])
def test_the_endpoint_of_opentelemetrys_variables_is_used_and_shown(make_daemon, collector, protocol):
    with collector() as collected:
        url = collected.url.replace("grpc://", "http://")
        given = {"OTEL_EXPORTER_OTLP_ENDPOINT": url} | ({"OTEL_EXPORTER_OTLP_PROTOCOL": protocol} if protocol else {})
        daemon = make_daemon(env=given)
        wait_until(collected.latest)
        row = json.loads(daemon.http("/config")[1])["otlp_endpoint"]
        assert (row["value"], row["source_name"]) == (collected.url, "OTEL_EXPORTER_OTLP_ENDPOINT")


@pytest.mark.parametrize(("collector", "path"), [(over_http, "/v1/metrics"), (over_grpc, "")])
def test_metrics_go_to_an_endpoint_of_their_own(make_daemon, collector, path):
    with collector() as collected:
        url = collected.url.replace("grpc://", "http://") + path
        nowhere = collected.url.rpartition(":")[0] + ":1"
        daemon = make_daemon(otlp_endpoint=nowhere, env={"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": url})
        wait_until(collected.latest)
        assert daemon.status()["otlp"]["failed"] == 0


def test_metrics_and_traces_arrive_over_grpc_with_tls(make_daemon, make_worker, tmp_path):
    authority = Authority(tmp_path)
    trusting = {"OTEL_EXPORTER_OTLP_CERTIFICATE": str(authority.path), "OTEL_TRACES_SAMPLER": "always_on"}
    with over_grpc(authority) as collector:
        daemon = make_daemon(otlp_endpoint=collector.url, env=OFTEN["env"] | trusting)
        make_worker(daemon).round_trip()
        wait_until(lambda: collector.latest() and collector.spans())
        stranger = make_daemon(otlp_endpoint=collector.url, **OFTEN)
        wait_until(lambda: stranger.status()["otlp"]["failed"])
        assert stranger.status()["otlp"]["sent"] == 0, "the authority is not one of the system's"


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        (
            "OTEL_EXPORTER_OTLP_PROTOCOL",
            "http/json",
            "OTEL_EXPORTER_OTLP_PROTOCOL 'http/json': write http/protobuf or grpc",
        ),
        (
            "OTEL_EXPORTER_OTLP_ENDPOINT",
            "collector:4317",
            "(from the environment OTEL_EXPORTER_OTLP_ENDPOINT): write http://",
        ),
    ],
)
def test_a_bad_endpoint_of_opentelemetrys_variables_is_refused_with_its_name(name, value, why):
    with pytest.raises(ConfigError, match=re.escape(why)):
        read_configuration({}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", name: value})


@pytest.mark.parametrize(
    ("url", "more", "endpoint"),
    [
        ("https://c:4317", {}, "grpcs://c:4317"),
        ("http://c:4317/", {}, "grpc://c:4317"),
        ("c:4317", {}, "grpcs://c:4317"),
        ("https://c", {}, "grpcs://c:443"),
        ("http://[::1]/", {}, "grpc://[::1]:4317"),
        ("c:4317", {"OTEL_EXPORTER_OTLP_INSECURE": "true"}, "grpc://c:4317"),
        ("http://c:4317", {"OTEL_SDK_DISABLED": "true"}, ""),
    ],
)
def test_a_grpc_endpoint_of_opentelemetrys_variables_has_tls_unless_its_scheme_is_http(url, more, endpoint):
    given = {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"} | more
    assert read_configuration({}, given).settings.otlp_endpoint == endpoint
    assert read_configuration({"otlp_endpoint": "grpc://flag:1"}, given).settings.otlp_endpoint == "grpc://flag:1"


def test_a_protocol_of_opentelemetrys_variables_counts_for_their_endpoint_alone():
    given = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}
    with pytest.raises(ConfigError, match="write http/protobuf or grpc"):
        read_configuration({}, given)
    assert read_configuration({"otlp_endpoint": "http://flag:1"}, given).settings.otlp_endpoint == "http://flag:1"


def test_counters_move_with_what_engines_do_and_count_since_the_start(make_daemon, make_worker):
    before_ns = time.time_ns()
    with over_http() as collector:
        daemon = make_daemon(otlp_endpoint=collector.url, **OFTEN)
        worker = make_worker(daemon)
        labels = {"instance_id": worker.instance_id, "model_name": worker.model_name}
        worker.lookup(make_keys(2))
        wait_until(lambda: collector.counter("kvserver_lookup_requests", **labels) == 1)
        worker.lookup(make_keys(1))
        worker.lookup(make_keys(1))
        wait_until(lambda: collector.counter("kvserver_lookup_requests", **labels) == 3)
        metric = collector.latest()["kvserver_lookup_requests"]
        assert metric.sum.is_monotonic
        assert metric.sum.aggregation_temporality == AGGREGATION_TEMPORALITY_CUMULATIVE
        (point,) = metric.sum.data_points
        assert before_ns < point.start_time_unix_nano < point.time_unix_nano < time.time_ns()


def test_l0_histograms_carry_the_instance_and_its_model(make_daemon, make_worker):
    with over_http() as collector:
        daemon = make_daemon(otlp_endpoint=collector.url, metrics_sample_rate=1.0, **OFTEN)
        workers = [make_worker(daemon, instance_id=name, model_name=f"{name}/model") for name in ("one", "other")]
        for blocks, worker in enumerate(workers, 1):
            some = range(1, 1 + blocks)
            report = exact((2, [*allocated(*some), *released(*some), *accessed(*some), *evicted(*some)]), full=True)
            worker.report(report)
        for name in ("lifetime", "idle_before_evict", "since_last_access", "reuse_gap"):
            expected = {(w.instance_id, w.model_name): blocks for blocks, w in enumerate(workers, 1)}

            def counted(name: str = name) -> dict[tuple[str, str], int]:
                metric = collector.latest().get(f"kvserver_l0_block_{name}_seconds")
                points = metric.histogram.data_points if metric else ()
                assert all(labels_of(point).keys() == {"instance_id", "model_name"} for point in points)
                return {
                    tuple(labels_of(point)[label] for label in ("instance_id", "model_name")): point.count
                    for point in points
                }

            wait_until(lambda: counted() == expected, what=f"{name}: {counted()}")  # noqa: B023


def test_a_histogram_keeps_its_bounds_and_counts(make_daemon, make_worker):
    with over_http() as collector:
        worker = make_worker(make_daemon(otlp_endpoint=collector.url, **OFTEN))
        for _ in range(3):
            worker.lookup(make_keys(1))

        def arrived() -> Any:
            metric = collector.latest().get("kvserver_rpc_seconds")
            points = metric.histogram.data_points if metric else ()
            return next((p for p in points if labels_of(p) == {"type": "Lookup"} and p.count == 3), None)

        point = wait_until(arrived)
        assert tuple(point.explicit_bounds) == WAIT_SECONDS
        assert sum(point.bucket_counts) == 3
        assert len(point.bucket_counts) == len(WAIT_SECONDS) + 1
        assert point.sum > 0
        assert not point.HasField("min")
        assert not point.HasField("max")


def test_the_last_values_are_sent_when_it_stops(make_daemon, make_worker):
    with over_http() as collector:
        daemon = make_daemon(otlp_endpoint=collector.url, env={"OTEL_METRIC_EXPORT_INTERVAL": "3600000"})
        wait_until(collector.latest)
        worker = make_worker(daemon)
        worker.lookup(make_keys(1))
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", daemon.http_port, timeout=5)) as pages:
            pages.request("GET", "/status", headers={"Origin": "http://elsewhere"})
            assert pages.getresponse().status == 403
        stop(daemon)
        assert len(collector.metrics) == 2
        labels = {"instance_id": worker.instance_id, "model_name": worker.model_name}
        assert collector.counter("kvserver_lookup_requests", **labels) == 1
        assert collector.counter("kvserver_http_refused", reason="foreign_origin") == 1


def test_metrics_arrive_over_grpc(make_daemon, make_worker):
    with over_grpc() as collector:
        daemon = make_daemon(otlp_endpoint=collector.url, **OFTEN)
        worker = make_worker(daemon)
        worker.lookup(make_keys(1))
        labels = {"instance_id": worker.instance_id, "model_name": worker.model_name}
        wait_until(lambda: collector.counter("kvserver_lookup_requests", **labels) == 1)
        stop(daemon)
        assert daemon.log.count("OTLP") == 0, "nothing to complain of"


def test_status_shows_what_was_sent(make_daemon):
    with over_http() as collector:
        daemon = make_daemon(otlp_endpoint=collector.url, **OFTEN)
        wait_until(lambda: daemon.status()["otlp"]["sent"] > 1)
        shown = daemon.status()["otlp"]
        assert (shown["endpoint"], shown["failed"], shown["last_error"]) == (collector.url, 0, "")


# ---- one that is not --------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_a_collector_that_is_down_costs_a_counted_failure(make_daemon, make_worker, scheme):
    with that_is_down() as address:
        daemon = make_daemon(otlp_endpoint=f"{scheme}://{address}", **OFTEN)
        worker = make_worker(daemon)

        def failed() -> bool:
            worker.round_trip()
            return daemon.status()["otlp"]["failed"] >= 2

        wait_until(failed, 30)
        shown = daemon.status()["otlp"]
        assert shown["sent"] == 0
        assert daemon.metric("kvserver_otlp_failed_total", signal="metrics") >= 2
        assert daemon.metric("kvserver_otlp_sent_total", signal="metrics") == 0
        assert "refused" in shown["last_error"].lower()
        stop(daemon)
    assert daemon.log.count("metrics over OTLP do not reach the collector") == 1, "logged once"


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_a_collector_that_hangs_holds_up_no_engine(make_daemon, make_worker, scheme):
    with that_hangs() as address:
        daemon = make_daemon(otlp_endpoint=f"{scheme}://{address}", **OFTEN)
        worker = make_worker(daemon)

        def failed() -> bool:
            worker.round_trip()
            assert daemon.http("/readyz") == (200, "ready\n")
            return daemon.status()["otlp"]["failed"] >= 1

        wait_until(failed, 30)
        stop(daemon)


def test_an_outage_is_logged_once_and_its_end_once(make_daemon):
    with over_http() as collector:
        daemon = make_daemon(otlp_endpoint=collector.url, **OFTEN)
        wait_until(collector.latest)
        collector.answer = 404
        wait_until(lambda: daemon.status()["otlp"]["failed"] >= 3)
        assert "404" in daemon.status()["otlp"]["last_error"]
        collector.answer = 200
        sent = len(collector.metrics)
        wait_until(lambda: len(collector.metrics) > sent)
        stop(daemon)
    logged = [line for line in daemon.log.splitlines() if "OTLP" in line]
    assert [line.split("metrics over OTLP ")[1][:12] for line in logged] == ["do not reach", "reach the co"]
