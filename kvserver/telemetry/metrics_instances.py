"""Metrics of the instances: what each requested and got, its identity and its engine stats.

Owns: names and help texts of the metrics with the labels `instance_id` and `model_name` that come from a status.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvserver.protocol.status import DepartedStatus, EngineStatus, InstanceStatus, RequestsStatus
from kvserver.telemetry.benefit import COPY_BUCKETS, RATIO_BUCKETS
from kvserver.telemetry.families import Family, Kind, Metric, families_of

_MOST_REASON = 200  # characters of a text that an engine wrote
_INSTANCE = ("instance_id", "model_name")
_REQUESTS: tuple[Metric[RequestsStatus], ...] = (
    Metric("kvserver_lookup_requests", "Lookups that the daemon answered.", Kind.COUNTER, lambda of: of.lookups),
    Metric("kvserver_lookup_tokens", "Tokens of the whole chunks that lookups requested, and of the single blocks found behind the last one.", Kind.COUNTER, lambda of: of.lookup_tokens),
    Metric("kvserver_lookup_hit_tokens", "Tokens of the chunks that lookups found READY.", Kind.COUNTER, lambda of: of.hit_tokens),
    Metric("kvserver_saved_prefill_tokens", "Tokens whose KV was loaded from L1 instead of computed by the engine.", Kind.COUNTER, lambda of: of.saved_tokens),
    Metric("kvserver_saved_prefill_seconds", "Time that the engine would have taken to compute the tokens loaded from L1, at the prefill speed that it reported; loading time is not subtracted.", Kind.COUNTER, lambda of: of.saved_seconds),
    Metric("kvserver_store_bytes", "Bytes copied from L0 to L1 by all ranks.", Kind.COUNTER, lambda of: of.stored_bytes),
    Metric("kvserver_load_bytes", "Bytes copied from L1 to L0 by all ranks.", Kind.COUNTER, lambda of: of.loaded_bytes),
    Metric("kvserver_store_seconds", "Time that devices spent copying from L0 to L1.", Kind.COUNTER, lambda of: of.store_nanos * 1e-9),
    Metric("kvserver_load_seconds", "Time that devices spent copying from L1 to L0.", Kind.COUNTER, lambda of: of.load_nanos * 1e-9),
    Metric("kvserver_failed_stores", "Store requests that were refused or cancelled, or whose copy failed, by all ranks.", Kind.COUNTER, lambda of: of.failed_stores),
    Metric("kvserver_failed_loads", "Load requests that were refused or cancelled, or whose copy failed, by all ranks.", Kind.COUNTER, lambda of: of.failed_loads),
    Metric("kvserver_l1_stored_chunks", "Chunks copied from L0 to L1, once for each rank that stores.", Kind.COUNTER, lambda of: of.stored_chunks),
    Metric("kvserver_l1_stores_avoided_chunks", "Chunks that stores did not copy because L1 had them or was receiving them, once for each rank.", Kind.COUNTER, lambda of: of.avoided_chunks),
    Metric("kvserver_l1_starved_chunks", "Chunks that stores did not copy because L1 had no space, once for each rank.", Kind.COUNTER, lambda of: of.starved_chunks),
    Metric("kvserver_store_waits", "Lookups that waited for an engine's store of what they missed.", Kind.COUNTER, lambda of: of.store_waits),
    Metric("kvserver_handed_over_tokens", "Tokens of lookups that the engine which computed them had promised to store.", Kind.COUNTER, lambda of: of.handed_over_tokens),
    Metric("kvserver_late_handovers", "Lookups that were answered while a store that had been promised to them still ran.", Kind.COUNTER, lambda of: of.late_handovers),
    Metric("kvserver_lost_handovers", "Lookups for which a promised store did not arrive, or failed.", Kind.COUNTER, lambda of: of.lost_handovers),
    Metric("kvserver_fills", "Lookups for which objects were read from L2 to L1.", Kind.COUNTER, lambda of: of.fills),
    Metric("kvserver_fills_not_begun", "Lookups for which nothing was read from L2, since that was expected to take longer than to compute the tokens.", Kind.COUNTER, lambda of: of.fills_not_begun),
    Metric("kvserver_fills_slower", "Fills that took longer than was expected when they began.", Kind.COUNTER, lambda of: of.fills_slower),
    Metric("kvserver_fill_seconds", "Time that requests waited for objects to be read from L2 to L1.", Kind.COUNTER, lambda of: of.fill_seconds),
    Metric("kvserver_filled_tokens", "Tokens of chunks that became READY in L1 from L2.", Kind.COUNTER, lambda of: of.filled_tokens),
    Metric("kvserver_l1_loaded_chunks", "Chunks copied from L1 to L0, once for each rank.", Kind.COUNTER, lambda of: of.loaded_chunks),
    Metric("kvserver_engine_preemptions", "Preemptions of requests in the engine, as vLLM counts them.", Kind.COUNTER, lambda of: of.engine_preemptions),
    Metric("kvserver_engine_prompt_tokens", "Prompt tokens that the engine processed, as vLLM counts them.", Kind.COUNTER, lambda of: of.engine_prompt_tokens),
    Metric("kvserver_engine_generation_tokens", "Tokens that the engine generated, as vLLM counts them.", Kind.COUNTER, lambda of: of.engine_generation_tokens),
    Metric("kvserver_engine_finished_requests", "Requests that ended in the engine, for any reason.", Kind.COUNTER, lambda of: of.engine_finished_requests),
    Metric("kvserver_engine_prefix_query_tokens", "Tokens that the engine looked up in its own prefix cache.", Kind.COUNTER, lambda of: of.engine_prefix_queries),
    Metric("kvserver_engine_prefix_hit_tokens", "Tokens that the engine found in its own prefix cache.", Kind.COUNTER, lambda of: of.engine_prefix_hits),
    Metric("kvserver_engine_external_query_tokens", "Tokens that the engine requested from its KV connector.", Kind.COUNTER, lambda of: of.engine_external_queries),
    Metric("kvserver_engine_external_hit_tokens", "Tokens that the engine's KV connector found.", Kind.COUNTER, lambda of: of.engine_external_hits),
    Metric("kvserver_lookup_missed_tokens", "Tokens that lookups requested and did not find, by the reason why each chunk was missing.", Kind.COUNTER, lambda of: of.missed_tokens, ("reason",)),
    Metric("kvserver_prompt_tokens", "Prompt tokens by source: the engine's own prefix cache (l0), loaded from L1 or L2, or computed.", Kind.COUNTER, lambda of: of.prompt_tokens, ("source",)),
    Metric("kvserver_request_loads", "Loads of requests, each once for all ranks; failed if it failed on any rank.", Kind.COUNTER, lambda of: of.request_loads, ("outcome",)),
    Metric("kvserver_prefill_seconds_gained", "Prefill time that loads spared the engine, less the time the loads took, of loads faster than computing.", Kind.COUNTER, lambda of: of.prefill_seconds_gained),
    Metric("kvserver_prefill_seconds_lost", "Time that loads took beyond the prefill time they spared, of loads slower than computing and failed ones.", Kind.COUNTER, lambda of: of.prefill_seconds_lost),
    Metric("kvserver_request_hit_ratio", "Share of each request's prompt tokens that the engine did not compute.", Kind.HISTOGRAM, lambda of: of.hit_ratio, bounds=RATIO_BUCKETS),
    Metric("kvserver_store_duration_seconds", "Time of completed stores at the daemon, by rank: waiting (queue), and copying by the device (copy).", Kind.HISTOGRAM, lambda of: of.store_duration, ("phase",), COPY_BUCKETS),
    Metric("kvserver_load_duration_seconds", "Time of completed loads at the daemon, by rank: waiting (queue), and copying by the device (copy).", Kind.HISTOGRAM, lambda of: of.load_duration, ("phase",), COPY_BUCKETS),
)  # fmt: skip
_IDENTITY: tuple[Metric[InstanceStatus], ...] = (
    Metric("kvserver_instance_info", "Always 1 for a registered engine instance; the labels describe it, for joins.", Kind.GAUGE, lambda of: {_facts(of): 1}, ("world_size", "l0_source", "block_tokens", "chunk_tokens", "device", "engine", "engine_version", "kv_role")),
    Metric("kvserver_instance_world_size", "Ranks of a registered engine instance: GPU-seconds are its seconds times this.", Kind.GAUGE, lambda of: of.world_size),
    Metric("kvserver_instance_private", "1 for a registered engine instance that shares KV with no other, with the reason.", Kind.GAUGE, lambda of: {of.private[:_MOST_REASON]: 1} if of.private else None, ("reason",)),
    Metric("kvserver_engine_prefill_tokens_per_second", "Speed at which the engine computes prompt tokens, as it reported last.", Kind.GAUGE, lambda of: of.prefill_tokens_per_second or None),
    Metric("kvserver_engine_load_age_seconds", "Time since the engine last reported its stats.", Kind.GAUGE, lambda of: of.load.age_seconds if of.load is not None else None),
)  # fmt: skip
_ENGINE: tuple[Metric[EngineStatus], ...] = (
    Metric("kvserver_engine_running_requests", "Requests in the engine's batch.", Kind.GAUGE, lambda of: of.running),
    Metric("kvserver_engine_waiting_requests", "Requests that wait in the engine, also the deferred ones.", Kind.GAUGE, lambda of: of.waiting),
    Metric("kvserver_engine_deferred_requests", "Requests that wait in the engine for something else than space, as a KV transfer or a grammar.", Kind.GAUGE, lambda of: of.deferred),
    Metric("kvserver_engine_kv_cache_usage_ratio", "Share of the engine's KV cache blocks that requests own.", Kind.GAUGE, lambda of: of.kv_cache_usage),
    Metric("kvserver_engine_prompt_token_rate", "Prompt tokens per second that the engine processed between its last two reports.", Kind.GAUGE, lambda of: of.prompt_tokens_per_second),
    Metric("kvserver_engine_generation_token_rate", "Tokens per second that the engine generated between its last two reports.", Kind.GAUGE, lambda of: of.generation_tokens_per_second),
)  # fmt: skip


def instance_families(registered: Sequence[InstanceStatus], departed: Sequence[DepartedStatus]) -> Iterable[Family]:
    """A registered instance continues the series of its earlier incarnation."""
    rows = {_labels(row): row.requests for row in departed} | {_labels(row): row.requests for row in registered}
    yield from families_of(_IDENTITY, [(row, _labels(row)) for row in registered], _INSTANCE)
    yield from families_of(_REQUESTS, [(of, labels) for labels, of in rows.items()], _INSTANCE)
    reported = [(row.load, _labels(row)) for row in registered if row.load is not None and not row.load.stale]
    yield from families_of(_ENGINE, reported, _INSTANCE)


def _labels(row: InstanceStatus | DepartedStatus) -> tuple[str, str]:
    return row.instance_id, row.model_name


def _facts(row: InstanceStatus) -> tuple[str, ...]:
    device = "cpu" if all(worker.device == "cpu" for worker in row.workers) else "gpu"
    return (
        str(row.world_size),
        row.l0_source,
        str(row.block_tokens),
        str(row.chunk_tokens),
        device,
        row.engine,
        row.engine_version,
        row.kv_role,
    )
