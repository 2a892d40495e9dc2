"""Metric families of the daemon itself: its loop, L1, GPUs, requests by type, and events.

Owns: names and help texts of these families; their values come from a status snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvserver import __version__
from kvserver.families import Buckets, Family, Kind
from kvserver.rpc_counts import RPC_BUCKETS

_L1 = (  # name, text, kind, key of the status
    ("kvserver_l1_size_bytes", "Memory of L1.", Kind.GAUGE, "size_bytes"),
    ("kvserver_l1_used_bytes", "Memory of L1 that holds chunks.", Kind.GAUGE, "used_bytes"),
    ("kvserver_l1_pinned_bytes", "Memory of L1 that is pinned for GPUs.", Kind.GAUGE, "pinned_bytes"),
    ("kvserver_l1_chunks", "Chunks in L1, also those being filled.", Kind.GAUGE, "chunks"),
    ("kvserver_l1_evicted_chunks", "Chunks evicted from L1.", Kind.COUNTER, "evictions"),
    ("kvserver_l1_evicted_bytes", "Their memory.", Kind.COUNTER, "evicted_bytes"),
    ("kvserver_l1_cleared_chunks", "Chunks that were cleared.", Kind.COUNTER, "cleared_chunks"),
)


def daemon_families(status: dict[str, Any], rpc: dict[str, Any]) -> Iterable[Family]:
    yield from _server(status)
    yield from _l1(status["l1"])
    yield from _gpus(status["gpus"])
    yield from _rpcs(rpc)
    yield from _events(status["events"])


def _server(status: dict[str, Any]) -> Iterable[Family]:
    lag = Family(
        "kvserver_loop_lag_seconds", "Longest turn of the event loop in the last 10 to 20 seconds.", Kind.GAUGE
    )
    yield lag.add(status["loop_lag_seconds"])
    ready = Family("kvserver_ready", "1 while the daemon should get traffic, as /readyz says.", Kind.GAUGE)
    yield ready.add(int(status["ready"]))
    rate = Family("kvserver_metrics_sample_rate", "Share of lives that the lifecycle histograms show.", Kind.GAUGE)
    yield rate.add(status["metrics_sample_rate"])
    yield Family("kvserver_build_info", "Version of the server.", Kind.GAUGE, ("version",)).add(1, __version__)


def _l1(l1: dict[str, Any]) -> Iterable[Family]:
    for name, text, kind, key in _L1:
        yield Family(name, text, kind).add(l1[key])


def _gpus(gpus: list[dict[str, Any]]) -> Iterable[Family]:
    mapped = Family("kvserver_gpu_mapped_bytes", "Memory of engines, mapped.", Kind.GAUGE, ("device",))
    copied = Family(
        "kvserver_gpu_copied_bytes",
        "Bytes between L1 and a GPU, by DMA of each run or staged by kernels.",
        Kind.COUNTER,
        ("device", "direction", "way"),
    )
    unpinned = Family(
        "kvserver_gpu_unpinned_bytes", "Those of L1 that was not pinned.", Kind.COUNTER, ("device", "direction")
    )
    for gpu in gpus:
        mapped.add(gpu["mapped_bytes"], gpu["device"])
        for direction in ("store", "load"):
            lane = gpu[direction]
            for way in ("dma", "staged"):
                copied.add(lane[f"{way}_bytes"], gpu["device"], direction, way)
            unpinned.add(lane["unpinned_bytes"], gpu["device"], direction)
    yield from (mapped, copied, unpinned)


def _rpcs(rpc: dict[str, Any]) -> Iterable[Family]:
    times = Family(
        "kvserver_rpc_seconds", "Arrival of a request to its reply.", Kind.HISTOGRAM, ("type",), bounds=RPC_BUCKETS
    )
    for name, counts in rpc["times"].items():
        times.add(Buckets(counts, rpc["seconds"][name]), name)
    yield times
    errors = Family("kvserver_rpc_errors", "Errors sent, by code.", Kind.COUNTER, ("reason",))
    for code, count in rpc["errors"].items():
        errors.add(count, code)
    yield errors


def _events(events: dict[str, Any]) -> Iterable[Family]:
    published = Family("kvserver_events_published", "Events handed to the subscribers.", Kind.COUNTER, ("type",))
    dropped = Family("kvserver_events_dropped", "Events for which the queue had no room.", Kind.COUNTER, ("type",))
    for name, count in events["published_types"].items():
        published.add(count, name)
        dropped.add(events["dropped_types"].get(name, 0), name)
    yield published
    yield dropped
    depth = Family("kvserver_events_queue_depth", "Events not yet handed over; large ones count more.", Kind.GAUGE)
    yield depth.add(events["queue_depth"])
    lag = Family("kvserver_events_lag_seconds", "Longest wait of an event in the last round.", Kind.GAUGE)
    yield lag.add(events["lag_seconds"])
    errors = Family(
        "kvserver_events_subscriber_errors", "What subscribers failed to take.", Kind.COUNTER, ("subscriber",)
    )
    for subscriber in events["subscribers"]:
        errors.add(subscriber["errors"], subscriber["name"])
    yield errors
