"""Counters of the server and their Prometheus form.

Owns: RPC counts and times, and the mapping from a status snapshot to metric families (names of the
public surface; they exist from the start). Refuses to know: where the status comes from. `Rpc` is
written by the loop thread only; `render` runs in the HTTP thread on a snapshot.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from kvserver import __version__

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


class _Collector:
    def __init__(self, status: dict[str, Any], rpc: dict[str, Any]) -> None:
        self._status = status
        self._rpc = rpc

    def collect(self) -> Iterable[Metric]:
        yield from self._l1()
        yield from self._gpus()
        yield from self._instances()
        yield from self._rpcs()
        yield _gauge(
            "kvserver_loop_lag_seconds",
            "Longest turn of the event loop in the last 10 to 20 seconds.",
            self._status["loop_lag_seconds"],
        )
        build = GaugeMetricFamily("kvserver_build_info", "Version of the server.", labels=["version"])
        build.add_metric([__version__], 1)
        yield build

    def _l1(self) -> Iterable[Metric]:
        l1 = self._status["l1"]
        yield _gauge("kvserver_l1_size_bytes", "Memory of L1.", l1["size_bytes"])
        yield _gauge("kvserver_l1_used_bytes", "Memory of L1 that holds chunks.", l1["used_bytes"])
        yield _gauge("kvserver_l1_pinned_bytes", "Memory of L1 that is pinned for GPUs.", l1["pinned_bytes"])
        yield _gauge("kvserver_l1_chunks", "Chunks in L1, also those being filled.", l1["chunks"])
        yield CounterMetricFamily("kvserver_l1_evicted_chunks", "Chunks evicted from L1.", value=l1["evictions"])

    def _gpus(self) -> Iterable[Metric]:
        mapped = GaugeMetricFamily("kvserver_gpu_mapped_bytes", "Memory of engines, mapped.", labels=["device"])
        copied = CounterMetricFamily(
            "kvserver_gpu_copied_bytes",
            "Bytes between L1 and a GPU, by DMA of each run or staged by kernels.",
            labels=["device", "direction", "way"],
        )
        unpinned = CounterMetricFamily(
            "kvserver_gpu_unpinned_bytes", "Those of L1 that was not pinned.", labels=["device", "direction"]
        )
        for gpu in self._status["gpus"]:
            mapped.add_metric([gpu["device"]], gpu["mapped_bytes"])
            for direction in ("store", "load"):
                lane = gpu[direction]
                for way in ("dma", "staged"):
                    copied.add_metric([gpu["device"], direction, way], lane[f"{way}_bytes"])
                unpinned.add_metric([gpu["device"], direction], lane["unpinned_bytes"])
        yield from (mapped, copied, unpinned)

    def _instances(self) -> Iterable[Metric]:
        rows = [
            ("kvserver_lookup_requests", "Lookups answered.", "lookups", 1),
            ("kvserver_lookup_tokens", "Tokens of whole chunks asked for.", "lookup_tokens", 1),
            ("kvserver_lookup_hit_tokens", "Tokens of chunks found READY.", "hit_tokens", 1),
            ("kvserver_store_bytes", "Bytes copied L0 to L1.", "stored_bytes", 1),
            ("kvserver_load_bytes", "Bytes copied L1 to L0.", "loaded_bytes", 1),
            ("kvserver_store_seconds", "Time copying L0 to L1.", "store_nanos", 1e-9),
            ("kvserver_load_seconds", "Time copying L1 to L0.", "load_nanos", 1e-9),
            ("kvserver_failed_stores", "Stores refused, cancelled or failed.", "failed_stores", 1),
            ("kvserver_failed_loads", "Loads refused, cancelled or failed.", "failed_loads", 1),
            ("kvserver_l0_report_gaps", "Sequence gaps in the engine's reports.", "sequence_gaps", 1),
            ("kvserver_l0_records", "Block-pool records received.", "block_records", 1),
        ]
        for name, text, key, unit in rows:
            family = CounterMetricFamily(name, text, labels=["instance_id", "model_name"])
            for instance in self._status["instances"]:
                labels = [instance["instance_id"], instance["model_name"]]
                family.add_metric(labels, instance["requests"][key] * unit)
            yield family

    def _rpcs(self) -> Iterable[Metric]:
        times = HistogramMetricFamily("kvserver_rpc_seconds", "Arrival of a request to its reply.", labels=["type"])
        for name, counts in self._rpc["times"].items():
            total, buckets = 0, []
            for bound, count in zip([*RPC_BUCKETS, float("inf")], counts, strict=True):
                total += count
                buckets.append(("+Inf" if bound == float("inf") else repr(bound), total))
            times.add_metric([name], buckets, self._rpc["seconds"][name])
        yield times
        errors = CounterMetricFamily("kvserver_rpc_errors", "Errors sent, by code.", labels=["reason"])
        for code, count in self._rpc["errors"].items():
            errors.add_metric([code], count)
        yield errors


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def render(status: dict[str, Any], rpc: dict[str, Any]) -> bytes:
    """The Prometheus text of one snapshot."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(status, rpc))
    return generate_latest(registry)
