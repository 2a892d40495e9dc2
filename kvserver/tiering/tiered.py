"""TieredStorage: the tiers of `--l2`, what is written to them, read from them and known of them.

Owns: the parts, and the order of their work in a turn. Refuses to know: what a part does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvserver.cache import Cache
from kvserver.engines import Instance
from kvserver.events import Bus
from kvserver.protocol import KEY_BYTES, Durability
from kvserver.tiering.ages import Ages
from kvserver.tiering.events import L2Events
from kvserver.tiering.fills import Fills
from kvserver.tiering.presence import InL2, Presence
from kvserver.tiering.rates import ReadRates
from kvserver.tiering.spill import Spill
from kvserver.tiering.storage import NoStorage, Storage
from kvserver.tiering.tiers import ConfiguredTier, Tiers


class TieredStorage:
    def __init__(
        self, tiers: Sequence[ConfiguredTier], cache: Cache, bus: Bus, lease_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """`tiers`: in the order of preference."""
        self._clock = clock
        self.tiers = Tiers(tiers)
        self.rates = ReadRates(len(tiers), clock)
        self.spill = Spill(cache, self.tiers, self.rates, clock)
        self._presence = Presence(cache, self.tiers, self.rates)
        self.fills = Fills(cache, self.tiers, self._presence, self.rates, bus, lease_seconds, clock)
        self.ages = Ages(self.tiers)
        self._events = L2Events(self.tiers.local, bus, clock)
        self.present = self._events.present
        self.begin, self.loading, self.ended = self.fills.begin, self.fills.loaded, self.fills.end
        self.prefetch = self.fills.prefetch
        self.instance_ended, self.end_fills = self.fills.end_of_instance, self.fills.end_all
        self.stored, self.loaded, self.status = self.spill.stored, self.spill.loaded, self.spill.status

    def found(self, instance: Instance, namespace: bytes, keys: bytes, hit_chunks: int, durability: Durability) -> InL2:
        if hit_chunks:
            self.ages.found(instance, namespace, keys, hit_chunks, durability)
        if hit_chunks * KEY_BYTES == len(keys):
            return InL2(hit_chunks, hit_chunks)
        return self._presence.with_l2(instance, namespace, keys, hit_chunks, durability)

    def clear(self, base: bytes, done: Callable[[str], None]) -> None:
        self._events.clear(base)
        self.fills.clear(base)
        self.tiers.clear(base, done)

    @property
    def completion_fds(self) -> list[int]:
        return self.tiers.completion_fds

    def complete(self) -> None:
        self.tiers.complete()
        self._events.publish()

    def step(self) -> bool:
        more = self.spill.step() | self.fills.step() | self.ages.step()
        return more | self._events.step()

    def tick(self) -> None:
        self.tiers.tick(int(self._clock() * 1e9))
        self.fills.tick()
        self.ages.tick()

    @property
    def next_due_ns(self) -> int | None:
        return self.fills.next_due_ns

    @property
    def failure(self) -> str:
        return self.tiers.failure

    @property
    def is_idle(self) -> bool:
        return not self.tiers.open_tickets and not self.fills.open

    def audit(self) -> None:
        assert self.rates.queued_bytes == 0, f"{self.rates.queued_bytes} bytes to be read by no fill"

    def drain(self, deadline: float) -> int:
        while (not self.spill.ends or self.tiers.open_tickets) and time.monotonic() < deadline:
            self.tiers.complete()
            self.spill.step()
            time.sleep(0.001)
        return self.spill.waiting + self.spill.puts

    def close(self, deadline: float) -> None:
        self.tiers.close(int(deadline * 1e9))


def make_storage(
    tiers: Sequence[ConfiguredTier], cache: Cache, bus: Bus, lease_seconds: float, clock: Callable[[], float]
) -> Storage:
    return TieredStorage(tiers, cache, bus, lease_seconds, clock) if tiers else NoStorage()
