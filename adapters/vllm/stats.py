"""What vLLM's own Prometheus and log say of the connector: `vllm:kvserver_*`.

Owns: the figures of one half between two steps, how those of ranks and halves add up, and the metrics made of them.
Refuses to know: when something is to be counted.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

import prometheus_client
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

# What vLLM calls hits that came from CPU memory, where it tells hits by their source.
HOST: Any = getattr(getattr(base, "CacheHitSource", None), "HOST", None)

log = logging.getLogger("vllm.kvserver")

_PREFIX = "vllm:kvserver_"
SCHEDULER = (
    "lookups",
    "lookup_hits",
    "lookup_timeouts",
    "prefix_resets",
    "replaced_lora_requests",
)  # what the scheduler half counts
_COUNTERS = {
    "lookups": "Lookups sent to kvserver.",
    "lookup_hits": "Lookups that found something.",
    "lookup_timeouts": "Lookups that were not answered in time.",
    "prefix_resets": "Resets of the prefix cache after which the engine shares KV with itself only: its weights may have changed.",
    "replaced_lora_requests": "Times that a request was kept from the cache since the files of its LoRA were replaced.",
    "load_bytes": "Bytes loaded from kvserver, by all ranks.",
    "load_failures": "Loads that failed, by all ranks; the engine computes those tokens itself.",
    "store_bytes": "Bytes stored in kvserver, by all ranks; not those that were there.",
    "store_failures": "Stores that did not come to their end, by all ranks.",
}
_TIMES = {
    "load_seconds": "Duration of each load of one rank, as the rank sees it.",
    "store_seconds": "Duration of each store of one rank, as the rank sees it.",
}
_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class KVServerStats(KVConnectorStats):  # type: ignore[misc]
    """`data` holds what happened: a number for each counter, a list of seconds for each kind of copy."""

    def add(self, name: str, amount: int = 1) -> None:
        self.data[name] = self.data.get(name, 0) + amount

    def ended(self, name: str, seconds: float, copied: int) -> None:
        """A load or a store."""
        self.data.setdefault(f"{name}_seconds", []).append(seconds)
        self.add(f"{name}_bytes", copied)

    def take(self) -> KVServerStats | None:
        """What there was since the last time; None if nothing."""
        if self.is_empty():
            return None
        taken = KVServerStats(self.data)
        self.reset()
        return taken

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVServerStats:
        for name, figure in other.data.items():
            self.data[name] = self.data[name] + figure if name in self.data else figure
        return self

    def reduce(self) -> dict[str, int | float]:
        """For a line of vLLM's log: sums, and of copies their number."""
        figures: dict[str, int | float] = {}
        for name in (*_COUNTERS, *_TIMES):
            if name in _TIMES and name in self.data:
                figures[name.replace("_seconds", "s")] = len(self.data[name])
                figures[name] = round(sum(self.data[name]), 4)
            elif name in self.data:
                figures[name] = self.data[name]
        return figures

    def is_empty(self) -> bool:
        return not self.data


def grown(counters: Mapping[str, int], told: Counter[str]) -> KVServerStats | None:
    """By how much the scheduler half's counts exceed what was told before, which is updated."""
    stats = KVServerStats()
    for name in SCHEDULER:
        if counters[name] > told[name]:
            stats.add(name, counters[name] - told[name])
            told[name] = counters[name]
    return stats.take()


class KVServerPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """With vLLM's labels, one series for each engine of this front end.

    Never raises: vLLM makes it and feeds it where nothing would catch that, and its front end would end.
    """

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine)
        self._failed = False
        self._counters: dict[str, Any] = {}
        self._times: dict[str, Any] = {}
        try:
            counter, histogram = metric_types[prometheus_client.Counter], metric_types[prometheus_client.Histogram]
            for name, text in _COUNTERS.items():
                self._counters[name] = create_metric_per_engine(counter(_PREFIX + name, text, labelnames), per_engine)
            for name, text in _TIMES.items():
                made = histogram(_PREFIX + name, text, labelnames, buckets=_BUCKETS)
                self._times[name] = create_metric_per_engine(made, per_engine)
        except Exception:
            self._incomplete()

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        try:
            for name, figure in transfer_stats_data.items():
                if name in self._counters:
                    self._counters[name][engine_idx].inc(figure)
                elif name in self._times:
                    for seconds in figure:
                        self._times[name][engine_idx].observe(seconds)
        except Exception:
            self._incomplete()

    def _incomplete(self) -> None:
        """REQUIRES: called while an exception is handled."""
        if not self._failed:
            log.exception("kvserver: its figures in vLLM's metrics are not complete")
        self._failed = True
