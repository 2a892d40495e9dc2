"""Prefetches: prompts that L1 gets from L2 before a request asks for them, each with an id and a time.

A prefetch leases what L1 has of its prompt until its time is over. One for a pin (`/cache/pins`), which protects what arrives, ends with its reads or
the pin. It ends sooner with a clear, when no engine reads its namespace any
more, when it is deleted, or when a request's fill needs its room. Its chunks then are in L1 as any others.

Owns: the prefetches that have not ended, and their leases. Refuses to know: how they are filled (`fills`), prompts, reports.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvserver.cache import Cache
from kvserver.engines import Instance, Instances
from kvserver.protocol import KEY_BYTES, Durability, Lookup, LookupReply
from kvserver.tiering.fill import Fill
from kvserver.tiering.storage import Storage

MOST_PREFETCHES = 64


@dataclass(slots=True, eq=False)
class Prefetch:
    """`chunk_tokens`: of its engine. `deadline`: of the loop's clock; `expires_at`: the same in seconds since 1970, for people."""

    id: str
    model_name: str
    namespace: bytes
    keys: bytes
    chunk_tokens: int
    deadline: float
    expires_at: float
    fill: Fill | None = None
    leased_chunks: int = 0  # in L1
    of_pin: bool = False  # the pin with its id

    @property
    def chunks(self) -> int:
        return len(self.keys) // KEY_BYTES

    @property
    def reads(self) -> bool:
        return self.fill is not None and not self.fill.ended

    @property
    def has_ended(self) -> bool:
        """It reads nothing, and keeps nothing that no pin does."""
        return not self.reads and (self.of_pin or not self.leased_chunks)

    def ready_in(self, now: float) -> float | None:
        """Seconds until all is read; None if no rate is known."""
        if self.fill is None or self.fill.ended:
            return 0.0
        if self.fill.expected_seconds is None:
            return None
        return round(max(0.001, self.fill.planned_at + self.fill.expected_seconds - now), 3)


class Prefetches:
    """REQUIRES: the loop's thread uses it."""

    def __init__(
        self, cache: Cache, storage: Storage, instances: Instances, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cache, self._storage, self._instances, self._clock = cache, storage, instances, clock
        self.live: dict[str, Prefetch] = {}  # the oldest first
        self.requested: Counter[str] = Counter()  # by outcome

    def reader(self, namespace: bytes) -> Instance | None:
        """An engine that reads the namespace and has all its ranks."""
        instances = self._instances.by_id.values()
        return next((each for each in instances if each.coverages and each.described_prefix == namespace), None)

    def begin(
        self,
        instance: Instance,
        namespace: bytes,
        keys: bytes,
        of_variant: Durability,
        seconds: float,
        of_pin: str = "",
        tenant: str = "",
    ) -> Prefetch:
        """`of_pin`: id of the pin that it is for. REQUIRES: fewer than MOST_PREFETCHES, and an instance that reads the namespace."""
        spec, now = instance.any_worker().spec, self._clock()
        prefetch = Prefetch(
            of_pin or secrets.token_hex(8), instance.model_name, namespace, keys, spec.chunk_tokens, now + seconds,
            time.time() + seconds, of_pin=bool(of_pin),
        )  # fmt: skip
        self.live[prefetch.id] = prefetch
        lookup = Lookup(
            f"prefetch {prefetch.id}", "", "", spec.chunk_blocks, keys, durability=of_variant, tenant=tenant
        )
        prefetch.fill = self._storage.prefetch(
            lookup, namespace, instance, int(prefetch.deadline * 1e9), partial(self._lease, prefetch), partial(self.end, prefetch)
        )  # fmt: skip
        if prefetch.fill is None:
            self._lease(prefetch, lookup, 0)
        return prefetch

    def _lease(self, prefetch: Prefetch, lookup: Lookup, filled_tokens: int) -> LookupReply:
        owner = (lookup.instance_id, lookup.request_id)
        outcome = self._cache.lookup(prefetch.namespace, prefetch.keys, owner, prefetch.deadline, shares=False)
        prefetch.leased_chunks = outcome.hit_chunks
        return LookupReply(outcome.hit_chunks)

    def end(self, prefetch: Prefetch) -> None:
        """Read nothing more for it, and end its lease."""
        del self.live[prefetch.id]
        owner = (f"prefetch {prefetch.id}", "")
        self._storage.ended(owner)
        self._cache.end_lease(owner)

    def end_where(self, meant: Callable[[Prefetch], bool]) -> None:
        for prefetch in [each for each in self.live.values() if meant(each)]:
            self.end(prefetch)

    def clear(self, base: bytes) -> None:
        self.end_where(lambda each: each.namespace.startswith(base))

    def tick(self) -> None:
        """End those whose time is over, that found nothing, whose namespace no engine reads, or whose pin has no room for more."""
        now, read = self._clock(), {each.described_prefix for each in self._instances.by_id.values()}
        self.end_where(lambda each: each.deadline <= now or each.has_ended or each.namespace not in read)
        pins = self._cache.protections
        self.end_where(lambda each: each.of_pin and ((pin := pins.get(each.id)) is None or not pin.wanted))
