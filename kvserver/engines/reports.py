"""Reports of engines about themselves, their blocks and requests: notices, answered only on error.

Owns: their checks. Refuses to know: which reports are missing (`report_sync`), what follows from them (`telemetry`).
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from kvserver._native import check_records, unpack_blocks
from kvserver.cache import Cache, ProtectionEnd, epoch_of, split_namespace
from kvserver.engines.instance import Instance
from kvserver.engines.instances import Instances
from kvserver.events import BlockReport, Bus, RequestEnded
from kvserver.protocol import (
    CONTENT_BYTES,
    MAX_REPORTED_BLOCKS,
    TOKEN_BYTES,
    DescribeScheduler,
    EndRequest,
    EngineLoad,
    ErrorCode,
    ExactRecords,
    KVServerError,
    Owned,
    Payload,
    ReportBlockAllocations,
    ReportedBlocks,
)
from kvserver.telemetry import MOST

_LEAST_SPEED = 0.001  # tokens a second; a speed beyond these is not used: times computed from it would be infinite
_MOST_SPEED = 1e12


@dataclass
class EngineReports:
    cache: Cache
    instances: Instances
    bus: Bus
    unapplied: set[str]  # the event thread adds instances whose report it could not apply; they are removed here
    clock: Callable[[], float] = time.monotonic

    def add_block_report(self, request: ReportBlockAllocations) -> None:
        instance = self._reporter(request)
        payload, reports = request.payload, instance.reports
        source, pool = ("exact", payload.pool) if isinstance(payload, ExactRecords) else ("reported", 0)
        reports.check(source, pool)
        size, blocks = checked(payload, instance.any_worker().spec.num_blocks)
        if request.instance_id in self.unapplied:
            self.unapplied.discard(request.instance_id)
            reports.lose_states()
        instance.counts.sequence_gaps += reports.receive(request.sequence)
        now = self.clock()
        reports.add_report(source, pool, payload.full, now)
        self._publish(
            instance,
            BlockReport(
                int(now * 1e9), instance.instance_id, instance.model_name, payload, blocks, reports.gap, reports.in_sync
            ),
            size,
        )
        if reports.demands(now):
            raise KVServerError(ErrorCode.REPORT_GAP, "reports were lost; send the full state of the blocks")

    def end_request(self, request: EndRequest, of_fills: int) -> None:
        """`of_fills`: tokens that were read from L2 for it."""
        instance = self._reporter(request)
        instance.counts.ended_requests += 1
        if _LEAST_SPEED <= request.prefill_tokens_per_second <= _MOST_SPEED:
            instance.reported_speed(request.prefill_tokens_per_second)
        self.cache.end_lease((request.instance_id, request.request_id))
        local = min(request.local_tokens, request.prompt_tokens)
        loaded = min(request.loaded_tokens, request.prompt_tokens - local)
        filled = min(of_fills if request.l2_tokens is None else request.l2_tokens, loaded)
        failed = min(request.failed_loads, request.loads)
        instance.counts.benefit.request_ended(request.prompt_tokens, local, loaded, request.loads, failed, filled)
        instance.counts.sequence_gaps += instance.reports.receive(request.sequence)
        self._publish(
            instance,
            RequestEnded(
                int(self.clock() * 1e9), instance.instance_id, instance.model_name, request.request_id, instance.reports.gap,
                request.prompt_tokens, local, loaded, request.loads, failed, request.not_loaded, filled,
            ),
        )  # fmt: skip

    def describe_scheduler(self, request: DescribeScheduler) -> None:
        instance = self._reporter(request)
        if instance.namespace is None:
            raise KVServerError(ErrorCode.NOT_READY, f"{instance.ranks_text}; send DescribeScheduler when all are")
        before, instance.description = instance.described_prefix, request
        if (event := instance.described(int(self.clock() * 1e9))) is not None:
            self.bus.publish(event)
            self._end_pins_of_weights(before, instance)

    def _end_pins_of_weights(self, before: bytes, instance: Instance) -> None:
        """An engine whose weights changed in place reads the KV before no more: pins of it end, if no other engine does."""
        now = instance.described_prefix
        read = {each.described_prefix for each in self.instances.by_id.values()}
        if before and before not in read and split_namespace(before)[0] == split_namespace(now)[0]:
            self.cache.protections.end_in(lambda id: epoch_of(id) == before, ProtectionEnd.WEIGHTS)

    def add_engine_stats(self, request: EngineLoad) -> None:
        instance = self._reporter(request)
        for name, grown in instance.engine_stats.add_report(request, self.clock()).items():
            total = f"engine_{name}"
            setattr(instance.counts, total, min(getattr(instance.counts, total) + grown, MOST))

    def _reporter(self, request: ReportBlockAllocations | EndRequest | DescribeScheduler | EngineLoad) -> Instance:
        """Identity is in the message and must be the registered one: metrics of two models never mix."""
        instance = self.instances.instance(request.instance_id, request.incarnation)
        if request.model_name != instance.model_name:
            raise KVServerError(
                ErrorCode.UNKNOWN_INSTANCE,
                f"instance {request.instance_id!r} registered model {instance.model_name!r}, not {request.model_name!r}",
            )
        return instance

    def _publish(self, instance: Instance, event: BlockReport | RequestEnded, size: int = 0) -> None:
        instance.reports.gap = False
        if not self.bus.publish(event, size):
            instance.reports.lose()


def checked(payload: Payload, num_blocks: int) -> tuple[int, tuple[bytes, ...]]:
    """(bytes of the payload, for ReportedBlocks the block ids of each record).

    KVServerError(BAD_RECORDS) if it cannot be read, or names blocks that the engine does not have.
    """
    try:
        if isinstance(payload, ExactRecords):
            check_records(payload.records, payload.marks, num_blocks)
            return len(payload.records) + len(payload.marks), ()
        return _check_reported(payload, num_blocks)
    except ValueError as error:
        raise KVServerError(ErrorCode.BAD_RECORDS, str(error)) from None


def _check_reported(payload: ReportedBlocks, num_blocks: int) -> tuple[int, tuple[bytes, ...]]:
    records = sum(record.blocks for record in payload.records)
    if records > MAX_REPORTED_BLOCKS:  # before they are unpacked: a run of any length is a few bytes
        raise ValueError(f"{records} blocks in one report, at most {MAX_REPORTED_BLOCKS}; split it")
    size, blocks = 0, []
    for record in payload.records:
        raw = unpack_blocks(record.block_ids, record.blocks)
        ids = array("I", raw)
        if len(ids) != record.blocks:
            raise ValueError(f"{len(ids)} block ids where {record.blocks} are announced")
        if ids and max(ids) >= num_blocks:
            raise ValueError(f"block id {max(ids)} of an engine with {num_blocks} blocks")
        blocks.append(raw)
        if isinstance(record, Owned):
            _check_owned(record, payload.block_tokens)
            size += len(record.contents) + len(record.tokens)
        size += len(raw)
    return size, tuple(blocks)


def _check_owned(record: Owned, block_tokens: int) -> None:
    most = record.blocks * CONTENT_BYTES
    if len(record.contents) % CONTENT_BYTES or len(record.contents) > most:
        raise ValueError(
            f"contents of {len(record.contents)} bytes: {CONTENT_BYTES} for each full block, at most {most}"
        )
    most = record.blocks * block_tokens * TOKEN_BYTES
    if len(record.tokens) % TOKEN_BYTES or len(record.tokens) > most:
        raise ValueError(f"tokens of {len(record.tokens)} bytes: {TOKEN_BYTES} for each, at most {most}")
