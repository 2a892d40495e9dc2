"""`/status`, built from the server's state.

Owns: the keys of the public surface. Refuses to know: how the numbers are counted.
"""

from __future__ import annotations

from typing import Any

from kvserver.cache import Cache, MissReason
from kvserver.config import Placement
from kvserver.copy import Devices, Tickets
from kvserver.server.instances import Counts, Departed, Disconnect, Instance, Instances
from kvserver.server.lifeline import Lifelines
from kvserver.server.tickets import Ticket
from kvserver.server.upkeep import Upkeep
from kvserver.server.workers import Workers


def loop_status(
    cache: Cache,
    placement: Placement,
    devices: Devices,
    tickets: Tickets[Ticket],
    instances: Instances,
    workers: Workers,
    upkeep: Upkeep,
    lifelines: Lifelines,
    now: float,
) -> dict[str, Any]:
    """Of the loop's parts, all but the instances."""
    return {
        "l1": l1_status(cache, placement),
        "l2": [],
        "gpus": devices.status(),
        "connects": connects_status(instances),
        "departed": [departed_status(departed, now) for departed in instances.departed.values()],
        "totals": totals_status(instances),
        "books": accounting_status(cache, tickets, workers, upkeep, len(lifelines)),
    }


def l1_status(cache: Cache, placement: Placement) -> dict[str, Any]:
    pool = cache.pool
    return {
        "size_bytes": pool.pages * pool.page_bytes,
        "used_bytes": pool.used_pages * pool.page_bytes,
        "pinned_bytes": pool.pinned_pages * pool.page_bytes,
        "page_bytes": pool.page_bytes,
        "chunks": cache.index.chunk_count,
        "evictions": cache.evicted_chunks,
        "evicted_bytes": cache.evicted_pages * pool.page_bytes,
        "cleared_chunks": cache.cleared_chunks,
        "models": {
            name: {
                "used_bytes": model.pages * pool.page_bytes,
                "chunks": model.chunks,
                "evictions": model.evicted_chunks,
                "never_loaded": model.never_loaded_chunks,
            }
            for name, model in cache.index.models.items()
        },
        "policy": cache.policy.name,
        "huge_pages": placement.pages,
        "numa_nodes": list(placement.nodes),
    }


def totals_status(instances: Instances) -> dict[str, Any]:
    totals = instances.totals()
    return {
        "lookup_tokens": totals.lookup_tokens,
        "hit_tokens": totals.hit_tokens,
        "stored_bytes": totals.stored_bytes,
        "loaded_bytes": totals.loaded_bytes,
        "failed_stores": totals.failed_stores,
        "failed_loads": totals.failed_loads,
        "prompt_tokens": dict(totals.benefit.prompt_tokens),
    }


def accounting_status(
    cache: Cache, tickets: Tickets[Ticket], workers: Workers, upkeep: Upkeep, attachments: int
) -> dict[str, Any]:
    """What must balance: with nothing in flight and no worker connected all but the pages are 0."""
    return {
        "tickets": tickets.open_tickets,
        "pins": cache.pins,
        "leases": cache.lease_count,
        "mappings": workers.mappings,
        "attachments": attachments,
        "free_pages": cache.pool.unused_pages,
        "used_pages": cache.pool.used_pages,
        "audits": upkeep.audits,
        "unbalanced": upkeep.unbalanced,
    }


def connects_status(instances: Instances) -> dict[str, Any]:
    """Of instances, since the daemon began."""
    return {
        "connected": instances.connected,
        "disconnected": {reason.value: instances.disconnected[reason] for reason in Disconnect},
    }


def instance_status(instance: Instance, devices: Devices, l0: dict[str, Any], now: float) -> dict[str, Any]:
    """`l0`: what block_lifecycle knows of its blocks."""
    spec = instance.any_worker().spec
    counts = instance.counts
    return {
        "instance_id": instance.instance_id,
        "model_name": instance.model_name,
        "namespace": instance.namespace.hex() if instance.namespace is not None else "",
        "private": instance.private,
        "world_size": instance.world_size,
        "l0_source": instance.reports.source or "none",
        "l0": l0 and {**l0, "source": instance.reports.source, "refused_reports": instance.reports.refused},
        "workers": [
            {
                "rank": rank,
                "device": devices.name(worker.device),
                "mapped_bytes": sum(memory.size for memory in worker.memory if memory.mapped),
                "planes": len(worker.spec.planes),
                "block_bytes": worker.slot_bytes // worker.spec.chunk_blocks,
                "num_blocks": worker.spec.num_blocks,
                "pid": worker.lifeline.pid,
                "tickets": len(worker.tickets),
                "last_seen_seconds": round(now - worker.last_seen, 3),
            }
            for rank, worker in sorted(instance.workers.items())
        ],
        "prefill_tokens_per_second": instance.prefill_speed,
        "block_tokens": spec.block_tokens,
        "chunk_tokens": spec.block_tokens * spec.chunk_blocks,
        "requests": counts_status(counts),
        "load": instance.engine_stats.status(instance.incarnation, now),
    }


def departed_status(departed: Departed, now: float) -> dict[str, Any]:
    """Of an instance that disconnected: what its series in /metrics still show."""
    return {
        "instance_id": departed.instance_id,
        "model_name": departed.model_name,
        "gone_seconds": round(now - departed.departed_at, 3),
        "requests": counts_status(departed.counts),
    }


def counts_status(counts: Counts) -> dict[str, Any]:
    found = {name: getattr(counts, name) for name in counts.__slots__}
    found["missed_tokens"] = {reason.value: counts.missed_tokens[reason] for reason in MissReason}
    del found["benefit"]
    return found | counts.benefit.status()
