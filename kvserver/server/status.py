"""The parts of `/status` that are about the server's state.

Refuses to know: how the numbers are counted.
"""

from __future__ import annotations

from msgspec.structs import asdict, replace

from kvserver.cache import Cache, MissReason, ModelUse, ProtectionEnd
from kvserver.config import Placement
from kvserver.copy import Devices
from kvserver.engines import Counts, Disconnect, Instance, Instances
from kvserver.protocol import BLOCKS, REQUESTS, block_bytes
from kvserver.protocol.status import (
    ConnectsStatus,
    DepartedStatus,
    InstanceStatus,
    L0Status,
    L1Status,
    ModelStatus,
    PinsStatus,
    PrefetchesStatus,
    RequestsStatus,
    TotalsStatus,
    WorkerStatus,
)
from kvserver.server.pins import OUTCOMES
from kvserver.telemetry import PHASES, Rpc
from kvserver.tiering import Prefetches

_OF_ENDS = (  # of RequestsStatus: what follows from the ends of requests
    *("saved_seconds", "ended_requests", "prompt_tokens", "request_loads"),
    *("prefill_seconds_gained", "prefill_seconds_lost", "hit_ratio"),
)


def l1_status(cache: Cache, placement: Placement) -> L1Status:
    pool = cache.pool
    return L1Status(
        size_bytes=pool.pages * pool.page_bytes,
        used_bytes=pool.used_pages * pool.page_bytes,
        pinned_bytes=pool.pinned_pages * pool.page_bytes,
        page_bytes=pool.page_bytes,
        chunks=cache.index.chunk_count,
        tail_blocks=cache.index.tail_blocks,
        evictions=cache.space.evicted_chunks,
        evicted_bytes=cache.space.evicted_pages * pool.page_bytes,
        cleared_chunks=cache.space.cleared_chunks,
        models={name: _use_status(use, pool.page_bytes) for name, use in cache.index.models.items()},
        tenants={name: _use_status(use, pool.page_bytes) for name, use in cache.index.tenants.items()},
        other_tenants=cache.space.other_tenants,
        policy=cache.policy.name,
        huge_pages=placement.pages,
        numa_nodes=list(placement.nodes),
    )


def _use_status(use: ModelUse, page_bytes: int) -> ModelStatus:
    return ModelStatus(
        used_bytes=use.pages * page_bytes,
        chunks=use.chunks,
        evictions=use.evicted_chunks,
        never_loaded=use.never_loaded_chunks,
        share_bytes=use.share_pages * page_bytes,
    )


def pins_status(cache: Cache) -> PinsStatus:
    protections, page_bytes = cache.protections, cache.pool.page_bytes
    return PinsStatus(
        pins=len(protections),
        bytes=protections.protected_pages * page_bytes,
        most_bytes=protections.bound_pages * page_bytes,
        deferred_chunks=protections.wanted_chunks,
        requests={outcome: protections.requested[outcome] for outcome in OUTCOMES},
        ended={why.value: protections.ended[why] for why in ProtectionEnd},
        passed_over=protections.passed_over,
    )


def prefetches_status(prefetches: Prefetches) -> PrefetchesStatus:
    return PrefetchesStatus(
        prefetches=len(prefetches.live), requests={outcome: prefetches.requested[outcome] for outcome in OUTCOMES}
    )


def totals_status(instances: Instances, rpc: Rpc) -> TotalsStatus:
    totals = instances.totals()
    return TotalsStatus(
        lookup_tokens=totals.lookup_tokens,
        hit_tokens=totals.hit_tokens,
        stored_bytes=totals.stored_bytes,
        loaded_bytes=totals.loaded_bytes,
        failed_stores=totals.failed_stores,
        failed_loads=totals.failed_loads,
        prompt_tokens=totals.benefit.prompt_tokens,
        errors=rpc.faults,
        undelivered_replies=rpc.undelivered,
        fill_seconds=round(totals.fill_seconds, 6),
    )


def connects_status(instances: Instances) -> ConnectsStatus:
    return ConnectsStatus(
        connected=instances.connected,
        disconnected={reason.value: instances.disconnected[reason] for reason in Disconnect},
    )


def instance_status(instance: Instance, devices: Devices, l0: L0Status, now: float) -> InstanceStatus:
    """`l0`: what block_lifecycle knows of its blocks."""
    spec, reports = instance.any_worker().spec, instance.reports
    engine, version = spec.engine_names
    unreported = sorted(instance.unreported)
    return InstanceStatus(
        instance_id=instance.instance_id,
        model_name=instance.model_name,
        engine=engine,
        engine_version=version,
        kv_role=spec.shown_role,
        namespace=instance.namespace.hex() if instance.namespace is not None else "",
        private=instance.private,
        machine_only=instance.machine_only,
        world_size=instance.world_size,
        l0_source=reports.source or "none",
        l0=None if BLOCKS in unreported else replace(l0, source=reports.source, refused_reports=reports.refused),
        unreported=unreported,
        workers=[
            WorkerStatus(
                rank=rank,
                device=devices.name(worker.device),
                mapped_bytes=sum(memory.size for memory in worker.memory if memory.mapped),
                planes=len(worker.spec.planes),
                block_bytes=block_bytes(worker.spec.planes),
                num_blocks=worker.spec.num_blocks,
                pid=worker.lifeline.pid,
                tickets=len(worker.tickets),
                last_seen_seconds=round(now - worker.last_seen, 3),
            )
            for rank, worker in sorted(instance.workers.items())
        ],
        prefill_tokens_per_second=instance.prefill_speed,
        block_tokens=spec.block_tokens,
        chunk_tokens=spec.chunk_tokens,
        requests=requests_status(instance.counts, instance.unreported),
        load=instance.engine_stats.status(instance.incarnation, now),
    )


def departed_status(departed: Instance, now: float) -> DepartedStatus:
    return DepartedStatus(
        instance_id=departed.instance_id,
        model_name=departed.model_name,
        gone_seconds=round(now - departed.departed_at, 3),
        requests=requests_status(departed.counts, departed.unreported),
    )


def requests_status(counts: Counts, unreported: frozenset[str] = frozenset()) -> RequestsStatus:
    benefit, missed = counts.benefit, counts.missed_tokens
    shown = asdict(counts)
    del shown["benefit"], shown["missed_tokens"]
    found = RequestsStatus(
        **shown,
        missed_tokens={reason.value: missed[reason] for reason in MissReason},
        prompt_tokens=dict(benefit.prompt_tokens),
        request_loads=dict(benefit.request_loads),
        prefill_seconds_gained=benefit.gained_seconds,
        prefill_seconds_lost=benefit.lost_seconds,
        hit_ratio=benefit.hit_ratio.snapshot(),
        store_duration={phase: benefit.durations["store", phase].snapshot() for phase in PHASES},
        load_duration={phase: benefit.durations["load", phase].snapshot() for phase in PHASES},
    )
    return replace(found, **dict.fromkeys(_OF_ENDS)) if REQUESTS in unreported else found
