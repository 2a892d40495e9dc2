"""What the halves report to vLLM's metrics and log.

Owns: the counts of one half between two steps, and how those of ranks and halves add up. Refuses to know: when an event is
to be counted, and the metrics made of the counts (`prom`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from kvserver.adapters.common.cache_status import CacheStatus
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

# vLLM's name for hits from CPU memory, where it counts hits by their source.
HOST: Any = getattr(getattr(base, "CacheHitSource", None), "HOST", None)

HALVES = "halves"  # by name: whether it has a daemon, and why not
QUARANTINED = "quarantined_blocks"
REFUSED = "refused"  # by error code
FAULTS = "faults"  # by place
COUNTERS = {
    "lookups": "Lookups sent to kvserver.",
    "lookup_hits": "Lookups that found at least one chunk.",
    "lookup_timeouts": "Lookups that were not answered in time.",
    "prefix_resets": "Resets of the prefix cache after which the engine shares KV with itself only, since its weights may have changed.",
    "replaced_lora_requests": "Times that a request was kept from the cache, since the files of its LoRA were replaced.",
    "load_bytes": "Bytes loaded from kvserver, by all ranks.",
    "load_failures": "Loads that failed, by all ranks; the engine computes those tokens itself.",
    "store_bytes": "Bytes stored in kvserver, by all ranks, without chunks that were already stored.",
    "store_failures": "Stores that did not complete, by all ranks.",
    "cancelled_stores": "Stores that were cancelled since the engine needed the blocks, by all ranks.",
    "unsent": "Loads, stores and notices that could not be sent to kvserver: no connection, or its queue was full.",
}
TIMES = {
    "load_seconds": "Duration of each load of one rank, measured by the rank.",
    "store_seconds": "Duration of each store of one rank, measured by the rank.",
}
_REPEAT_SECONDS = 1.0  # a half reports an unchanged status again: each report reaches one of the front ends
# Counters of the halves, and the names under which they are reported.
_NAMES = {
    **{
        name: name
        for name in ("lookups", "lookup_hits", "lookup_timeouts", "prefix_resets", "replaced_lora_requests", "unsent")
    },
    **{f"not_sent_{reason}": "unsent" for reason in ("late", "gone", "full", "failed")},
    "stores_cancelled_for_reuse": "cancelled_stores",
}


class KVServerStats(KVConnectorStats):  # type: ignore[misc]
    """`data` holds what happened: a number for each counter, by label where it has one, a list of seconds for each kind of
    copy; and how the halves are.
    """

    def add(self, name: str, amount: int = 1) -> None:
        self.data[name] = self.data.get(name, 0) + amount

    def add_to(self, name: str, label: str, amount: int) -> None:
        labels = self.data.setdefault(name, {})
        labels[label] = labels.get(label, 0) + amount

    def ended(self, name: str, seconds: float, copied: int) -> None:
        """A load or a store."""
        self.data.setdefault(f"{name}_seconds", []).append(seconds)
        self.add(f"{name}_bytes", copied)

    def drain(self) -> KVServerStats | None:
        """The stats since the last call; None if there are none."""
        if self.is_empty():
            return None
        taken = KVServerStats(self.data)
        self.reset()
        return taken

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVServerStats:
        """`other` is of another half, or newer."""
        for name, value in other.data.items():
            mine = self.data.get(name)
            if mine is None or name == QUARANTINED:
                self.data[name] = value
            elif name == HALVES:
                self.data[name] = {**mine, **value}
            elif isinstance(value, dict):
                self.data[name] = dict(Counter(mine) + Counter(value))
            else:
                self.data[name] = mine + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """For a line of vLLM's log: sums, and of copies their number."""
        line: dict[str, int | float] = {}
        if HALVES in self.data:
            line["connected"] = int(all(CacheStatus(*half).connected for half in self.data[HALVES].values()))
        for name in (*COUNTERS, QUARANTINED, REFUSED, FAULTS, *TIMES):
            if name in TIMES and name in self.data:
                line[name.replace("_seconds", "s")] = len(self.data[name])
                line[name] = round(sum(self.data[name]), 4)
            elif name in self.data:
                value = self.data[name]
                line[name] = sum(value.values()) if isinstance(value, dict) else value
        return line

    def is_empty(self) -> bool:
        return not self.data


class StatsReporter:
    """Reports of one half: remembers what was reported so far."""

    def __init__(self, half: str) -> None:
        self._half = half
        self._counted: dict[str, int] = {}
        self._faults: dict[str, int] = {}
        self._status: CacheStatus | None = None
        self._again_at = 0.0
        self._quarantined = 0

    def report(
        self,
        stats: KVServerStats,
        counters: Mapping[str, int],
        errors: Mapping[str, int],
        status: CacheStatus,
        quarantined: int,
    ) -> None:
        """Add to `stats` what is new: by how much counts have grown, and how the half is. `errors`: by "place: kind"."""
        for name, more in _grown(counters, self._counted).items():
            if name in _NAMES:
                stats.add(_NAMES[name], more)
            elif name.startswith("refused_"):
                stats.add_to(REFUSED, name.removeprefix("refused_"), more)
        for kind, more in _grown(errors, self._faults).items():
            stats.add_to(FAULTS, kind.rsplit(": ", 1)[0], more)
        if quarantined != self._quarantined:
            self._quarantined = stats.data[QUARANTINED] = quarantined
        now = time.monotonic()
        if status != self._status or now >= self._again_at:
            self._status, self._again_at = status, now + _REPEAT_SECONDS
            stats.data[HALVES] = {self._half: list(status)}


def _grown(counters: Mapping[str, int], before: dict[str, int]) -> dict[str, int]:
    """By how much each counter has grown since `before`, which is updated. Called in every step of the engine."""
    if counters == before:
        return {}
    more = {name: count - before.get(name, 0) for name, count in counters.items() if count != before.get(name, 0)}
    before.update(counters)
    return more
