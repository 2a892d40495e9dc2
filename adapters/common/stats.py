"""Reports of the halves to the engine's metrics and log: the counters, and how those of ranks and halves add up.

A report is a dict that the engine carries as JSON or msgpack. It has a number for each counter, by label where the counter has
one, a list of seconds for each kind of copy, and the status of the halves. Refuses to know: when an event is to be counted, and
the metrics made of the counts.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from kvserver.adapters.common.cache_status import CacheStatus

HALVES = "halves"  # by name: whether it has a daemon, and why not
QUARANTINED = "quarantined_blocks"
REFUSED = "refused"  # by error code
PROMISED_TOKENS, LOADED_TOKENS = "promised_tokens", "loaded_tokens"  # by tier
WITHDRAWN_TOKENS = "withdrawn_tokens"  # by tier and reason, as "l1 load_failed"
TIERS = ("l1", "l2")
WITHDRAWN_REASONS = ("load_failed", "not_used", "not_placed", "request_ended")
_BY_LABEL = (REFUSED, PROMISED_TOKENS, LOADED_TOKENS, WITHDRAWN_TOKENS)  # counters "refused_internal", ...
FAULTS = "faults"  # by place
COUNTERS = {
    "lookups": "Lookups sent to kvserver.",
    "lookup_hits": "Lookups that found at least one chunk or single block.",
    "lookup_timeouts": "Lookups that were not answered in time.",
    "fills": "Requests that waited until kvserver had read from its storage what their lookup missed.",
    "late_fills": "Fills that kvserver did not answer in time.",
    "bad_wishes": "Values in kv_transfer_params of requests that kvserver does not know, and ignored.",
    "refused_pins": "Pins that requests asked for and the engine's configuration does not allow (kvserver.trust_request_pins).",
    "refused_tenants": "Tenants that requests named and the engine's configuration does not allow (kvserver.trust_request_pins).",
    "unknown_hints": "Actions in kv_hints of requests that kvserver does not know, and left alone.",
    "prefix_resets": "Resets of the prefix cache after which the engine shares KV with itself only, since its weights may have changed.",
    "replaced_lora_requests": "Times that a request was kept from the cache, since the files of its LoRA were replaced.",
    "unknown_lora_requests": "Times that a request was kept from the cache, since the engine has had more LoRAs than it keeps apart.",
    "foreign_embeddings_requests": "Times that a request was kept from the cache, since prompt embeddings of another dtype than the model's arrived.",
    "missing_embeddings_requests": "Requests that ended with an error, since their images, videos or sounds came without embeddings and their KV was not found.",
    "load_bytes": "Bytes loaded from kvserver, by all ranks.",
    "load_failures": "Loads that failed, by all ranks; the engine computes those tokens itself.",
    "store_bytes": "Bytes stored in kvserver, by all ranks, without chunks that were already stored.",
    "store_failures": "Stores that did not complete, by all ranks.",
    "cancelled_stores": "Stores that were cancelled since the engine needed the blocks or its weights may have changed, by all ranks.",
    "dropped_stores": "Stores that were never sent: the step that computed their KV was taken back, or was not accepted before the request was aborted.",
    "unsent": "Loads, stores and notices that could not be sent to kvserver: no connection, or its queue was full.",
}
TIMES = {
    "load_seconds": "Duration of each load of one rank, measured by the rank.",
    "store_seconds": "Duration of each store of one rank, measured by the rank.",
}
_REPEAT_SECONDS = 1.0  # a half reports an unchanged status again: each report reaches one of the front ends


class StatsReporter:
    """Reporter of one half; remembers what it has reported."""

    def __init__(self, half: str) -> None:
        self._half = half
        self._counted: Counter[str] = Counter()  # as of the last report
        self._faults: Counter[str] = Counter()
        self._status: CacheStatus | None = None
        self._again_at = 0.0
        self._quarantined = 0

    def _add_counts(self, data: dict[str, Any], counters: Counter[str]) -> None:
        for name, more in (counters - self._counted).items():
            if name in COUNTERS:
                data[name] = more
            else:
                for family in _BY_LABEL:
                    if name.startswith(f"{family}_"):
                        data.setdefault(family, {})[name.removeprefix(f"{family}_")] = more
        self._counted = counters.copy()

    def report(
        self, counters: Counter[str], errors: Counter[str], status: CacheStatus, quarantined: int
    ) -> dict[str, Any]:
        """Growth of the counts after the last report, and the status of the half. `errors`: by "place: kind"."""
        data: dict[str, Any] = {}
        if dict.__ne__(counters, self._counted):  # in most steps nothing has grown; a Counter's own comparison is slow
            self._add_counts(data, counters)
        for kind, more in (errors - self._faults).items() if errors else ():
            places = data.setdefault(FAULTS, Counter())
            places[kind.rsplit(": ", 1)[0]] += more
            self._faults[kind] += more
        if quarantined != self._quarantined:
            self._quarantined = data[QUARANTINED] = quarantined
        now = time.monotonic()
        if status != self._status or now >= self._again_at:
            self._status, self._again_at = status, now + _REPEAT_SECONDS
            data[HALVES] = {self._half: list(status)}
        return data


def added(mine: dict[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Two reports as one. `other` is of another half, or newer."""
    data = dict(mine)
    for name, value in other.items():
        if name not in mine or name == QUARANTINED:
            data[name] = value
        elif name == HALVES:
            data[name] = {**mine[name], **value}
        elif isinstance(value, dict):
            data[name] = dict(Counter(mine[name]) + Counter(value))
        else:
            data[name] = mine[name] + value
    return data


def summary(data: Mapping[str, Any]) -> dict[str, int | float]:
    """Summary for a line of the engine's log: sums, and the number of copies."""
    line: dict[str, int | float] = {}
    if HALVES in data:
        line["connected"] = int(all(CacheStatus(*half).connected for half in data[HALVES].values()))
    for name in (*COUNTERS, QUARANTINED, *_BY_LABEL, FAULTS, *TIMES):
        if name in TIMES and name in data:
            line[name.replace("_seconds", "s")] = len(data[name])
            line[name] = round(sum(data[name]), 4)
        elif name in data:
            value = data[name]
            line[name] = sum(value.values()) if isinstance(value, dict) else value
    return line
