"""A cache, the events that the server's loop publishes of it, and the hub that makes KV events of them.

The bus handles events only in `handle_events()` and `catch_up()`, unless the gate is open.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvserver.cache import Cache, PagePool
from kvserver.cache.eviction import LeastRecentlyUsed
from kvserver.events import Bus, ChunksEvicted, ChunksStored, Event, InstanceDescribed, L1Cleared, L1Resynced
from kvserver.kv_events import Hub
from kvserver.kv_events.types import KVEvent
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
        observe: Callable[[KVEvent], None] = lambda _: None,
    ) -> None:
        """`observe` receives every KV event after the witness."""

        def hand_over(event: KVEvent) -> None:
            self.witness.observe(event)
            observe(event)

        self.cache = Cache(PagePool(pages * PAGE, PAGE), LeastRecentlyUsed())
        self.witness, self.gated = Witness(), Gated()
        self.hub = Hub(memory_bytes, hand_over)
        self.bus = Bus([self.gated, self.hub], limit)
        self.resync = Resync(self.cache.index, self.bus)
        self.bus.start()

    def reader(self, instance_id: str, prefix: bytes) -> None:
        self.bus.publish(InstanceDescribed(1, scheduler(instance_id), prefix, 2, 4))

    def store(self, namespace: bytes, keys: list[bytes], copied: bool = True, contents: Prompt | None = None) -> None:
        if contents is not None:
            self.bus.publish(contents.described(namespace))
        plan = self.cache.plan_store(namespace, 1, 0, b"".join(keys), PAGE)
        for space in {space for space, _ in plan.evicted}:
            keys_of_space = b"".join(key for owner, key in plan.evicted if owner == space)
            self.bus.publish(ChunksEvicted(1, space, keys_of_space), len(keys_of_space))
        self.cache.finish_store(plan, copied)
        if plan.ready:
            ready = b"".join(chunk.key for chunk in plan.ready)
            self.bus.publish(ChunksStored(1, "engine", "m", namespace, ready), len(ready))

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
        return sorted((chunk.namespace.id, chunk.key) for chunk in self.cache.index if chunk.ready)

    def check(self) -> None:
        """The witness, the hub's snapshot and its status have what the cache has."""
        number, chunks = self.hub.snapshot(b"")
        status, resident = self.hub.status(), self.witness.resident
        assert sorted(resident) == self.ready_chunks
        assert sorted(map(id, chunks)) == sorted(map(id, resident.values()))
        assert number == len(self.witness.events) == status.events
        assert status.chunks == len(chunks)
        assert status.described_chunks == sum(chunk.description is not None for chunk in chunks)

    def close(self) -> None:
        self.gated.gate.set()
        self.bus.close()
        assert self.bus.errors == {}
