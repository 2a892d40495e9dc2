"""The Prometheus form of a snapshot."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvserver import __version__, metrics, prometheus
from kvserver.events import Bus
from kvserver.instances import Counts
from kvserver.rpc_counts import Rpc
from kvserver.status import counts_status

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
    "kvserver_build_info": "gauge",
}


def counts(**values: Any) -> dict[str, Any]:
    """What `/status` says of an instance's requests."""
    return counts_status(Counts()) | values


def status(*instances: dict[str, Any]) -> dict[str, Any]:
    return {
        "l1": {
            "size_bytes": 1000,
            "used_bytes": 600,
            "chunks": 3,
            "evictions": 7,
            "pinned_bytes": 500,
            "evicted_bytes": 70,
            "cleared_chunks": 2,
        },
        "gpus": [
            {
                "device": "GPU-0",
                "mapped_bytes": 70,
                "store": {"dma_bytes": 1, "staged_bytes": 2, "unpinned_bytes": 3},
                "load": {"dma_bytes": 4, "staged_bytes": 5, "unpinned_bytes": 6},
            }
        ],
        "loop_lag_seconds": 0.25,
        "metrics_sample_rate": 0.01,
        "events": Bus().status(),
        "departed": [],
        "ready": True,
        "instances": list(instances),
    }


def families(status: dict[str, Any], rpc: Rpc) -> dict[str, Any]:
    text = prometheus.render(metrics.families(status, rpc.snapshot())).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(family: Any, suffix: str = "", **labels: str) -> float:
    (found,) = [s.value for s in family.samples if s.name == family.name + suffix and s.labels == labels]
    return float(found)


@pytest.mark.parametrize(("name", "kind"), FROM_THE_START.items())
def test_every_family_is_there_before_anybody_connects(name: str, kind: str) -> None:
    family = families(status(), Rpc())[name]
    assert family.type == kind
    assert family.documentation.endswith(".")


def test_every_name_has_the_prefix() -> None:
    assert all(name.startswith("kvserver_") for name in families(status(), Rpc()))


def test_l1_and_build_are_told() -> None:
    found = families(status(), Rpc())
    assert value(found["kvserver_l1_size_bytes"]) == 1000
    assert value(found["kvserver_l1_used_bytes"]) == 600
    assert value(found["kvserver_l1_pinned_bytes"]) == 500
    assert value(found["kvserver_l1_chunks"]) == 3
    assert value(found["kvserver_l1_evicted_chunks"], "_total") == 7
    assert value(found["kvserver_loop_lag_seconds"]) == 0.25
    assert value(found["kvserver_build_info"], version=__version__) == 1


def test_each_gpu_tells_which_way_its_bytes_went() -> None:
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
    first = {"instance_id": "a", "model_name": "m", "requests": counts(lookup_tokens=512, store_nanos=1_500_000_000)}
    second = {"instance_id": 'b"\\\n', "model_name": "m", "requests": counts(lookup_tokens=1)}
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


def test_errors_are_counted_by_reason() -> None:
    rpc = Rpc()
    rpc.errors["late"] += 2
    rpc.errors["bad_keys"] += 1
    family = families(status(), rpc)["kvserver_rpc_errors"]
    assert value(family, "_total", reason="late") == 2
    assert value(family, "_total", reason="bad_keys") == 1


def test_a_snapshot_does_not_change_with_what_comes_later() -> None:
    rpc = Rpc()
    rpc.observe("Lookup", 0.001)
    snapshot = rpc.snapshot()
    rpc.observe("Lookup", 0.001)
    rpc.errors["late"] += 1
    assert sum(snapshot["times"]["Lookup"]) == 1
    assert snapshot["errors"] == {}
