"""Metric families of what the cache brought each instance, and what its copies took.

Owns: names and help texts of these families; their values come from a status snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvserver.protocol import buckets
from kvserver.telemetry.benefit import COPY_BUCKETS, DIRECTIONS, RATIO_BUCKETS
from kvserver.telemetry.families import Family, Kind

_INSTANCE = ("instance_id", "model_name")
_BY_LABEL = (  # name, help, label, key of the instance's requests
    (
        "kvserver_prompt_tokens",
        "Prompt tokens by source: the engine's own prefix cache (l0), loaded from L1 or L2, or computed.",
        "source",
        "prompt_tokens",
    ),
    (
        "kvserver_request_loads",
        "Loads of requests, each once for all ranks; failed if it failed on any rank.",
        "outcome",
        "request_loads",
    ),
)
_SECONDS = (
    (
        "kvserver_prefill_seconds_gained",
        "Prefill time that loads spared the engine, less the time the loads took, of loads faster than computing.",
        "prefill_seconds_gained",
    ),
    (
        "kvserver_prefill_seconds_lost",
        "Time that loads took beyond the prefill time they spared, of loads slower than computing and failed ones.",
        "prefill_seconds_lost",
    ),
)
_DURATIONS = {
    "load": "Time of completed loads at the daemon, by rank: waiting (queue), and copying by the device (copy).",
    "store": "Time of completed stores at the daemon, by rank: waiting (queue), and copying by the device (copy).",
}


def benefit_families(rows: Sequence[dict[str, Any]]) -> Iterable[Family]:
    for name, text, label, key in _BY_LABEL:
        family = Family(name, text, Kind.COUNTER, (*_INSTANCE, label))
        for row in rows:
            for which, count in row["requests"][key].items():
                family.add(count, row["instance_id"], row["model_name"], which)
        yield family
    for name, text, key in _SECONDS:
        family = Family(name, text, Kind.COUNTER, _INSTANCE)
        for row in rows:
            family.add(row["requests"][key], row["instance_id"], row["model_name"])
        yield family
    ratio = Family(
        "kvserver_request_hit_ratio",
        "Share of each request's prompt tokens that the engine did not compute.",
        Kind.HISTOGRAM,
        _INSTANCE,
        bounds=RATIO_BUCKETS,
    )
    for row in rows:
        ratio.add(buckets(row["requests"]["hit_ratio"]), row["instance_id"], row["model_name"])
    yield ratio
    for direction in DIRECTIONS:
        duration = Family(
            f"kvserver_{direction}_duration_seconds",
            _DURATIONS[direction],
            Kind.HISTOGRAM,
            (*_INSTANCE, "phase"),
            bounds=COPY_BUCKETS,
        )
        for row in rows:
            for phase, figures in row["requests"][f"{direction}_duration"].items():
                duration.add(buckets(figures), row["instance_id"], row["model_name"], phase)
        yield duration
