"""The Prometheus form of a status."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvserver.engines.counts import Counts
from kvserver.events import Bus
from kvserver.protocol import WAIT_SECONDS, ErrorCode, Histogram
from kvserver.protocol.status import (
    AccountingStatus,
    ConnectsStatus,
    DaemonStatus,
    DirectionStatus,
    GpuStatus,
    InstanceStatus,
    L1Status,
    ModelStatus,
    TotalsStatus,
    WorkerStatus,
)
from kvserver.server.status import requests_status
from kvserver.telemetry import Rpc, all_families
from kvserver.telemetry.prometheus import render

COUNTS = Counts()
FROM_THE_START = {
    "kvserver_lookup_requests": "counter",
    "kvserver_lookup_tokens": "counter",
    "kvserver_lookup_hit_tokens": "counter",
    "kvserver_store_bytes": "counter",
    "kvserver_load_bytes": "counter",
    "kvserver_store_seconds": "counter",
    "kvserver_load_seconds": "counter",
    "kvserver_l1_size_bytes": "gauge",
    "kvserver_l1_used_bytes": "gauge",
    "kvserver_l1_chunks": "gauge",
    "kvserver_l1_evicted_chunks": "counter",
    "kvserver_rpc_seconds": "histogram",
    "kvserver_rpc_errors": "counter",
    "kvserver_l1_pinned_bytes": "gauge",
    "kvserver_gpu_mapped_bytes": "gauge",
    "kvserver_gpu_copied_bytes": "counter",
    "kvserver_gpu_unpinned_bytes": "counter",
    "kvserver_l1_evicted_bytes": "counter",
    "kvserver_l1_cleared_chunks": "counter",
    "kvserver_l1_stored_chunks": "counter",
    "kvserver_l1_loaded_chunks": "counter",
    "kvserver_l1_stores_avoided_chunks": "counter",
    "kvserver_l1_starved_chunks": "counter",
    "kvserver_lookup_missed_tokens": "counter",
    "kvserver_saved_prefill_tokens": "counter",
    "kvserver_saved_prefill_seconds": "counter",
    "kvserver_events_published": "counter",
    "kvserver_events_dropped": "counter",
    "kvserver_events_queue_depth": "gauge",
    "kvserver_events_lag_seconds": "gauge",
    "kvserver_events_subscriber_errors": "counter",
    "kvserver_metrics_sample_rate": "gauge",
    "kvserver_loop_lag_seconds": "gauge",
    "kvserver_ready": "gauge",
    "kvserver_serving": "gauge",
    "kvserver_build_info": "gauge",
    "kvserver_l1_model_used_bytes": "gauge",
    "kvserver_l1_model_chunks": "gauge",
    "kvserver_l1_model_share_bytes": "gauge",
    "kvserver_l1_model_evicted_chunks": "counter",
    "kvserver_l1_tenant_used_bytes": "gauge",
    "kvserver_l1_tenant_chunks": "gauge",
    "kvserver_l1_tenant_share_bytes": "gauge",
    "kvserver_l1_tenant_evicted_chunks": "counter",
    "kvserver_l1_other_tenant_stores": "counter",
    "kvserver_instances": "gauge",
    "kvserver_instances_connected": "counter",
    "kvserver_instances_disconnected": "counter",
    "kvserver_refused_registrations": "counter",
    "kvserver_instance_info": "gauge",
    "kvserver_instance_world_size": "gauge",
    "kvserver_instance_private": "gauge",
    "kvserver_engine_prefill_tokens_per_second": "gauge",
    "kvserver_tickets": "gauge",
    "kvserver_leases": "gauge",
    "kvserver_pins": "gauge",
    "kvserver_cache_pins": "gauge",
    "kvserver_cache_pinned_bytes": "gauge",
    "kvserver_cache_pin_limit_bytes": "gauge",
    "kvserver_cache_pin_deferred_chunks": "gauge",
    "kvserver_cache_pin_requests": "counter",
    "kvserver_cache_pins_ended": "counter",
    "kvserver_cache_pin_passed_over_chunks": "counter",
    "kvserver_cache_prefetches_live": "gauge",
    "kvserver_cache_prefetches": "counter",
    "kvserver_accounting_failures": "counter",
    "kvserver_undelivered_replies": "counter",
}


def instance(instance_id: str, counts: Counts = COUNTS, **values: Any) -> InstanceStatus:
    shown = {"world_size": 2, "l0_source": "exact", "block_tokens": 16, "chunk_tokens": 256, **values}
    return InstanceStatus(instance_id=instance_id, model_name="m", requests=requests_status(counts), **shown)


def status(*instances: InstanceStatus) -> DaemonStatus:
    models = {
        "m": ModelStatus(used_bytes=400, chunks=2, evictions=7, never_loaded=4),
        "n": ModelStatus(used_bytes=200, chunks=1),
    }
    store = DirectionStatus(dma_bytes=1, staged_bytes=2, unpinned_bytes=3)
    load = DirectionStatus(dma_bytes=4, staged_bytes=5, unpinned_bytes=6)
    return DaemonStatus(
        version="1.2",
        l1=L1Status(size_bytes=1000, used_bytes=600, pinned_bytes=500, chunks=3, evictions=7, models=models),
        gpus=[GpuStatus(device="GPU-0", mapped_bytes=70, store=store, load=load)],
        loop_lag_seconds=0.25,
        loop_turns=Histogram(WAIT_SECONDS).snapshot(),
        events=Bus().status(),
        connects=ConnectsStatus(connected=5, disconnected={"died": 2, "unregistered": 1}),
        refused_registrations={"ranks_disagree": 3, "connection_refused": 1},
        books=AccountingStatus(tickets=11, leases=12, pins=13, unbalanced=14),
        totals=TotalsStatus(undelivered_replies=15),
        instances=list(instances),
    )


def families(status: DaemonStatus, rpc: Rpc) -> dict[str, Any]:
    text = render(all_families(status, rpc.snapshot()))[0].decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(family: Any, suffix: str = "", **labels: str) -> float:
    (found,) = [s.value for s in family.samples if s.name == family.name + suffix and s.labels == labels]
    return float(found)


@pytest.mark.parametrize(("name", "kind"), FROM_THE_START.items())
def test_every_family_is_there_before_the_first_connection(name: str, kind: str) -> None:
    family = families(status(), Rpc())[name]
    assert family.type == kind
    assert family.documentation.endswith(".")


def test_every_name_has_the_prefix() -> None:
    assert all(name.startswith("kvserver_") for name in families(status(), Rpc()))


def test_l1_and_build_are_reported() -> None:
    found = families(status(), Rpc())
    assert value(found["kvserver_l1_size_bytes"]) == 1000
    assert value(found["kvserver_l1_used_bytes"]) == 600
    assert value(found["kvserver_l1_pinned_bytes"]) == 500
    assert value(found["kvserver_l1_chunks"]) == 3
    assert value(found["kvserver_l1_evicted_chunks"], "_total") == 7
    assert value(found["kvserver_loop_lag_seconds"]) == 0.25
    assert value(found["kvserver_build_info"], version="1.2") == 1


def test_l1_is_shown_by_model() -> None:
    found = families(status(), Rpc())
    for model_name, expected in (("m", [400, 2, 7]), ("n", [200, 1, 0])):
        names = (("used_bytes", ""), ("chunks", ""), ("evicted_chunks", "_total"))
        assert [value(found[f"kvserver_l1_model_{n}"], end, model_name=model_name) for n, end in names] == expected


def test_each_gpu_reports_which_way_its_bytes_went() -> None:
    found = families(status(), Rpc())
    assert value(found["kvserver_gpu_mapped_bytes"], device="GPU-0") == 70
    for direction, way, expected in [
        ("store", "dma", 1),
        ("store", "staged", 2),
        ("load", "dma", 4),
        ("load", "staged", 5),
    ]:
        of = found["kvserver_gpu_copied_bytes"]
        assert value(of, "_total", device="GPU-0", direction=direction, way=way) == expected
    assert value(found["kvserver_gpu_unpinned_bytes"], "_total", device="GPU-0", direction="load") == 6


def test_each_instance_has_its_own_series_in_base_units() -> None:
    first = instance("a", Counts(lookup_tokens=512, store_nanos=1_500_000_000))
    second = instance('b"\\\n', Counts(lookup_tokens=1))
    found = families(status(first, second), Rpc())
    assert value(found["kvserver_lookup_tokens"], "_total", instance_id="a", model_name="m") == 512
    assert value(found["kvserver_lookup_tokens"], "_total", instance_id='b"\\\n', model_name="m") == 1
    assert value(found["kvserver_store_seconds"], "_total", instance_id="a", model_name="m") == 1.5


def test_request_times_fall_into_cumulative_buckets() -> None:
    rpc = Rpc()
    for seconds in (0.00001, 0.001, 0.002, 100.0):
        rpc.observe("Lookup", seconds)
    family = families(status(), rpc)["kvserver_rpc_seconds"]
    buckets = {s.labels["le"]: s.value for s in family.samples if s.name.endswith("_bucket")}
    assert buckets["5e-05"] == 1
    assert buckets["0.001"] == 2, "a bound belongs to its bucket"
    assert buckets["0.0025"] == 3
    assert buckets["10.0"] == 3
    assert buckets["+Inf"] == 4
    assert list(buckets.values()) == sorted(buckets.values())
    assert value(family, "_count", type="Lookup") == 4
    assert value(family, "_sum", type="Lookup") == pytest.approx(100.00301)


def test_errors_are_counted_by_reason_and_type() -> None:
    rpc = Rpc()
    for code, type_name in (("late", "Store"), ("late", "Store"), ("late", "Retrieve"), ("bad_message", "unreadable")):
        rpc.errors[code, type_name] += 1
    family = families(status(), rpc)["kvserver_rpc_errors"]
    assert value(family, "_total", reason="late", type="Store") == 2
    assert value(family, "_total", reason="late", type="Retrieve") == 1
    assert value(family, "_total", reason="bad_message", type="unreadable") == 1


def test_the_first_internal_error_of_each_type_is_an_increase() -> None:
    family = families(status(), Rpc())["kvserver_rpc_errors"]
    types = {sample.labels["type"] for sample in family.samples}
    assert types > {"Lookup", "Store", "Retrieve", "RegisterWorker", "unreadable", "loop"}
    assert {(s.labels["reason"], s.value) for s in family.samples} == {("internal", 0)}


def test_errors_that_answer_a_registration_are_refusals() -> None:
    rpc = Rpc()
    for code, type_name in (
        ("version_mismatch", "Hello"),
        ("too_large", "RegisterWorker"),
        ("too_large", "RegisterWorker"),
        ("too_large", "Store"),
        ("bad_message", "unreadable"),
    ):
        rpc.errors[code, type_name] += 1
    assert rpc.refused_registrations() == {"version_mismatch": 1, "too_large": 2}


def test_refused_registrations_have_a_series_for_every_code_from_the_start() -> None:
    family = families(status(), Rpc())["kvserver_refused_registrations"]
    assert value(family, "_total", reason="ranks_disagree") == 3
    assert value(family, "_total", reason="connection_refused") == 1
    others = {s.labels["reason"]: s.value for s in family.samples if s.value == 0}
    assert others == dict.fromkeys((code.value for code in ErrorCode if code is not ErrorCode.RANKS_DISAGREE), 0)


def test_what_is_open_and_what_went_wrong_is_exported() -> None:
    found = families(status(instance("a"), instance("b")), Rpc())
    assert value(found["kvserver_instances"]) == 2
    assert value(found["kvserver_instances_connected"], "_total") == 5
    assert value(found["kvserver_instances_disconnected"], "_total", reason="died") == 2
    assert value(found["kvserver_instances_disconnected"], "_total", reason="unregistered") == 1
    assert [value(found[f"kvserver_{name}"]) for name in ("tickets", "leases", "pins")] == [11, 12, 13]
    assert value(found["kvserver_accounting_failures"], "_total") == 14
    assert value(found["kvserver_undelivered_replies"], "_total") == 15


def test_an_instance_has_labels_for_joins() -> None:
    gpu = [WorkerStatus(device="GPU-1"), WorkerStatus(device="GPU-2")]
    found = families(status(instance("a"), instance("b", workers=gpu, prefill_tokens_per_second=2e4)), Rpc())
    info = {"model_name": "m", "world_size": "2", "l0_source": "exact", "block_tokens": "16", "chunk_tokens": "256"}
    info |= {"engine": "", "engine_version": "", "kv_role": ""}
    assert value(found["kvserver_instance_info"], instance_id="a", device="cpu", **info) == 1
    assert value(found["kvserver_instance_info"], instance_id="b", device="gpu", **info) == 1
    assert value(found["kvserver_instance_world_size"], instance_id="b", model_name="m") == 2
    speed = found["kvserver_engine_prefill_tokens_per_second"]
    assert [(s.labels["instance_id"], s.value) for s in speed.samples] == [("b", 2e4)], "0 is no speed"


def test_a_private_instance_has_its_reason_which_is_cut() -> None:
    found = families(status(instance("a"), instance("b", private="x" * 4096)), Rpc())["kvserver_instance_private"]
    (sample,) = found.samples
    assert sample.labels == {"instance_id": "b", "model_name": "m", "reason": "x" * 200}
    assert sample.value == 1


def test_a_snapshot_does_not_change_with_what_comes_later() -> None:
    rpc = Rpc()
    rpc.observe("Lookup", 0.001)
    snapshot = rpc.snapshot()
    rpc.observe("Lookup", 0.001)
    rpc.errors["late", "Lookup"] += 1
    assert sum(snapshot.times["Lookup"].counts) == 1
    assert snapshot.errors == {}
