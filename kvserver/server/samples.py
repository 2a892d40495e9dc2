"""Samples for the page's charts: counters and gauges of one moment, as floats in the order of `SERIES`.

A sample is cheaper than `/status`: nothing is copied, and each engine costs a few additions. From the loop's thread. Refuses to
know: how many samples are kept (`web.history`).
"""

from __future__ import annotations

import time
from array import array

from kvserver.cache import Cache
from kvserver.engines import Counts, Instances
from kvserver.events import Bus
from kvserver.telemetry import SOURCES, Rpc
from kvserver.tiering import Storage

_COUNTED = (
    "lookup_tokens",
    "hit_tokens",
    "stored_bytes",
    "loaded_bytes",
    "store_nanos",
    "load_nanos",
    "failed_stores",
    "failed_loads",
)
COUNTERS = (
    *(f"prompt_tokens_{source}" for source in SOURCES),
    *_COUNTED,
    "prefill_seconds_gained",
    "prefill_seconds_lost",
    "errors",
    "dropped_events",
    "evicted_chunks",
)
GAUGES = ("l1_used_bytes", "l2_used_bytes", "engines")
SERIES = ("time", *COUNTERS, *GAUGES)  # time: seconds since 1970


def take_sample(instances: Instances, cache: Cache, storage: Storage, bus: Bus, rpc: Rpc) -> array[float]:
    """Values of SERIES, one float each."""
    counts: list[Counts] = instances.all_counts()
    benefits = [each.benefit for each in counts]
    return array(
        "d",
        (
            time.time(),
            *(sum(benefit.prompt_tokens[source] for benefit in benefits) for source in SOURCES),
            *(sum(getattr(each, name) for each in counts) for name in _COUNTED),
            sum(benefit.gained_seconds for benefit in benefits),
            sum(benefit.lost_seconds for benefit in benefits),
            rpc.faults,
            sum(bus.dropped.values()),
            cache.space.evicted_chunks,
            cache.pool.used_pages * cache.pool.page_bytes,
            sum(each.tier.status().used_bytes for each in storage.tiers.all),
            len(instances.by_id),
        ),
    )
