"""Events of chunks that left L1 for a plan. Owns: their form. Refuses to know: why a plan needs the space."""

from __future__ import annotations

from collections import defaultdict

from kvserver.cache import StorePlan
from kvserver.events import Bus, ChunksEvicted
from kvserver.protocol import KEY_BYTES


def publish_evicted(bus: Bus, now_ns: int, plan: StorePlan) -> None:
    """Evictions since the last call: published before another store can store the same chunks again."""
    evicted: defaultdict[bytes, list[bytes]] = defaultdict(list)
    for namespace, key in plan.evicted:
        evicted[namespace].append(key)
    plan.evicted.clear()
    for namespace, keys in evicted.items():
        bus.publish(ChunksEvicted(now_ns, namespace, b"".join(keys)), len(keys) * KEY_BYTES)
