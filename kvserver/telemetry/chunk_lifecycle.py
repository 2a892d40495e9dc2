"""Lifetimes of chunks in L1: how long they stay, how long they are idle before eviction, how soon they are loaded again.

They are measured of a sample of the chunks, decided once per lifetime of a chunk by a keyed hash. Everything else about L1 is
counted exactly elsewhere. METRICS.md defines the words. A lifetime counts for the instance that stored the chunk, a load for the
one that loaded it. Chunks outlive engines: what happens after the instance's series have ended counts for instance_id "".

Owns: the lifetimes and the histograms. Refuses to know: slots, leases, which chunk is evicted and why. Runs in the bus's thread;
any thread may call `families()`.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

from kvserver.cache import split_keys
from kvserver.events import (
    ChunksEvicted,
    ChunksLoaded,
    ChunksStored,
    Event,
    InstanceDisconnected,
    InstanceRegistered,
    L1Cleared,
    Subscriber,
)
from kvserver.protocol import DEPARTED_SECONDS, MOST_DEPARTED, Histogram, bounded
from kvserver.telemetry.families import Family, Kind

_HISTOGRAMS = {
    "kvserver_l1_chunk_residency_seconds": "Time from a chunk of L1 becoming READY to its eviction.",
    "kvserver_l1_chunk_idle_before_evict_seconds": "Time from the last load of a chunk, or from its becoming READY, to its eviction.",
    "kvserver_l1_chunk_reuse_gap_seconds": "Time between two loads of a chunk, the first counted from its becoming READY.",
    "kvserver_l1_hit_age_seconds": "Time from a chunk becoming READY to a load of it.",
}
L1_SECONDS = (  # to a week: L1 keeps what L0 had to let go
    1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0,
    3600.0, 7200.0, 14400.0, 28800.0, 86400.0, 172800.0, 345600.0, 604800.0,
)  # fmt: skip
Name = tuple[str, str]  # instance id, model name


@dataclass(slots=True)
class _Lifetime:
    owner: Name
    ready_ns: int
    used_ns: int


class ChunkLifecycle(Subscriber):
    name = "l1"
    handles = frozenset(
        {ChunksStored, ChunksLoaded, ChunksEvicted, L1Cleared, InstanceRegistered, InstanceDisconnected}
    )

    def __init__(self, sample_rate: float, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """`clock` is CLOCK_MONOTONIC nanoseconds."""
        self._clock = clock
        self._below = int(sample_rate * 2**64)  # a lifetime whose hash is below is sampled
        self._secret = secrets.token_bytes(16)
        self._lifetimes: dict[bytes, dict[bytes, _Lifetime]] = {}  # by namespace and key
        self._instances: dict[Name, int] = {}  # when it disconnected; 0: it is registered
        self._ownerless: set[str] = set()  # models of histograms whose instances have been forgotten
        self._histograms: dict[str, dict[Name, Histogram]] = {name: {} for name in _HISTOGRAMS}
        self._lock = threading.Lock()  # of the histograms

    @property
    def tracked(self) -> int:
        return sum(map(len, self._lifetimes.values()))

    def handle(self, event: Event) -> None:
        match event:
            case ChunksStored() if event.group.number == 0:
                self._stored(event)
            case ChunksLoaded() if event.group.number == 0:
                self._loaded(event)
            case ChunksEvicted() if event.group is None or event.group.number == 0:
                self._evicted(event)
            case L1Cleared():
                for namespace in [n for n in self._lifetimes if n.startswith(event.namespace)]:
                    del self._lifetimes[namespace]
            case InstanceRegistered() | InstanceDisconnected():
                ended_ns = event.time_ns if isinstance(event, InstanceDisconnected) else 0
                with self._lock:
                    self._instances[event.instance_id, event.model_name] = ended_ns
                    if ended_ns:
                        self._forget_instances(ended_ns)

    def families(self) -> list[Family]:
        """All, also when empty."""
        with self._lock:
            self._forget_instances(self._clock())
            return [
                Family(
                    name,
                    text,
                    Kind.HISTOGRAM,
                    ("instance_id", "model_name"),
                    [(owner, histogram.snapshot()) for owner, histogram in self._histograms[name].items()],
                    L1_SECONDS,
                )
                for name, text in _HISTOGRAMS.items()
            ]

    def close(self) -> None:
        self._lifetimes.clear()

    # ---- inside -------------------------------------------------------------------------------

    def _stored(self, event: ChunksStored) -> None:
        lifetimes = self._lifetimes.setdefault(event.namespace, {})
        for (key,) in split_keys(event.keys):
            if self._sampled(event.namespace, key, event.time_ns):
                lifetimes[key] = _Lifetime((event.instance_id, event.model_name), event.time_ns, event.time_ns)
            else:
                lifetimes.pop(key, None)  # an earlier lifetime whose end was not published
        if not lifetimes:
            del self._lifetimes[event.namespace]

    def _sampled(self, namespace: bytes, key: bytes, time_ns: int) -> bool:
        text = namespace + key + time_ns.to_bytes(8, "little")
        return int.from_bytes(blake2b(text, key=self._secret, digest_size=8).digest(), "little") < self._below

    def _loaded(self, event: ChunksLoaded) -> None:
        lifetimes = self._lifetimes.get(event.namespace)
        if not lifetimes:
            return
        found = [lifetime for (key,) in split_keys(event.keys) if (lifetime := lifetimes.get(key)) is not None]
        with self._lock:
            for lifetime in found:
                user = (event.instance_id, event.model_name)
                self._observe("kvserver_l1_chunk_reuse_gap_seconds", user, event.time_ns - lifetime.used_ns)
                self._observe("kvserver_l1_hit_age_seconds", user, event.time_ns - lifetime.ready_ns)
                lifetime.used_ns = event.time_ns

    def _evicted(self, event: ChunksEvicted) -> None:
        lifetimes = self._lifetimes.get(event.namespace)
        if not lifetimes:
            return
        ended = [lifetime for (key,) in split_keys(event.keys) if (lifetime := lifetimes.pop(key, None)) is not None]
        if not lifetimes:
            del self._lifetimes[event.namespace]
        with self._lock:
            for lifetime in ended:
                self._observe("kvserver_l1_chunk_residency_seconds", lifetime.owner, event.time_ns - lifetime.ready_ns)
                self._observe(
                    "kvserver_l1_chunk_idle_before_evict_seconds", lifetime.owner, event.time_ns - lifetime.used_ns
                )

    def _observe(self, name: str, owner: Name, nanos: int) -> None:
        if owner not in self._instances:
            model_name = bounded(owner[1], self._ownerless)
            self._ownerless.add(model_name)
            owner = ("", model_name)
        histogram = self._histograms[name].get(owner)
        if histogram is None:
            histogram = self._histograms[name][owner] = Histogram(L1_SECONDS)
        histogram.observe(nanos * 1e-9)

    def _forget_instances(self, now_ns: int) -> None:
        ended = sorted(((ended_ns, owner) for owner, ended_ns in self._instances.items() if ended_ns), reverse=True)
        for number, (ended_ns, owner) in enumerate(ended):
            if now_ns - ended_ns > DEPARTED_SECONDS * 1e9 or number >= MOST_DEPARTED:
                del self._instances[owner]
                for histograms in self._histograms.values():
                    histograms.pop(owner, None)
