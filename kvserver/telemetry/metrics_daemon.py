"""Metric families of the daemon itself: its loop, L1, GPUs, requests by type, what is open, and events.

Owns: names and help texts of these families; their values come from a status snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvserver import __version__
from kvserver.protocol import CONNECTION_REFUSED, WAIT_SECONDS, Buckets, ErrorCode, buckets
from kvserver.telemetry.families import Family, Kind
from kvserver.telemetry.rpc_counts import TYPES

_STATUS = (  # name, help, kind, path in the status
    ("kvserver_ready", "1 while the daemon should receive traffic, 0 while it should not, as /readyz answers.", Kind.GAUGE, "ready"),
    ("kvserver_loop_lag_seconds", "Longest turn of the daemon's event loop in the last 10 to 20 seconds.", Kind.GAUGE, "loop_lag_seconds"),
    ("kvserver_metrics_sample_rate", "Share of block and chunk lifetimes that the lifetime histograms of L0 and L1 sample.", Kind.GAUGE, "metrics_sample_rate"),
    ("kvserver_l1_size_bytes", "Memory that L1 has for chunks.", Kind.GAUGE, "l1.size_bytes"),
    ("kvserver_l1_used_bytes", "Memory of L1 that chunks occupy.", Kind.GAUGE, "l1.used_bytes"),
    ("kvserver_l1_pinned_bytes", "Memory of L1 that is pinned for GPUs.", Kind.GAUGE, "l1.pinned_bytes"),
    ("kvserver_l1_chunks", "Chunks in L1, also chunks that stores are filling.", Kind.GAUGE, "l1.chunks"),
    ("kvserver_l1_evicted_chunks", "Chunks evicted from L1, each once for all ranks.", Kind.COUNTER, "l1.evictions"),
    ("kvserver_l1_evicted_bytes", "Memory of L1 that evicted chunks had occupied.", Kind.COUNTER, "l1.evicted_bytes"),
    ("kvserver_l1_cleared_chunks", "Chunks that requests to clear the cache removed from L1.", Kind.COUNTER, "l1.cleared_chunks"),
    ("kvserver_instances_connected", "Engine instances whose first worker registered.", Kind.COUNTER, "connects.connected"),
    ("kvserver_tickets", "Copies, mappings and unmappings of memory that are in flight.", Kind.GAUGE, "books.tickets"),
    ("kvserver_leases", "Requests whose lookup protects chunks of L1 from eviction.", Kind.GAUGE, "books.leases"),
    ("kvserver_pins", "Pins of chunks in L1 by stores and loads that have not ended.", Kind.GAUGE, "books.pins"),
    ("kvserver_accounting_failures", "Audits of the daemon's accounting that found a contradiction, which is a bug.", Kind.COUNTER, "books.unbalanced"),
    ("kvserver_undelivered_replies", "Replies that could not be sent: the peer had disconnected or did not read.", Kind.COUNTER, "totals.undelivered_replies"),
    ("kvserver_events_queue_depth", "Events in the daemon's queue; an event that carries bytes counts once more for every 4 KiB.", Kind.GAUGE, "events.queue_depth"),
    ("kvserver_events_lag_seconds", "Longest time that an event of the event thread's last round waited in the queue.", Kind.GAUGE, "events.lag_seconds"),
)  # fmt: skip
_L1_MODELS = (  # name, help, kind, key of the model
    ("kvserver_l1_model_used_bytes", "Memory of L1 that chunks of a model occupy.", Kind.GAUGE, "used_bytes"),
    ("kvserver_l1_model_chunks", "Chunks of a model in L1, also chunks that stores are filling.", Kind.GAUGE, "chunks"),
    ("kvserver_l1_never_loaded_chunks", "Chunks of a model evicted from L1 that no engine had ever loaded.", Kind.COUNTER, "never_loaded"),
    ("kvserver_l1_model_evicted_chunks", "Chunks of a model evicted from L1, each once for all ranks.", Kind.COUNTER, "evictions"),
)  # fmt: skip

_WAITS = (  # name, help, path in the status of a histogram
    ("kvserver_loop_turn_seconds", "Duration of each turn of the daemon's event loop.", "loop_turns"),
    ("kvserver_events_wait_seconds", "Time that each event waited in the daemon's queue for the event thread.", "events.waits"),
)  # fmt: skip


def daemon_families(status: dict[str, Any], rpc: dict[str, Any]) -> Iterable[Family]:
    for name, text, kind, path in _STATUS:
        yield Family(name, text, kind).add(+_at(status, path))  # a bool is exported as 0 or 1
    for name, text, path in _WAITS:
        yield Family(name, text, Kind.HISTOGRAM, bounds=WAIT_SECONDS).add(buckets(_at(status, path)))
    yield Family("kvserver_build_info", "Always 1; the label is the daemon's version.", Kind.GAUGE, ("version",)).add(
        1, __version__
    )
    yield from _models(status["l1"]["models"])
    yield from _connects(status)
    yield from _gpus(status["gpus"])
    yield from _rpcs(rpc)
    yield from _events(status["events"])


def _at(status: dict[str, Any], path: str) -> Any:
    value: Any = status
    for key in path.split("."):
        value = value[key]
    return value


def _models(models: dict[str, dict[str, int]]) -> Iterable[Family]:
    for name, text, kind, key in _L1_MODELS:
        family = Family(name, text, kind, ("model_name",))
        for model_name, of_model in models.items():
            family.add(of_model[key], model_name)
        yield family


def _connects(status: dict[str, Any]) -> Iterable[Family]:
    yield Family("kvserver_instances", "Engine instances that are registered now.", Kind.GAUGE).add(
        len(status["instances"])
    )
    disconnected = Family(
        "kvserver_instances_disconnected",
        "Engine instances whose last worker ended, by how.",
        Kind.COUNTER,
        ("reason",),
    )
    for reason, count in status["connects"]["disconnected"].items():
        disconnected.add(count, reason)
    yield disconnected
    refused = Family(
        "kvserver_refused_registrations",
        "Attempts of workers to register that the daemon refused, by error code; each retry of an engine counts.",
        Kind.COUNTER,
        ("reason",),
    )
    reasons = (*(code.value for code in ErrorCode), CONNECTION_REFUSED)
    counts = dict.fromkeys(reasons, 0) | status["refused_registrations"]
    for reason, count in counts.items():
        refused.add(count, reason)
    yield refused


def _gpus(gpus: list[dict[str, Any]]) -> Iterable[Family]:
    mapped = Family(
        "kvserver_gpu_mapped_bytes", "Memory of engines on a GPU that the daemon has mapped.", Kind.GAUGE, ("device",)
    )
    copied = Family(
        "kvserver_gpu_copied_bytes",
        "Bytes copied between L1 and a GPU, by direction and by way: each run by DMA, or gathered by a kernel.",
        Kind.COUNTER,
        ("device", "direction", "way"),
    )
    unpinned = Family(
        "kvserver_gpu_unpinned_bytes",
        "Bytes copied between a GPU and parts of L1 that were not pinned, which is slower.",
        Kind.COUNTER,
        ("device", "direction"),
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
        "kvserver_rpc_seconds",
        "Time from the arrival of a request at the daemon to its reply, by type of request.",
        Kind.HISTOGRAM,
        ("type",),
        bounds=WAIT_SECONDS,
    )
    for name, counts in rpc["times"].items():
        times.add(Buckets(counts, rpc["seconds"][name]), name)
    yield times
    errors = Family(
        "kvserver_rpc_errors",
        "Errors that the daemon replied, and internal errors beside requests, by error code and type of request.",
        Kind.COUNTER,
        ("reason", "type"),
    )
    never = dict.fromkeys(
        ((ErrorCode.INTERNAL.value, name) for name in TYPES), 0
    )  # so that the first one is an increase
    for labels, count in {**never, **rpc["errors"]}.items():
        errors.add(count, *labels)
    yield errors


def _events(events: dict[str, Any]) -> Iterable[Family]:
    published = Family(
        "kvserver_events_published", "Events that the daemon's loop queued, by type.", Kind.COUNTER, ("type",)
    )
    dropped = Family(
        "kvserver_events_dropped",
        "Events that the daemon dropped because its queue was full, by type.",
        Kind.COUNTER,
        ("type",),
    )
    for name, count in events["published_types"].items():
        published.add(count, name)
        dropped.add(events["dropped_types"].get(name, 0), name)
    yield published
    yield dropped
    errors = Family(
        "kvserver_events_subscriber_errors",
        "Events that a subscriber inside the daemon failed to handle, by subscriber.",
        Kind.COUNTER,
        ("subscriber",),
    )
    for subscriber in events["subscribers"]:
        errors.add(subscriber["errors"], subscriber["name"])
    yield errors
