"""A cache and tiers of L2, the events that the server's loop publishes of them, and the hub that makes KV events of them.

The bus handles events only in `handle_events()` and `catch_up()`, unless the gate is open.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from kvserver.cache import Cache, Groups, PagePool, one_group, tails_of
from kvserver.cache.eviction import LeastRecentlyUsed
from kvserver.events import (
    Bus,
    ChunksEvicted,
    ChunksStored,
    Event,
    InstanceDescribed,
    L1Cleared,
    L1Resynced,
    Subscriber,
)
from kvserver.events.chunk_events import publish_evicted
from kvserver.kv_events import Hub, Tier
from kvserver.kv_events.types import DirectEvent
from kvserver.l2 import ObjectName
from kvserver.protocol import ObjectGroup
from kvserver.tiering.events import L2Events
from kvserver.tiering.resync import resync_of_l1

from .daemon import wait_until
from .kv_chunks import Prompt, Witness, scheduler
from .listed_tier import ListedTier
from .turns import repeat

PAGE = 4096
TAILS = Groups([ObjectGroup("full", (0,), 1)], 1, 1, tails=True)


class Gated(Subscriber):
    """A subscriber that holds up the bus while its gate is shut."""

    name = "gated"

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.resyncs: list[L1Resynced] = []

    def handle(self, event: Event) -> None:
        assert self.gate.wait(10)
        if isinstance(event, L1Resynced):
            self.resyncs.append(event)

    def close(self) -> None:
        pass


class Loop:
    def __init__(
        self,
        limit: int,
        pages: int = 40,
        memory_bytes: int = 1 << 30,
        observe: Callable[[DirectEvent], None] = lambda _: None,
        groups: Mapping[bytes, Groups] = {},
        tiers: Sequence[ListedTier] = (),
    ) -> None:
        """`observe` receives every event of the hub after the witness. `groups`: of namespaces with several."""

        def hand_over(event: DirectEvent) -> None:
            self.witness.observe(event)
            observe(event)

        self.memory_bytes = memory_bytes
        self.cache = Cache(PagePool(pages * PAGE, PAGE), LeastRecentlyUsed())
        self.witness, self.gated = Witness(), Gated()
        self.hub = Hub(memory_bytes, hand_over)
        self.bus = Bus([self.gated, self.hub], limit)
        self.resync = resync_of_l1(self.cache.index, self.bus)
        self.tiers = tiers
        self.l2_events = L2Events(tiers, self.bus)  # type: ignore[arg-type]
        self.groups = groups
        self.bus.start()

    def reader(self, instance_id: str, prefix: bytes) -> None:
        self.bus.publish(InstanceDescribed(1, scheduler(instance_id), prefix, 2, 4))

    def groups_of(self, namespace: bytes) -> Groups:
        return self.groups.get(namespace) or one_group(1)

    def store(
        self,
        namespace: bytes,
        keys: list[bytes],
        copied: bool = True,
        contents: Prompt | None = None,
        group: int = 0,
    ) -> None:
        groups = self.groups_of(namespace)
        if contents is not None:
            ready = {
                of: [key for key in keys if (namespace, key) in self.ready_objects(of.number)] for of in groups.objects
            }
            in_l2 = self.l2_events.present(namespace, len(ready), b"".join(contents.keys))
            self.bus.publish(contents.described(namespace, ready=ready, in_l2=in_l2))
        plan = self.cache.plan_store(
            namespace,
            groups,
            b"".join(keys),
            PAGE,
            group=group,
            slots=range(groups.first[group], groups.first[group] + 1),
        )
        publish_evicted(self.bus, 1, plan)
        self.cache.finish_store(plan, copied)
        if plan.ready:
            ready = b"".join(chunk.key for chunk in plan.ready)
            self.bus.publish(ChunksStored(1, "engine", "m", namespace, ready, groups.objects[group]), len(ready))

    def store_tail(self, namespace: bytes, blocks: Prompt, first: int) -> None:
        """The blocks from number `first` on, one by one, with their contents. `blocks`: chunks of one block."""
        keys, tails = blocks.keys[first:], tails_of(namespace)
        found = self.cache.index.find_chunks(tails, b"".join(keys))
        ready = {TAILS.objects[0]: [chunk.key for chunk in found if chunk is not None and chunk.ready]}
        self.bus.publish(blocks.described(namespace, first, ready=ready))
        plan = self.cache.plan_store(tails, TAILS, b"".join(keys), PAGE)
        publish_evicted(self.bus, 1, plan)
        self.cache.finish_store(plan, True)
        if plan.ready:
            stored = b"".join(chunk.key for chunk in plan.ready)
            self.bus.publish(ChunksStored(1, "engine", "m", namespace, stored, TAILS.objects[0]), len(stored))

    def write(self, namespace: bytes, keys: list[bytes], group: int, tier: int) -> list[bytes]:
        """To the tier, those that L1 has. Returns their keys."""
        chunks = self.cache.index.find_chunks(namespace, b"".join(keys))
        there = [chunk.key for chunk in chunks if chunk is not None and chunk.ready >> group & 1]
        for key in there:
            self.tiers[tier].put(ObjectName(namespace, group, key))
        self.l2_events.publish()
        return there

    def drop(self, namespace: bytes, keys: list[bytes], group: int) -> None:
        if dropped := self.cache.drop_objects(namespace, group, b"".join(keys)):
            self.bus.publish(
                ChunksEvicted(1, namespace, dropped, self.groups_of(namespace).objects[group]), len(dropped)
            )

    def clear(self, base: bytes) -> None:
        self.cache.clear_namespaces(base)
        self.l2_events.clear(base)
        self.bus.publish(L1Cleared(1, base))
        for tier in self.tiers:
            tier.clear(base)
        repeat(self.cache.step)

    def handle_events(self) -> None:
        self.gated.gate.set()
        assert self.bus.flush()
        self.gated.gate.clear()

    def catch_up(self) -> None:
        """Turns of the loop until the resync is complete and all events are handled."""

        def is_complete() -> bool:
            more = False
            for step in (self.resync.step, self.l2_events.step):
                self.handle_events()  # or a resync without room looks as if it had ended
                more |= step()
            self.handle_events()
            return not more and not self.bus.needs_resync

        wait_until(is_complete)

    @property
    def ready_chunks(self) -> list[tuple[bytes, bytes]]:
        """Those whose object of the first group is READY."""
        return self.ready_objects(0)

    def ready_objects(self, group: int) -> list[tuple[bytes, bytes]]:
        """-1: single blocks."""
        tails, group = group < 0, max(group, 0)
        return sorted(
            (chunk.namespace.id.removesuffix(b"tails"), chunk.key)
            for chunk in self.cache.index
            if chunk.ready >> group & 1 and chunk.namespace.groups.tails == tails
        )

    def in_l2(self, group: int) -> list[tuple[bytes, bytes]]:
        names = {name for tier in self.tiers for name in tier.readable}
        return sorted((namespace, key) for namespace, of, key in names if of == group)

    def check(self) -> None:
        """The witness has what the tiers have; the hub's snapshot and its status have what is described of it."""
        number, chunks = self.hub.snapshot_of_tiers(b"")
        status, described = self.hub.status(), []
        for tier, objects in ((Tier.L1, self.ready_objects), (Tier.L2, self.in_l2)):
            for group in {-1, 0, *(of.number for each in self.groups.values() for of in each.objects)}:
                held, keys = objects(group), self.witness.keys_in[tier].get(group, Counter())
                assert sorted(keys.elements()) == held, (tier, group)
                named = {
                    name: chunk
                    for resident in self.witness.tiers[tier].values()
                    for name, chunk in resident.items()
                    if chunk.group == group
                }
                assert set(named) <= set(held)
                described += [(tier, id(chunk)) for chunk in named.values()]
        assert sorted((tier.value, id(chunk)) for tier, chunk in chunks) == sorted((t.value, at) for t, at in described)
        assert number == len(self.witness.events) == status.events
        assert status.described_chunks == len(chunks)
        assert status.state_bytes <= self.memory_bytes

    def close(self) -> None:
        self.gated.gate.set()
        self.bus.close()
        assert self.bus.errors == {}
