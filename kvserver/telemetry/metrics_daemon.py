"""Metrics of the daemon itself: its loop, L1, GPUs, requests by type, what is open, events, exporters and status pages.

Owns: names and help texts of these metrics; their values come from a status.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from msgspec import UNSET, UnsetType

from kvserver.config import SERVING_MODES
from kvserver.protocol import CONNECTION_REFUSED, WAIT_SECONDS, ErrorCode
from kvserver.protocol.status import (
    DaemonStatus,
    DirectionStatus,
    GpuStatus,
    ModelStatus,
    OtlpStatus,
    PagesStatus,
    TierStatus,
    TracesStatus,
)
from kvserver.telemetry.families import Family, Kind, Metric, families_of
from kvserver.telemetry.rpc_counts import TYPES, RpcCounts

P = TypeVar("P")
_REFUSALS = dict.fromkeys((*(code.value for code in ErrorCode), CONNECTION_REFUSED), 0)
_INTERNAL = {(ErrorCode.INTERNAL.value, name): 0 for name in TYPES}  # so that the first one is an increase
_DAEMON: tuple[Metric[DaemonStatus], ...] = (
    Metric("kvserver_ready", "1 while the daemon should receive traffic, 0 while it should not, as /readyz answers.", Kind.GAUGE, lambda of: +of.ready),
    Metric("kvserver_serving", "1 for the present state of the operator's switch: on, stores-off (lookups find chunks, no store is taken) or off (no lookup finds a chunk either).", Kind.GAUGE, lambda of: {mode: +(of.serving == mode) for mode in SERVING_MODES}, ("serving",)),
    Metric("kvserver_loop_lag_seconds", "Longest turn of the daemon's event loop in the last 10 to 20 seconds.", Kind.GAUGE, lambda of: of.loop_lag_seconds),
    Metric("kvserver_metrics_sample_rate", "Share of block and chunk lifetimes that the lifetime histograms of L0 and L1 sample.", Kind.GAUGE, lambda of: of.metrics_sample_rate),
    Metric("kvserver_l1_size_bytes", "Memory that L1 has for chunks.", Kind.GAUGE, lambda of: of.l1.size_bytes),
    Metric("kvserver_l1_used_bytes", "Memory of L1 that chunks occupy.", Kind.GAUGE, lambda of: of.l1.used_bytes),
    Metric("kvserver_l1_pinned_bytes", "Memory of L1 that is pinned for GPUs.", Kind.GAUGE, lambda of: of.l1.pinned_bytes),
    Metric("kvserver_l1_chunks", "Chunks in L1, also chunks that stores are filling.", Kind.GAUGE, lambda of: of.l1.chunks),
    Metric("kvserver_l1_tail_blocks", "Single blocks in L1 that follow the last full chunk of a prompt or of a request.", Kind.GAUGE, lambda of: of.l1.tail_blocks),
    Metric("kvserver_l1_would_hit_tokens", "Tokens that lookups would have found in an L1 of another size, an estimate. The label size is a multiple of L1, or unlimited; size=\"1\" is L1 itself.", Kind.COUNTER, lambda of: {one.size: one.would_hit_tokens for one in of.what_if.sizes}, ("size",)),
    Metric("kvserver_l1_evicted_chunks", "Chunks evicted from L1, each once for all ranks.", Kind.COUNTER, lambda of: of.l1.evictions),
    Metric("kvserver_l1_evicted_bytes", "Memory of L1 that evicted chunks had occupied.", Kind.COUNTER, lambda of: of.l1.evicted_bytes),
    Metric("kvserver_l1_cleared_chunks", "Chunks that requests to clear the cache removed from L1.", Kind.COUNTER, lambda of: of.l1.cleared_chunks),
    Metric("kvserver_cache_pins", "Pins of prompts that an operator made and that have not ended.", Kind.GAUGE, lambda of: of.pins.pins),
    Metric("kvserver_cache_pinned_bytes", "Memory of L1 that pins of prompts protect from eviction.", Kind.GAUGE, lambda of: of.pins.bytes),
    Metric("kvserver_cache_pin_limit_bytes", "Memory of L1 that pins of prompts may protect from eviction together.", Kind.GAUGE, lambda of: of.pins.most_bytes),
    Metric("kvserver_cache_pin_deferred_chunks", "Chunks that pins of prompts name and that L2 has and L1 lacks.", Kind.GAUGE, lambda of: of.pins.deferred_chunks),
    Metric("kvserver_cache_pin_requests", "Requests to pin a prompt, by outcome.", Kind.COUNTER, lambda of: of.pins.requests, ("outcome",)),
    Metric("kvserver_cache_pins_ended", "Pins of prompts that ended, by reason.", Kind.COUNTER, lambda of: of.pins.ended, ("reason",)),
    Metric("kvserver_cache_pin_passed_over_chunks", "Pinned chunks that were next to be evicted from L1: each time another chunk was evicted instead.", Kind.COUNTER, lambda of: of.pins.passed_over),
    Metric("kvserver_cache_prefetches_live", "Prefetches of prompts from L2 to L1 that have not ended; what each brought is leased until it ends.", Kind.GAUGE, lambda of: of.prefetches.prefetches),
    Metric("kvserver_cache_prefetches", "Requests to bring a prompt from L2 to L1 before a request needs it, by outcome.", Kind.COUNTER, lambda of: of.prefetches.requests, ("outcome",)),
    Metric("kvserver_instances_connected", "Engine instances whose first worker registered.", Kind.COUNTER, lambda of: of.connects.connected),
    Metric("kvserver_tickets", "Copies, mappings and unmappings of memory that are in flight.", Kind.GAUGE, lambda of: of.books.tickets),
    Metric("kvserver_leases", "Requests whose lookup protects chunks of L1 from eviction.", Kind.GAUGE, lambda of: of.books.leases),
    Metric("kvserver_pins", "Pins of chunks in L1 by stores and loads that have not ended.", Kind.GAUGE, lambda of: of.books.pins),
    Metric("kvserver_accounting_failures", "Audits of the daemon's accounting that found a contradiction, which is a bug.", Kind.COUNTER, lambda of: of.books.unbalanced),
    Metric("kvserver_undelivered_replies", "Replies that could not be sent: the peer had disconnected or did not read.", Kind.COUNTER, lambda of: of.totals.undelivered_replies),
    Metric("kvserver_l1_other_tenant_stores", "Stores and reads of L2 that named a tenant without a share of L1: their chunks belong to their models.", Kind.COUNTER, lambda of: of.l1.other_tenants),
    Metric("kvserver_events_queue_depth", "Events in the daemon's queue; an event that carries bytes counts once more for every 4 KiB.", Kind.GAUGE, lambda of: of.events.queue_depth),
    Metric("kvserver_events_lag_seconds", "Longest time that an event waited in the queue, of those that the event thread handled in its last second.", Kind.GAUGE, lambda of: of.events.lag_seconds),
    Metric("kvserver_loop_turn_seconds", "Duration of each turn of the daemon's event loop.", Kind.HISTOGRAM, lambda of: of.loop_turns, bounds=WAIT_SECONDS),
    Metric("kvserver_events_wait_seconds", "Time that each event waited in the daemon's queue for the event thread.", Kind.HISTOGRAM, lambda of: of.events.waits, bounds=WAIT_SECONDS),
    Metric("kvserver_build_info", "Always 1; the label is the daemon's version.", Kind.GAUGE, lambda of: {of.version: 1}, ("version",)),
    Metric("kvserver_instances", "Engine instances that are registered now.", Kind.GAUGE, lambda of: len(of.instances)),
    Metric("kvserver_instances_disconnected", "Engine instances whose last worker ended, by how.", Kind.COUNTER, lambda of: of.connects.disconnected, ("reason",)),
    Metric("kvserver_refused_registrations", "Attempts of workers to register that the daemon refused, by error code; each retry of an engine counts.", Kind.COUNTER, lambda of: _REFUSALS | of.refused_registrations, ("reason",)),
    Metric("kvserver_events_published", "Events that the daemon's loop queued, by type.", Kind.COUNTER, lambda of: of.events.published_types, ("type",)),
    Metric("kvserver_events_dropped", "Events that the daemon dropped because its queue was full, by type.", Kind.COUNTER, lambda of: of.events.dropped_types, ("type",)),
    Metric("kvserver_events_subscriber_errors", "Events that a subscriber inside the daemon failed to handle, by subscriber.", Kind.COUNTER, lambda of: {one.name: one.errors for one in of.events.subscribers}, ("subscriber",)),
    Metric("kvserver_kv_events_unannounced_chunks", "Objects (the KV of one chunk of one object group) that became READY and could not be published as KV events, by reason.", Kind.COUNTER, lambda of: of.kv_events.unannounced, ("reason",)),
    Metric("kvserver_kv_events_described_chunks", "Objects (the KV of one chunk of one object group) in L1 that are READY and whose tokens are known.", Kind.GAUGE, lambda of: of.kv_events.described_chunks),
    Metric("kvserver_kv_events_state_bytes", "Memory that the descriptions of chunks use.", Kind.GAUGE, lambda of: of.kv_events.state_bytes),
    Metric("kvserver_kv_event_observer_up", "1 while an observer receives KV events, 0 after it was cut off or could not be made.", Kind.GAUGE, lambda of: {one["name"]: +(one["state"] == "running") for one in of.kv_events.observers}, ("observer",)),
    Metric("kvserver_otlp_sent", "Exports of all metrics, and spans of traces, that the OTLP collector accepted, by signal.", Kind.COUNTER, lambda of: {"metrics": _or(of.otlp, OtlpStatus()).sent, "traces": _or(of.traces, TracesStatus()).sent}, ("signal",)),
    Metric("kvserver_otlp_failed", "Exports of all metrics, and spans of traces, that did not reach the OTLP collector, by signal.", Kind.COUNTER, lambda of: {"metrics": _or(of.otlp, OtlpStatus()).failed, "traces": _or(of.traces, TracesStatus()).failed}, ("signal",)),
    Metric("kvserver_trace_spans", "Spans of traced requests that ended.", Kind.COUNTER, lambda of: _or(of.traces, TracesStatus()).spans),
    Metric("kvserver_trace_forgotten_requests", "Traced requests that were forgotten before they ended: too many were open.", Kind.COUNTER, lambda of: _or(of.traces, TracesStatus()).forgotten),
    Metric("kvserver_http_connections", "Open connections to the daemon's status pages.", Kind.GAUGE, lambda of: _or(of.http, PagesStatus()).connections),
    Metric("kvserver_http_refused", "Requests and connections to the daemon's status pages that were refused or given up, by reason.", Kind.COUNTER, lambda of: _or(of.http, PagesStatus()).refused, ("reason",)),
)  # fmt: skip
_L1_MODEL: tuple[Metric[ModelStatus], ...] = (
    Metric("kvserver_l1_model_used_bytes", "Memory of L1 that chunks of a model occupy.", Kind.GAUGE, lambda of: of.used_bytes),
    Metric("kvserver_l1_model_chunks", "Chunks of a model in L1, also chunks that stores are filling.", Kind.GAUGE, lambda of: of.chunks),
    Metric("kvserver_l1_never_loaded_chunks", "Chunks of a model evicted from L1 that no engine had ever loaded.", Kind.COUNTER, lambda of: of.never_loaded),
    Metric("kvserver_l1_model_share_bytes", "Memory of L1 that is kept for a model when chunks are evicted; 0 for a model without a share.", Kind.GAUGE, lambda of: of.share_bytes),
    Metric("kvserver_l1_model_evicted_chunks", "Chunks of a model evicted from L1, each once for all ranks.", Kind.COUNTER, lambda of: of.evictions),
)  # fmt: skip
_L1_TENANT: tuple[Metric[ModelStatus], ...] = (
    Metric("kvserver_l1_tenant_used_bytes", "Memory of L1 that chunks of a tenant with a share occupy.", Kind.GAUGE, lambda of: of.used_bytes),
    Metric("kvserver_l1_tenant_chunks", "Chunks of a tenant with a share in L1, also chunks that stores are filling.", Kind.GAUGE, lambda of: of.chunks),
    Metric("kvserver_l1_tenant_share_bytes", "Memory of L1 that is kept for a tenant when chunks are evicted.", Kind.GAUGE, lambda of: of.share_bytes),
    Metric("kvserver_l1_tenant_evicted_chunks", "Chunks of a tenant with a share evicted from L1, each once for all ranks.", Kind.COUNTER, lambda of: of.evictions),
)  # fmt: skip
_TIER: tuple[Metric[TierStatus], ...] = (
    Metric("kvserver_l2_up", "1 while a tier of L2 is ready or can only be read, 0 while it is opening, unavailable or closed.", Kind.GAUGE, lambda of: +(of.state in ("ready", "read_only"))),
    Metric("kvserver_l2_writable", "1 while a tier of L2 accepts objects, 0 while it does not; no series where its URL has read_only=true.", Kind.GAUGE, lambda of: None if of.read_only else +(of.state == "ready")),
    Metric("kvserver_l2_size_bytes", "Storage that a tier of L2 may use; 0 where the storage itself has the limit.", Kind.GAUGE, lambda of: of.size_bytes),
    Metric("kvserver_l2_used_bytes", "Storage of a tier of L2 that objects occupy, as far as the daemon knows.", Kind.GAUGE, lambda of: of.used_bytes),
    Metric("kvserver_l2_objects", "Objects (the KV of one chunk of one object group) that a tier of L2 has, as far as the daemon knows.", Kind.GAUGE, lambda of: of.objects),
    Metric("kvserver_l2_reads", "Reads of objects from a tier of L2, by outcome.", Kind.COUNTER, lambda of: {"hit": of.hits, "miss": of.misses, "corrupt": of.corrupt, "timeout": of.read_timeouts, "error": of.read_errors}, ("outcome",)),
    Metric("kvserver_l2_read_bytes", "Bytes of objects read from a tier of L2.", Kind.COUNTER, lambda of: of.read_bytes),
    Metric("kvserver_l2_read_bytes_per_second", "How fast fills read from a tier of L2 lately; 0 while it is not known.", Kind.GAUGE, lambda of: of.read_bytes_per_second),
    Metric("kvserver_l2_written_objects", "Objects written to a tier of L2.", Kind.COUNTER, lambda of: of.written_objects),
    Metric("kvserver_l2_written_bytes", "Bytes of objects written to a tier of L2.", Kind.COUNTER, lambda of: of.written_bytes),
    Metric("kvserver_l2_evicted_objects", "Objects that a tier of L2 evicted to make space for others.", Kind.COUNTER, lambda of: of.evictions),
    Metric("kvserver_l2_dropped_objects", "Objects that were queued for a tier of L2, or offered to it, and not written, by reason.", Kind.COUNTER, lambda of: of.dropped, ("reason",)),
    Metric("kvserver_l2_queue_bytes", "Bytes of objects that wait for a tier of L2 or are being written to it.", Kind.GAUGE, lambda of: of.queue_bytes),
    Metric("kvserver_l2_breaks", "How often the breaker of a tier of L2 opened.", Kind.COUNTER, lambda of: of.breaks),
)  # fmt: skip
_GPU: tuple[Metric[GpuStatus], ...] = (
    Metric("kvserver_gpu_mapped_bytes", "Memory of engines on a GPU that the daemon has mapped.", Kind.GAUGE, lambda of: of.mapped_bytes),
    Metric("kvserver_gpu_copied_bytes", "Bytes copied between L1 and a GPU, by direction and by way: each run by DMA, or gathered by a kernel.", Kind.COUNTER, lambda of: _by_way("store", of.store) | _by_way("load", of.load), ("direction", "way")),
    Metric("kvserver_gpu_unpinned_bytes", "Bytes copied between a GPU and parts of L1 that were not pinned, which is slower.", Kind.COUNTER, lambda of: {"store": of.store.unpinned_bytes, "load": of.load.unpinned_bytes}, ("direction",)),
)  # fmt: skip
_RPC: tuple[Metric[RpcCounts], ...] = (
    Metric("kvserver_rpc_seconds", "Time from the arrival of a request at the daemon to its reply, by type of request.", Kind.HISTOGRAM, lambda of: of.times, ("type",), bounds=WAIT_SECONDS),
    Metric("kvserver_rpc_errors", "Errors that the daemon replied, and internal errors beside requests, by error code and type of request.", Kind.COUNTER, lambda of: _INTERNAL | of.errors, ("reason", "type")),
)  # fmt: skip


def daemon_families(status: DaemonStatus, rpc: RpcCounts) -> Iterable[Family]:
    yield from families_of(_DAEMON, [(status, ())])
    yield from families_of(_L1_MODEL, [(model, (name,)) for name, model in status.l1.models.items()], ("model_name",))
    yield from families_of(_L1_TENANT, [(use, (name,)) for name, use in status.l1.tenants.items()], ("tenant",))
    yield from families_of(_TIER, [(tier, (tier.name, tier.kind)) for tier in status.l2], ("tier", "kind"))
    yield from families_of(_GPU, [(gpu, (gpu.device,)) for gpu in status.gpus], ("device",))
    yield from families_of(_RPC, [(rpc, ())])


def _by_way(direction: str, of: DirectionStatus) -> dict[tuple[str, str], int]:
    return {(direction, "dma"): of.dma_bytes, (direction, "staged"): of.staged_bytes}


def _or(part: P | UnsetType, default: P) -> P:
    return default if part is UNSET else part
