"""Counters of the server, the families made of them, and their Prometheus form.

Owns: RPC counts and times, and the mapping from a status snapshot to metric families (names of the
public surface; they exist from the start). Refuses to know: where the status comes from, and how other
exporters send the families. `Rpc` is written by the loop thread only; all else works on a snapshot, in any thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, cast

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from kvserver import __version__
from kvserver.families import Buckets, Family, Kind

# Seconds. From a bare loopback echo (~0.1 ms) to a copy of gigabytes.
RPC_BUCKETS = (
    0.00005,
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    10.0,
)


class Rpc:
    """How long requests took from their arrival to their reply, and which errors were sent."""

    def __init__(self) -> None:
        self.times: dict[str, list[int]] = {}  # type -> counts per bucket, the last one is +Inf
        self.seconds: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()

    def observe(self, type_name: str, seconds: float) -> None:
        buckets = self.times.get(type_name)
        if buckets is None:
            buckets = self.times[type_name] = [0] * (len(RPC_BUCKETS) + 1)
        buckets[bisect_left(RPC_BUCKETS, seconds)] += 1
        self.seconds[type_name] += seconds  # type: ignore[assignment]

    def snapshot(self) -> dict[str, Any]:
        return {
            "times": {name: list(counts) for name, counts in self.times.items()},
            "seconds": dict(self.seconds),
            "errors": dict(self.errors),
        }


# ---- families ---------------------------------------------------------------------------------

_INSTANCE = ("instance_id", "model_name")
_INSTANCE_COUNTERS = (  # name, text, key of the instance's requests, unit
    ("kvserver_lookup_requests", "Lookups answered.", "lookups", 1),
    ("kvserver_lookup_tokens", "Tokens of whole chunks asked for.", "lookup_tokens", 1),
    ("kvserver_lookup_hit_tokens", "Tokens of chunks found READY.", "hit_tokens", 1),
    ("kvserver_saved_prefill_tokens", "Tokens whose KV was loaded instead of computed.", "saved_tokens", 1),
    ("kvserver_saved_prefill_seconds", "Those over the prefill speed that the engine told.", "saved_seconds", 1),
    ("kvserver_store_bytes", "Bytes copied L0 to L1.", "stored_bytes", 1),
    ("kvserver_load_bytes", "Bytes copied L1 to L0.", "loaded_bytes", 1),
    ("kvserver_store_seconds", "Time copying L0 to L1.", "store_nanos", 1e-9),
    ("kvserver_load_seconds", "Time copying L1 to L0.", "load_nanos", 1e-9),
    ("kvserver_failed_stores", "Stores refused, cancelled or failed.", "failed_stores", 1),
    ("kvserver_failed_loads", "Loads refused, cancelled or failed.", "failed_loads", 1),
    ("kvserver_l1_stored_chunks", "Chunks copied L0 to L1, by each rank.", "stored_chunks", 1),
    ("kvserver_l1_stores_avoided_chunks", "Chunks to be stored that L1 had already.", "avoided_chunks", 1),
    ("kvserver_l1_starved_chunks", "Chunks to be stored that found no room.", "starved_chunks", 1),
    ("kvserver_l1_loaded_chunks", "Chunks copied L1 to L0, by each rank.", "loaded_chunks", 1),
    ("kvserver_engine_preemptions", "Requests the engine preempted.", "engine_preemptions", 1),
    ("kvserver_engine_prompt_tokens", "Tokens of prompts the engine took.", "engine_prompt_tokens", 1),
    ("kvserver_engine_generation_tokens", "Tokens the engine generated.", "engine_generation_tokens", 1),
    ("kvserver_engine_finished_requests", "Requests the engine finished.", "engine_finished_requests", 1),
    ("kvserver_engine_prefix_query_tokens", "Tokens looked up in the engine's own cache.", "engine_prefix_queries", 1),
    ("kvserver_engine_prefix_hit_tokens", "Tokens found there.", "engine_prefix_hits", 1),
    ("kvserver_engine_external_query_tokens", "Tokens it asked its connector for.", "engine_external_queries", 1),
    ("kvserver_engine_external_hit_tokens", "Tokens that one had.", "engine_external_hits", 1),
)
_LOADS = (  # name, text, key of the instance's load
    ("kvserver_engine_running_requests", "Requests in the engine's batch.", "running"),
    ("kvserver_engine_waiting_requests", "Requests waiting in the engine.", "waiting"),
    ("kvserver_engine_deferred_requests", "Those of them that do not wait for room.", "deferred"),
    ("kvserver_engine_kv_cache_usage_ratio", "Share of the engine's blocks in use.", "kv_cache_usage"),
    ("kvserver_engine_prompt_token_rate", "Tokens of prompts a second.", "prompt_tokens_per_second"),
    ("kvserver_engine_generation_token_rate", "Tokens generated a second.", "generation_tokens_per_second"),
)
_L1 = (  # name, text, kind, key of the status
    ("kvserver_l1_size_bytes", "Memory of L1.", Kind.GAUGE, "size_bytes"),
    ("kvserver_l1_used_bytes", "Memory of L1 that holds chunks.", Kind.GAUGE, "used_bytes"),
    ("kvserver_l1_pinned_bytes", "Memory of L1 that is pinned for GPUs.", Kind.GAUGE, "pinned_bytes"),
    ("kvserver_l1_chunks", "Chunks in L1, also those being filled.", Kind.GAUGE, "chunks"),
    ("kvserver_l1_evicted_chunks", "Chunks evicted from L1.", Kind.COUNTER, "evictions"),
    ("kvserver_l1_evicted_bytes", "Their memory.", Kind.COUNTER, "evicted_bytes"),
    ("kvserver_l1_cleared_chunks", "Chunks that were cleared.", Kind.COUNTER, "cleared_chunks"),
)


def families(
    status: dict[str, Any],
    rpc: dict[str, Any],
    more: Iterable[Family] = (),
) -> list[Family]:
    """All of one snapshot, also those without points yet; each name stands there once.

    `more`: those of others; of a family that both know they add points. Instances that went lately are still shown.
    """
    found: dict[str, Family] = {}
    rows = {(row["instance_id"], row["model_name"]): row for row in (*status["departed"], *status["instances"])}
    for family in (
        *_server(status),
        *_l1(status["l1"]),
        *_gpus(status["gpus"]),
        *_instances(list(rows.values())),
        *_rpcs(rpc),
        *_events(status["events"]),
        *more,
    ):
        known = found.setdefault(family.name, family)
        if known is not family:
            assert (known.kind, known.labels, known.bounds) == (family.kind, family.labels, family.bounds), family.name
            told = {labels for labels, _ in known.points}
            known.points += [point for point in family.points if point[0] not in told]
    return list(found.values())


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


def _instances(rows: Sequence[dict[str, Any]]) -> Iterable[Family]:
    for name, text, key, unit in _INSTANCE_COUNTERS:
        family = Family(name, text, Kind.COUNTER, _INSTANCE)
        for row in rows:
            family.add(row["requests"][key] * unit, row["instance_id"], row["model_name"])
        yield family
    missed = Family(
        "kvserver_lookup_missed_tokens",
        "Tokens looked up and not found, by what became of the first missing chunk.",
        Kind.COUNTER,
        (*_INSTANCE, "reason"),
    )
    for row in rows:
        for reason, tokens in row["requests"]["missed_tokens"].items():
            missed.add(tokens, row["instance_id"], row["model_name"], reason)
    yield missed
    yield from _loads([row for row in rows if row.get("load") is not None])


def _loads(rows: Sequence[dict[str, Any]]) -> Iterable[Family]:
    for name, text, key in _LOADS:
        family = Family(name, text, Kind.GAUGE, _INSTANCE)
        for row in rows:
            if not row["load"]["stale"]:
                family.add(row["load"][key], row["instance_id"], row["model_name"])
        yield family
    age = Family("kvserver_engine_load_age_seconds", "Since the engine told its load.", Kind.GAUGE, _INSTANCE)
    for row in rows:
        age.add(row["load"]["age_seconds"], row["instance_id"], row["model_name"])
    yield age


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


# ---- Prometheus -------------------------------------------------------------------------------


class _Collector:
    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return map(_metric, self._families)


def _metric(family: Family) -> Metric:
    match family.kind:
        case Kind.COUNTER:
            counter = CounterMetricFamily(family.name, family.help, labels=family.labels)
            for labels, figure in family.points:
                counter.add_metric(labels, cast(float, figure))
            return counter
        case Kind.GAUGE:
            gauge = GaugeMetricFamily(family.name, family.help, labels=family.labels)
            for labels, figure in family.points:
                gauge.add_metric(labels, cast(float, figure))
            return gauge
        case Kind.HISTOGRAM:
            histogram = HistogramMetricFamily(family.name, family.help, labels=family.labels)
            bounds = [*map(repr, family.bounds), "+Inf"]
            for labels, figure in family.points:
                assert isinstance(figure, Buckets)
                below = list(zip(bounds, accumulate(figure.counts), strict=True))
                histogram.add_metric(labels, below, figure.sum)
            return histogram


def render(families: Iterable[Family]) -> bytes:
    """Their Prometheus text."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(families))
    return generate_latest(registry)
