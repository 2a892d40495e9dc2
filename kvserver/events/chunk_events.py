"""Events of chunks and single blocks that left L1 for a plan. Owns: their form. Refuses to know: why a plan needs the space."""

from __future__ import annotations

from collections import defaultdict

from kvserver.cache import GroupObjects, StorePlan, chunks_of
from kvserver.events.bus import Bus
from kvserver.events.types import ChunksEvicted
from kvserver.protocol import KEY_BYTES


def publish_evicted(bus: Bus, now_ns: int, plan: StorePlan) -> None:
    """Evictions since the last call: published before another store can store the same chunks again."""
    evicted: defaultdict[tuple[bytes, GroupObjects | None], list[bytes]] = defaultdict(list)
    for id, key in plan.evicted:
        evicted[id, None].append(key)
    for namespace, key in plan.evicted_tails:
        for group in namespace.groups.objects:
            evicted[chunks_of(namespace.id), group].append(key)
    plan.evicted.clear()
    plan.evicted_tails.clear()
    for (id, of_group), keys in evicted.items():
        bus.publish(ChunksEvicted(now_ns, id, b"".join(keys), of_group), len(keys) * KEY_BYTES)
