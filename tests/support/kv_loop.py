"""A cache, the events that the server's loop publishes of it, and the hub that makes KV events of them.

The bus handles events only in `handle_events()` and `catch_up()`, unless the gate is open.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping

from kvserver.cache import Cache, Groups, PagePool, one_group
from kvserver.cache.eviction import LeastRecentlyUsed
from kvserver.events import Bus, ChunksEvicted, ChunksStored, Event, InstanceDescribed, L1Cleared, L1Resynced
from kvserver.kv_events import Hub
from kvserver.kv_events.types import DirectEvent
from kvserver.server.resync import Resync

from .daemon import wait_until
from .kv_chunks import Prompt, Witness, scheduler
from .turns import repeat

PAGE = 4096


class Gated:
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
    ) -> None:
        """`observe` receives every event of the hub after the witness. `groups`: of namespaces with several."""

        def hand_over(event: DirectEvent) -> None:
            self.witness.observe(event)
            observe(event)

        self.cache = Cache(PagePool(pages * PAGE, PAGE), LeastRecentlyUsed())
        self.witness, self.gated = Witness(), Gated()
        self.hub = Hub(memory_bytes, hand_over)
        self.bus = Bus([self.gated, self.hub], limit)
        self.resync = Resync(self.cache.index, self.bus)
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
            self.bus.publish(contents.described(namespace, ready=ready))
        plan = self.cache.plan_store(
            namespace,
            groups,
            b"".join(keys),
            PAGE,
            group=group,
            slots=range(groups.first[group], groups.first[group] + 1),
        )
        for space in {space for space, _ in plan.evicted}:
            keys_of_space = b"".join(key for owner, key in plan.evicted if owner == space)
            self.bus.publish(ChunksEvicted(1, space, keys_of_space), len(keys_of_space))
        self.cache.finish_store(plan, copied)
        if plan.ready:
            ready = b"".join(chunk.key for chunk in plan.ready)
            self.bus.publish(ChunksStored(1, "engine", "m", namespace, ready, groups.objects[group]), len(ready))

    def drop(self, namespace: bytes, keys: list[bytes], group: int) -> None:
        if dropped := self.cache.drop_objects(namespace, group, b"".join(keys)):
            self.bus.publish(
                ChunksEvicted(1, namespace, dropped, self.groups_of(namespace).objects[group]), len(dropped)
            )

    def clear(self, base: bytes) -> None:
        self.cache.clear_namespaces(base)
        self.bus.publish(L1Cleared(1, base))
        repeat(self.cache.step)

    def handle_events(self) -> None:
        self.gated.gate.set()
        assert self.bus.flush()
        self.gated.gate.clear()

    def catch_up(self) -> None:
        """Turns of the loop until the resync is complete and all events are handled."""

        def is_complete() -> bool:
            self.handle_events()  # so that there is room
            more = self.resync.step()
            self.handle_events()
            return not more and not self.bus.lost_chunks

        wait_until(is_complete)

    @property
    def ready_chunks(self) -> list[tuple[bytes, bytes]]:
        """Those whose object of the first group is READY."""
        return self.ready_objects(0)

    def ready_objects(self, group: int) -> list[tuple[bytes, bytes]]:
        return sorted((chunk.namespace.id, chunk.key) for chunk in self.cache.index if chunk.ready >> group & 1)

    def check(self) -> None:
        """The witness has what the cache has; the hub's snapshot and its status have what is described of it."""
        number, chunks = self.hub.snapshot(b"")
        status = self.hub.status()
        members = {of.members: of.number for each in self.groups.values() for of in each.objects} | {(): 0}
        for group in members.values():
            assert sorted(self.witness.keys_of.get(group, Counter()).elements()) == self.ready_objects(group)
        for of, resident in self.witness.groups.items():
            assert set(resident) <= set(self.ready_objects(members[of]))
        known = [chunk for resident in self.witness.groups.values() for chunk in resident.values()]
        assert sorted(map(id, chunks)) == sorted(map(id, known))
        assert number == len(self.witness.events) == status.events
        assert status.described_chunks == len(chunks)

    def close(self) -> None:
        self.gated.gate.set()
        self.bus.close()
        assert self.bus.errors == {}
