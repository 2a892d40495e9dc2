"""Makes `/status` from the parts of a daemon, but for what the pages add. Refuses to know: how the numbers are counted."""

from __future__ import annotations

from msgspec import UNSET
from msgspec.structs import replace

from kvserver import __version__
from kvserver.parts import Parts
from kvserver.protocol import PROTOCOL_VERSION
from kvserver.protocol.status import AccountingStatus, DaemonStatus, InstanceStatus
from kvserver.server import (
    Server,
    connects_status,
    departed_status,
    instance_status,
    l1_status,
    pins_status,
    prefetches_status,
    totals_status,
)
from kvserver.telemetry import with_l2


def daemon_status(parts: Parts, server: Server) -> DaemonStatus:
    """`/status`, but for what the pages know. From the loop's thread."""
    observability, now = parts.observability, parts.clock()
    totals = totals_status(parts.instances, server.rpc)
    return DaemonStatus(
        version=__version__,
        boot_id=parts.boot_id,
        uptime_seconds=round(now - server.started, 3),
        ready=not server.failure,
        protocol_version=PROTOCOL_VERSION,
        loop_lag_seconds=server.lag_seconds,
        loop_turns=server.turns.snapshot(),
        metrics_sample_rate=parts.settings.metrics_sample_rate,
        l1=l1_status(parts.cache, parts.placement),
        what_if=with_l2(observability.what_if.status(), totals.prompt_tokens["l2"], totals.fill_seconds),
        l2=parts.storage.status(),
        gpus=parts.devices.status(),
        instances=instances_status(parts),
        connects=connects_status(parts.instances),
        departed=[departed_status(departed, now) for departed in parts.instances.departed.values()],
        totals=totals,
        events=parts.bus.status(),
        kv_events=replace(observability.hub.status(), observers=observability.observers.status()),
        explain=observability.explain.status(),
        otlp=observability.sender.status() if observability.sender is not None else UNSET,
        traces=observability.traces.status() if observability.traces is not None else UNSET,
        recording=observability.recorder.status() if observability.recorder is not None else UNSET,
        books=AccountingStatus(
            tickets=parts.tickets.open_tickets,
            pins=parts.cache.space.pins,
            leases=parts.cache.lease_count,
            mappings=parts.workers.mappings,
            attachments=len(parts.lifelines),
            free_pages=parts.cache.pool.unused_pages,
            used_pages=parts.cache.pool.used_pages,
            audits=parts.upkeep.audits,
            unbalanced=parts.upkeep.unbalanced,
        ),
        refused_registrations=dict(server.rpc.refused_registrations() + parts.lifelines.refused),
        refused_engines=parts.workers.refused_engines(),
        serving=parts.serving.mode,
        pins=pins_status(parts.cache),
        prefetches=prefetches_status(parts.upkeep.prefetches),
        not_ready=server.failure.strip(),
    )


def instances_status(parts: Parts) -> list[InstanceStatus]:
    """Status of all instances, from the loop's thread."""
    now, l0 = parts.clock(), parts.observability.block_lifecycle
    return [
        instance_status(instance, parts.devices, l0.status(instance.instance_id), now)
        for instance in parts.instances.by_id.values()
    ]
