"""Events of made-up engines for a real L0, and its metrics as every exporter reads them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from kvserver._native import pack_blocks
from kvserver.cache import POLICIES, Cache, PagePool
from kvserver.config import Settings
from kvserver.engines.instances import Instances
from kvserver.engines.reports import EngineReports
from kvserver.events import Event, InstanceDisconnected, InstanceRegistered
from kvserver.protocol import (
    MARK,
    RECORD_ACCESSED,
    RECORD_ALLOCATED,
    RECORD_CLEARED,
    RECORD_EVICTED,
    RECORD_OPERATION_SHIFT,
    RECORD_OWNED,
    RECORD_PRESENT,
    RECORD_RELEASED,
    Buckets,
    EndRequest,
    ErrorCode,
    ExactRecords,
    KVServerError,
    Owned,
    Payload,
    Released,
    ReportBlockAllocations,
    ReportedBlocks,
)
from kvserver.telemetry import BlockLifecycle

from .instances import add_worker

SECOND = 1_000_000_000
HISTOGRAMS = ("lifetime", "idle_before_evict", "since_last_access", "reuse_gap")
ENDS = ("evictions", "recycled", "cleared", "lost")
COUNTERS = ("allocations", "reuses", "shared_accesses", *ENDS)
GAUGES = ("active_blocks", "released_blocks", "tracked_blocks")

Moment = tuple[float, Sequence[int]]  # seconds, the records of that time


def ns(seconds: float) -> int:
    return round(seconds * SECOND)


def allocated(*blocks: int) -> list[int]:
    return [RECORD_ALLOCATED << RECORD_OPERATION_SHIFT | block for block in blocks]


def accessed(*blocks: int) -> list[int]:
    return [RECORD_ACCESSED << RECORD_OPERATION_SHIFT | block for block in blocks]


def released(*blocks: int) -> list[int]:
    return [RECORD_RELEASED << RECORD_OPERATION_SHIFT | block for block in blocks]


def evicted(*blocks: int) -> list[int]:
    return [RECORD_EVICTED << RECORD_OPERATION_SHIFT | block for block in blocks]


def cleared() -> list[int]:
    return [RECORD_CLEARED << RECORD_OPERATION_SHIFT]


def present(*blocks: int) -> list[int]:
    return [RECORD_PRESENT << RECORD_OPERATION_SHIFT | block for block in blocks]


def owned(*blocks: int) -> list[int]:
    return [RECORD_OWNED << RECORD_OPERATION_SHIFT | block for block in blocks]


def exact(*moments: Moment, full: bool = False, pool: int = 0) -> ExactRecords:
    records, marks = array("I"), b""
    for seconds, of in moments:
        marks += MARK.pack(len(records), ns(seconds))
        records.extend(of)
    return ExactRecords(records.tobytes(), marks, pool, full)


def hold(
    request: str,
    blocks: Iterable[int],
    contents: Iterable[int] = (),
    tokens: Iterable[int] = (),
    group: int = 0,
    first: int = 0,
) -> Owned:
    ids = array("I", blocks)
    names = array("Q", contents).tobytes()
    return Owned(request, group, first, pack_blocks(list(ids)), len(ids), names, array("I", tokens).tobytes())


def release(request: str, blocks: Iterable[int]) -> Released:
    ids = array("I", blocks)
    return Released(request, pack_blocks(list(ids)), len(ids))


class Engine:
    """One instance's messages, in sequence, checked as the loop does; their events go to L0 at once.

    `demands`: how often its full state was requested. `errors`: what L0 raised, which the bus counts. `drops`: the bus has
    no space. Its metrics are L0's families for its id and model.
    """

    def __init__(
        self,
        l0: BlockLifecycle,
        instance_id: str = "engine",
        model_name: str = "model",
        incarnation: str = "first",
        num_blocks: int = 64,
        block_tokens: int = 4,
    ) -> None:
        self.l0 = l0
        self.names = (instance_id, model_name)
        self.incarnation = incarnation
        self.num_blocks, self.block_tokens = num_blocks, block_tokens
        self.sequence = 0
        self.now_ns = 0
        self.demands = 0
        self.errors: list[Exception] = []
        self.drops = False
        self.instances = Instances()
        bus: Any = self  # publish() is all that is used of it
        cache = Cache(PagePool(1 << 20, 4096), POLICIES[Settings().eviction_policy]())
        self._reports = EngineReports(cache, self.instances, bus, l0.unapplied, lambda: (self.now_ns + 0.5) / SECOND)
        self.connect()

    def publish(self, event: Event, size: int = 0) -> bool:
        if not self.drops:
            try:
                self.l0.handle(event)
            except Exception as error:
                self.errors.append(error)
        return not self.drops

    def connect(self, has_computed: bool = False) -> None:
        self.connected = True
        self.worker = add_worker(
            self.instances, *self.names, self.incarnation, num_blocks=self.num_blocks, block_tokens=self.block_tokens
        )
        self.l0.handle(InstanceRegistered(0, *self.names, self.incarnation, self.num_blocks, has_computed))

    def disconnect(self, died: bool = True) -> None:
        self.instances.remove_worker(self.worker, 0.0)
        self.connected = False
        self.l0.handle(InstanceDisconnected(0, *self.names, died))

    def restart(self, has_computed: bool = False) -> None:
        """Another process of the same id, which has sent nothing yet."""
        if self.connected:
            self.disconnect()
        self.incarnation += "+"
        self.sequence = 0
        self.connect(has_computed)

    def report(self, payload: Payload) -> None:
        """KVServerError if the loop refuses it."""
        id, model = self.names
        self.sequence += 1
        self.now_ns += SECOND
        try:
            self._reports.add_block_report(
                ReportBlockAllocations(id, self.incarnation, model, self.sequence - 1, payload)
            )
        except KVServerError as error:
            if error.code is not ErrorCode.REPORT_GAP:
                raise
            self.demands += 1

    def did(self, *moments: Moment, full: bool = False, pool: int = 0) -> None:
        self.report(exact(*moments, full=full, pool=pool))

    def holds(self, seconds: float, *records: Owned | Released, full: bool = False) -> None:
        self.report(ReportedBlocks(ns(seconds), self.block_tokens, list(records), full))

    def ended(self, seconds: float, request: str) -> None:
        id, model = self.names
        self.sequence += 1
        self.now_ns = ns(seconds)
        self._reports.end_request(EndRequest(id, self.incarnation, model, self.sequence - 1, request), of_fills=0)

    def _point(self, family: str) -> Any:
        (found,) = [f for f in self.l0.families() if f.name == family]
        (point,) = [value for labels, value in found.points if labels == self.names]
        return point

    @property
    def out_of_sync(self) -> bool:
        return bool(self.metric("unsure"))

    def metric(self, name: str) -> int:
        return int(self._point(f"kvserver_l0_{name}"))

    def seconds(self, name: str) -> tuple[int, float]:
        """How many were observed, and their sum."""
        buckets: Buckets = self._point(f"kvserver_l0_block_{name}_seconds")
        return sum(buckets.counts), round(buckets.sum, 9)

    def counts(self) -> dict[str, int]:
        """Counters and gauges that are not 0."""
        names = {f"kvserver_l0_{name}": name for name in (*COUNTERS, *GAUGES)}
        points = {f.name: value for f in self.l0.families() for labels, value in f.points if labels == self.names}
        return {short: int(points[name]) for name, short in names.items() if points[name]}
