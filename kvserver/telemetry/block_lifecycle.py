"""Lifetimes of L0 blocks, by scheduler instance and model: a subscriber of the event bus.

Owns: for each instance its metrics, one `_native.BlockLifetimes` a pool, and whether the reports are complete. Refuses to
know: how reports travel, what a lifetime is (csrc/tables/block_lifetimes.h), how metrics are exported.

The loop states with each event whether reports were lost before it (`server.report_sync`). Then the instance is out of sync:
lifetimes end as lost, for the lost report may have had their true end. Later reports are applied all the same, as far as they
state when a lifetime began; the gauges are right again when the full state of each pool has arrived. An engine that registers
again, or that computed before it registered, is out of sync likewise; a new incarnation that did not has a new and empty pool.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

from kvserver._native import BlockLifetimes, LifetimeMetrics, LifetimeSnapshot
from kvserver.events import BlockReport, Event, InstanceDisconnected, InstanceRegistered, RequestEnded
from kvserver.protocol import (
    DEPARTED_SECONDS,
    MOST_DEPARTED,
    RESIDENCY_SECONDS,
    Buckets,
    ExactRecords,
    ReportedBlocks,
)
from kvserver.telemetry.families import Family, Kind
from kvserver.telemetry.request_blocks import RequestBlocks

LABELS = ("instance_id", "model_name")


class BlockMetrics(NamedTuple):
    """Of one instance and model, at one moment, except for what the event thread does between two fields."""

    lifetimes: LifetimeSnapshot
    report_gaps: int
    records: int
    out_of_sync: bool

    @property
    def tracked_blocks(self) -> int:
        return self.lifetimes.active_blocks + self.lifetimes.released_blocks


# Where a value is in BlockMetrics, and the HELP text of its metric, which is named by _name().
_COUNTERS = {
    "lifetimes.allocations": "L0 blocks that the engine allocated.",
    "lifetimes.reuses": "Accesses of L0 blocks that no request owned: hits in the engine's prefix cache.",
    "lifetimes.shared_accesses": "Accesses of L0 blocks that another request owned.",
    "lifetimes.evictions": "Lifetimes of L0 blocks that ended by eviction of cached content.",
    "lifetimes.recycled": "Lifetimes of L0 blocks that were never cached and ended when the block was allocated again.",
    "lifetimes.cleared": "Lifetimes of L0 blocks that ended when the engine cleared its prefix cache.",
    "lifetimes.lost": "Lifetimes of L0 blocks whose end was not reported: a gap in the reports, or the engine restarted or died.",
    "report_gaps": "Gaps in the sequence of the engine's reports about L0 blocks.",
    "records": "Records about L0 blocks that the daemon received from the engine.",
}
_GAUGES = {
    "lifetimes.active_blocks": "L0 blocks that requests own.",
    "lifetimes.released_blocks": "L0 blocks that no request owns and whose content the engine can still use.",
    "tracked_blocks": "L0 blocks that requests own or whose content the engine can still use.",
    "out_of_sync": "1 while the L0 gauges of an engine are too low: reports were lost and its full state has not arrived.",
}
_HISTOGRAMS = {
    "lifetimes.lifetime": "Time from the allocation of an L0 block to the eviction or recycling of its content.",
    "lifetimes.idle_before_evict": "Time from the last release of an L0 block to the end of its content; 0 if a request still owned it.",
    "lifetimes.since_last_access": "Time from the last access or the allocation of an L0 block to the end of its content.",
    "lifetimes.reuse_gap": "Time between two accesses of an L0 block, the first counted from its allocation.",
}
_PLAIN = [(Kind.COUNTER, *row) for row in _COUNTERS.items()] + [(Kind.GAUGE, *row) for row in _GAUGES.items()]


def _name(path: str) -> str:
    """The public name, in `/status` and in metrics."""
    return "unsure" if path == "out_of_sync" else path.rpartition(".")[2]


class _Instance:
    """One instance and model, through all its incarnations. Written by the event thread only."""

    def __init__(self) -> None:
        self.metrics = LifetimeMetrics(list(RESIDENCY_SECONDS))
        self.incarnation = ""
        self.num_blocks = 0
        self.ended_ns: int | None = None
        self.report_gaps = 0
        self.records = 0
        self.out_of_sync = False
        self.pools: dict[int, BlockLifetimes] = {}
        self.request_blocks: RequestBlocks | None = None  # of the one pool of a reported source

    def read(self) -> BlockMetrics:
        return BlockMetrics(self.metrics.read(), self.report_gaps, self.records, self.out_of_sync)

    def lose_track(self) -> None:
        for lifetimes in self.pools.values():
            lifetimes.end_all()
        self.request_blocks = None
        self.out_of_sync = True

    def forget_pools(self) -> None:
        """The engine's process ended: all lifetimes are lost."""
        self.lose_track()
        self.pools.clear()
        self.out_of_sync = False


class BlockLifecycle:
    """handle() and close() are the event thread's; all else may be called from any thread.

    `clock` is CLOCK_MONOTONIC nanoseconds. Every pool draws the key of its sampling from `seed`.
    """

    name = "l0"

    def __init__(
        self, sample_rate: float, seed: int | None = None, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._sample_rate = sample_rate
        self._seeds = random.Random(seed)
        self._clock = clock
        self._lock = threading.Lock()  # guards which instances there are, not what is in them
        self._instances: dict[tuple[str, str], _Instance] = {}
        self._present: dict[str, _Instance] = {}  # by instance id: those that are registered; read without the lock too
        self.unapplied: set[str] = set()  # instances of which a report could not be applied; the loop removes them

    # ---- the event thread's -------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        """The bus counts what this raises, for a report that leaves its instance out of sync.

        REQUIRES: an instance registers before it reports, and disconnects before it registers again.
        """
        match event:
            case BlockReport() | RequestEnded():
                self._report(self._present[event.instance_id], event)
            case InstanceRegistered():
                self._registered(event)
            case InstanceDisconnected():
                self._disconnected(event)

    def close(self) -> None:
        """Nothing to do: the metrics can be read as before."""

    def _registered(self, event: InstanceRegistered) -> None:
        self._expire()
        key = (event.instance_id, event.model_name)
        with self._lock:
            instance = self._present[event.instance_id] = self._instances.setdefault(key, _Instance())
            instance.ended_ns = None
        instance.out_of_sync = event.has_computed or instance.incarnation == event.incarnation
        instance.incarnation, instance.num_blocks = event.incarnation, event.num_blocks

    def _disconnected(self, event: InstanceDisconnected) -> None:
        with self._lock:
            instance = self._present.pop(event.instance_id)
        instance.forget_pools()
        instance.ended_ns = self._clock()

    def _report(self, instance: _Instance, event: BlockReport | RequestEnded) -> None:
        if event.gap:
            instance.report_gaps += 1
            instance.lose_track()
        try:
            self._apply(instance, event)
        except Exception:
            instance.lose_track()
            self.unapplied.add(event.instance_id)
            raise

    def _apply(self, instance: _Instance, event: BlockReport | RequestEnded) -> None:
        if isinstance(event, RequestEnded):
            if instance.request_blocks is not None:
                instance.request_blocks.end(event.request_id, event.time_ns)
            return
        payload = event.payload
        pool = payload.pool if isinstance(payload, ExactRecords) else 0
        lifetimes = instance.pools[pool] if pool in instance.pools else self._new_pool(instance, pool)
        if payload.full:
            lifetimes.end_all()
            instance.request_blocks = None
            instance.out_of_sync = not event.in_sync
        if isinstance(payload, ReportedBlocks):
            instance.records += sum(record.blocks for record in payload.records)
            if instance.request_blocks is None:
                instance.request_blocks = RequestBlocks(lifetimes)
            instance.request_blocks.apply(payload, event.blocks)
        else:
            instance.records += len(payload.records) // 4
            lifetimes.apply(payload.records, payload.marks)

    def _new_pool(self, instance: _Instance, pool: int) -> BlockLifetimes:
        seed = self._seeds.getrandbits(64)
        lifetimes = BlockLifetimes(instance.metrics, instance.num_blocks, self._sample_rate, seed)
        instance.pools[pool] = lifetimes
        return lifetimes

    # ---- from any thread ----------------------------------------------------------------------

    def status(self, instance_id: str) -> dict[str, Any]:
        """What `/status` shows of an instance; nothing if it is not registered."""
        instance = self._present.get(instance_id)
        if instance is None:
            return {}
        found = instance.read()
        return {_name(path): attrgetter(path)(found) for _, path, _ in _PLAIN}

    def families(self) -> list[Family]:
        self._expire()
        with self._lock:
            instances = list(self._instances.items())
        found = [(labels, instance.read()) for labels, instance in instances]
        families = []
        for kind, path, text in _PLAIN:
            plain = Family(f"kvserver_l0_{_name(path)}", text, kind, LABELS)
            for labels, metrics in found:
                plain.add(int(attrgetter(path)(metrics)), *labels)
            families.append(plain)
        for path, text in _HISTOGRAMS.items():
            name = f"kvserver_l0_block_{_name(path)}_seconds"
            histogram = Family(name, text, Kind.HISTOGRAM, LABELS, bounds=RESIDENCY_SECONDS)
            for labels, metrics in found:
                of = attrgetter(path)(metrics)
                histogram.add(Buckets(of.counts, of.sum), *labels)
            families.append(histogram)
        return families

    def _expire(self) -> None:
        """Forget instances that disconnected long ago, or before MOST_DEPARTED others."""
        until = self._clock() - int(DEPARTED_SECONDS * 1e9)
        with self._lock:
            ended = [(of.ended_ns, key) for key, of in self._instances.items() if of.ended_ns is not None]
            ended.sort(reverse=True)
            for number, (ended_ns, key) in enumerate(ended):
                if ended_ns <= until or number >= MOST_DEPARTED:
                    del self._instances[key]
