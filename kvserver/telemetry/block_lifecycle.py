"""Lifetimes of L0 blocks, by scheduler instance and model: a subscriber of the event bus.

The loop states with each event whether reports were lost before it (`server.report_sync`). Then the instance is out of sync:
lifetimes end as lost, for the lost report may have had their true end. Later reports are applied all the same, as far as they
state when a lifetime began. The gauges are right again when the full state of each pool has arrived. An engine that registers
again, or that computed before it registered, is out of sync likewise. A new incarnation that did not has a new and empty pool.

Owns: for each instance its metrics, one `_native.BlockLifetimes` a pool, and whether the reports are complete. Refuses to know:
how reports travel, what a lifetime is (csrc/tables/block_lifetimes.h), how metrics are exported.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from kvserver._native import BlockLifetimes, LifetimeHistogram, LifetimeMetrics, LifetimeSnapshot
from kvserver.events import BlockReport, Event, InstanceDisconnected, InstanceRegistered, RequestEnded, Subscriber
from kvserver.protocol import DEPARTED_SECONDS, MOST_DEPARTED, RESIDENCY_SECONDS, Buckets, ExactRecords, ReportedBlocks
from kvserver.protocol.status import L0Status
from kvserver.telemetry.families import Family, Kind, Metric, families_of
from kvserver.telemetry.request_blocks import RequestBlocks

LABELS = ("instance_id", "model_name")

_PLAIN: tuple[Metric[L0Status], ...] = (
    Metric("kvserver_l0_allocations", "L0 blocks that the engine allocated.", Kind.COUNTER, lambda of: of.allocations),
    Metric("kvserver_l0_reuses", "Accesses of L0 blocks that no request owned: hits in the engine's prefix cache.", Kind.COUNTER, lambda of: of.reuses),
    Metric("kvserver_l0_shared_accesses", "Accesses of L0 blocks that another request owned.", Kind.COUNTER, lambda of: of.shared_accesses),
    Metric("kvserver_l0_evictions", "Lifetimes of L0 blocks that ended by eviction of cached content.", Kind.COUNTER, lambda of: of.evictions),
    Metric("kvserver_l0_recycled", "Lifetimes of L0 blocks that were never cached and ended when the block was allocated again.", Kind.COUNTER, lambda of: of.recycled),
    Metric("kvserver_l0_cleared", "Lifetimes of L0 blocks that ended when the engine cleared its prefix cache.", Kind.COUNTER, lambda of: of.cleared),
    Metric("kvserver_l0_lost", "Lifetimes of L0 blocks whose end was not reported: a gap in the reports, or the engine restarted or died.", Kind.COUNTER, lambda of: of.lost),
    Metric("kvserver_l0_report_gaps", "Gaps in the sequence of the engine's reports about L0 blocks.", Kind.COUNTER, lambda of: of.report_gaps),
    Metric("kvserver_l0_records", "Records about L0 blocks that the daemon received from the engine.", Kind.COUNTER, lambda of: of.records),
    Metric("kvserver_l0_active_blocks", "L0 blocks that requests own.", Kind.GAUGE, lambda of: of.active_blocks),
    Metric("kvserver_l0_released_blocks", "L0 blocks that no request owns and whose content the engine can still use.", Kind.GAUGE, lambda of: of.released_blocks),
    Metric("kvserver_l0_tracked_blocks", "L0 blocks that requests own or whose content the engine can still use.", Kind.GAUGE, lambda of: of.tracked_blocks),
    Metric("kvserver_l0_unsure", "1 while the L0 gauges of an engine are too low: reports were lost and its full state has not arrived.", Kind.GAUGE, lambda of: +of.unsure),
)  # fmt: skip
_HISTOGRAMS: tuple[Metric[LifetimeSnapshot], ...] = (
    Metric("kvserver_l0_block_lifetime_seconds", "Time from the allocation of an L0 block to the eviction or recycling of its content.", Kind.HISTOGRAM, lambda of: _buckets(of.lifetime), bounds=RESIDENCY_SECONDS),
    Metric("kvserver_l0_block_idle_before_evict_seconds", "Time from the last release of an L0 block to the end of its content; 0 if a request still owned it.", Kind.HISTOGRAM, lambda of: _buckets(of.idle_before_evict), bounds=RESIDENCY_SECONDS),
    Metric("kvserver_l0_block_since_last_access_seconds", "Time from the last access or the allocation of an L0 block to the end of its content.", Kind.HISTOGRAM, lambda of: _buckets(of.since_last_access), bounds=RESIDENCY_SECONDS),
    Metric("kvserver_l0_block_reuse_gap_seconds", "Time between two accesses of an L0 block, the first counted from its allocation.", Kind.HISTOGRAM, lambda of: _buckets(of.reuse_gap), bounds=RESIDENCY_SECONDS),
)  # fmt: skip


def _buckets(times: LifetimeHistogram) -> Buckets:
    return Buckets(times.counts, times.sum)


class _Instance:
    """An instance and model, through all its incarnations. Written by the event thread only."""

    def __init__(self) -> None:
        self.metrics = LifetimeMetrics(list(RESIDENCY_SECONDS))
        self.incarnation = ""
        self.num_blocks = 0
        self.ended_ns: int | None = None
        self.report_gaps = 0
        self.records = 0
        self.out_of_sync = False
        self.reports = True  # False: it states that it reports no blocks, and has reported none
        self.pools: dict[int, BlockLifetimes] = {}
        self.request_blocks: RequestBlocks | None = None  # of the one pool of a reported source

    def status(self, found: LifetimeSnapshot) -> L0Status:
        """Status at one moment, except for what the event thread does between two fields."""
        return L0Status(
            allocations=found.allocations,
            reuses=found.reuses,
            shared_accesses=found.shared_accesses,
            evictions=found.evictions,
            recycled=found.recycled,
            cleared=found.cleared,
            lost=found.lost,
            report_gaps=self.report_gaps,
            records=self.records,
            active_blocks=found.active_blocks,
            released_blocks=found.released_blocks,
            tracked_blocks=found.active_blocks + found.released_blocks,
            unsure=self.out_of_sync,
        )

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


class BlockLifecycle(Subscriber):
    """Subscriber that follows L0 blocks. handle() is the event thread's; any thread may call the rest.

    `clock` is CLOCK_MONOTONIC nanoseconds. Every pool draws the key of its sampling from `seed`.
    """

    name = "l0"
    handles = frozenset({BlockReport, RequestEnded, InstanceRegistered, InstanceDisconnected})

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

    def _registered(self, event: InstanceRegistered) -> None:
        self._expire()
        key = (event.instance_id, event.model_name)
        with self._lock:
            instance = self._present[event.instance_id] = self._instances.setdefault(key, _Instance())
            instance.ended_ns = None
        instance.out_of_sync = event.has_computed or instance.incarnation == event.incarnation
        instance.reports = event.reports_blocks
        instance.incarnation, instance.num_blocks = event.incarnation, event.num_blocks

    def _disconnected(self, event: InstanceDisconnected) -> None:
        with self._lock:
            instance = self._present.pop(event.instance_id)
        instance.forget_pools()
        instance.ended_ns = self._clock()

    def _report(self, instance: _Instance, event: BlockReport | RequestEnded) -> None:
        instance.reports = True
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
        lifetimes = instance.pools.get(pool)
        if lifetimes is None:
            lifetimes = instance.pools[pool] = BlockLifetimes(
                instance.metrics, instance.num_blocks, self._sample_rate, self._seeds.getrandbits(64)
            )
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

    # ---- from any thread ----------------------------------------------------------------------

    def status(self, instance_id: str) -> L0Status:
        """L0 status of an instance in `/status`; zeros if it is not registered."""
        instance = self._present.get(instance_id)
        return instance.status(instance.metrics.read()) if instance is not None else L0Status()

    def families(self) -> list[Family]:
        self._expire()
        with self._lock:
            instances = [(labels, instance) for labels, instance in self._instances.items() if instance.reports]
        found = [(instance, instance.metrics.read(), labels) for labels, instance in instances]
        return [
            *families_of(_PLAIN, [(instance.status(read), labels) for instance, read, labels in found], LABELS),
            *families_of(_HISTOGRAMS, [(read, labels) for _, read, labels in found], LABELS),
        ]

    def _expire(self) -> None:
        """Forget instances that disconnected long ago, or before MOST_DEPARTED others."""
        until = self._clock() - int(DEPARTED_SECONDS * 1e9)
        with self._lock:
            ended = [(of.ended_ns, key) for key, of in self._instances.items() if of.ended_ns is not None]
            ended.sort(reverse=True)
            for number, (ended_ns, key) in enumerate(ended):
                if ended_ns <= until or number >= MOST_DEPARTED:
                    del self._instances[key]
