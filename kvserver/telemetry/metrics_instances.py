"""Metric families of the instances: what each requested and got, its identity and its engine stats.

Owns: names and help texts of the families with the labels `instance_id` and `model_name` that come from a status snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvserver.telemetry.families import Family, Kind

_MOST_REASON = 200  # characters of a text that an engine wrote
_INSTANCE = ("instance_id", "model_name")
_COUNTERS = (  # name, help, key of the instance's requests, unit
    ("kvserver_lookup_requests", "Lookups that the daemon answered.", "lookups", 1),
    ("kvserver_lookup_tokens", "Tokens of the whole chunks that lookups requested.", "lookup_tokens", 1),
    ("kvserver_lookup_hit_tokens", "Tokens of the chunks that lookups found READY.", "hit_tokens", 1),
    ("kvserver_saved_prefill_tokens", "Tokens whose KV was loaded from L1 instead of computed by the engine.", "saved_tokens", 1),
    ("kvserver_saved_prefill_seconds", "Time that the engine would have taken to compute the tokens loaded from L1, at the prefill speed that it reported; loading time is not subtracted.", "saved_seconds", 1),
    ("kvserver_store_bytes", "Bytes copied from L0 to L1 by all ranks.", "stored_bytes", 1),
    ("kvserver_load_bytes", "Bytes copied from L1 to L0 by all ranks.", "loaded_bytes", 1),
    ("kvserver_store_seconds", "Time that devices spent copying from L0 to L1.", "store_nanos", 1e-9),
    ("kvserver_load_seconds", "Time that devices spent copying from L1 to L0.", "load_nanos", 1e-9),
    ("kvserver_failed_stores", "Store requests that were refused or cancelled, or whose copy failed, by all ranks.", "failed_stores", 1),
    ("kvserver_failed_loads", "Load requests that were refused or cancelled, or whose copy failed, by all ranks.", "failed_loads", 1),
    ("kvserver_l1_stored_chunks", "Chunks copied from L0 to L1, once for each rank that stores.", "stored_chunks", 1),
    ("kvserver_l1_stores_avoided_chunks", "Chunks that stores did not copy because L1 had them or was receiving them, once for each rank.", "avoided_chunks", 1),
    ("kvserver_l1_starved_chunks", "Chunks that stores did not copy because L1 had no space, once for each rank.", "starved_chunks", 1),
    ("kvserver_l1_loaded_chunks", "Chunks copied from L1 to L0, once for each rank.", "loaded_chunks", 1),
    ("kvserver_engine_preemptions", "Preemptions of requests in the engine, as vLLM counts them.", "engine_preemptions", 1),
    ("kvserver_engine_prompt_tokens", "Prompt tokens that the engine processed, as vLLM counts them.", "engine_prompt_tokens", 1),
    ("kvserver_engine_generation_tokens", "Tokens that the engine generated, as vLLM counts them.", "engine_generation_tokens", 1),
    ("kvserver_engine_finished_requests", "Requests that ended in the engine, for any reason.", "engine_finished_requests", 1),
    ("kvserver_engine_prefix_query_tokens", "Tokens that the engine looked up in its own prefix cache.", "engine_prefix_queries", 1),
    ("kvserver_engine_prefix_hit_tokens", "Tokens that the engine found in its own prefix cache.", "engine_prefix_hits", 1),
    ("kvserver_engine_external_query_tokens", "Tokens that the engine requested from its KV connector.", "engine_external_queries", 1),
    ("kvserver_engine_external_hit_tokens", "Tokens that the engine's KV connector found.", "engine_external_hits", 1),
)  # fmt: skip
_LOADS = (  # name, help, key of the instance's engine stats
    ("kvserver_engine_running_requests", "Requests in the engine's batch.", "running"),
    ("kvserver_engine_waiting_requests", "Requests that wait in the engine, also the deferred ones.", "waiting"),
    ("kvserver_engine_deferred_requests", "Requests that wait in the engine for something else than space, as a KV transfer or a grammar.", "deferred"),
    ("kvserver_engine_kv_cache_usage_ratio", "Share of the engine's KV cache blocks that requests own.", "kv_cache_usage"),
    ("kvserver_engine_prompt_token_rate", "Prompt tokens per second that the engine processed between its last two reports.", "prompt_tokens_per_second"),
    ("kvserver_engine_generation_token_rate", "Tokens per second that the engine generated between its last two reports.", "generation_tokens_per_second"),
)  # fmt: skip


def instance_families(registered: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> Iterable[Family]:
    """`rows`: the registered instances and those that ended lately."""
    yield from _identities(registered)
    for name, text, key, unit in _COUNTERS:
        family = Family(name, text, Kind.COUNTER, _INSTANCE)
        for row in rows:
            family.add(row["requests"][key] * unit, *_labels(row))
        yield family
    missed = Family(
        "kvserver_lookup_missed_tokens",
        "Tokens that lookups requested and did not find, by the reason why each chunk was missing.",
        Kind.COUNTER,
        (*_INSTANCE, "reason"),
    )
    for row in rows:
        for reason, tokens in row["requests"]["missed_tokens"].items():
            missed.add(tokens, *_labels(row), reason)
    yield missed
    yield from _loads([row for row in registered if row["load"] is not None])


def _labels(row: dict[str, Any]) -> tuple[str, str]:
    return row["instance_id"], row["model_name"]


def _identities(registered: Sequence[dict[str, Any]]) -> Iterable[Family]:
    facts = ("world_size", "l0_source", "block_tokens", "chunk_tokens")
    info = Family(
        "kvserver_instance_info",
        "Always 1 for a registered engine instance; the labels describe it, for joins.",
        Kind.GAUGE,
        (*_INSTANCE, *facts, "device"),
    )
    size = Family(
        "kvserver_instance_world_size",
        "Ranks of a registered engine instance: GPU-seconds are its seconds times this.",
        Kind.GAUGE,
        _INSTANCE,
    )
    private = Family(
        "kvserver_instance_private",
        "1 for a registered engine instance that shares KV with no other, with the reason.",
        Kind.GAUGE,
        (*_INSTANCE, "reason"),
    )
    speed = Family(
        "kvserver_engine_prefill_tokens_per_second",
        "Speed at which the engine computes prompt tokens, as it reported last.",
        Kind.GAUGE,
        _INSTANCE,
    )
    for row in registered:
        device = "cpu" if all(worker["device"] == "cpu" for worker in row["workers"]) else "gpu"
        info.add(1, *_labels(row), *(str(row[fact]) for fact in facts), device)
        size.add(row["world_size"], *_labels(row))
        if row["private"]:
            private.add(1, *_labels(row), row["private"][:_MOST_REASON])
        if row["prefill_tokens_per_second"]:
            speed.add(row["prefill_tokens_per_second"], *_labels(row))
    yield from (info, size, private, speed)


def _loads(rows: Sequence[dict[str, Any]]) -> Iterable[Family]:
    for name, text, key in _LOADS:
        family = Family(name, text, Kind.GAUGE, _INSTANCE)
        for row in rows:
            if not row["load"]["stale"]:
                family.add(row["load"][key], *_labels(row))
        yield family
    age = Family(
        "kvserver_engine_load_age_seconds", "Time since the engine last reported its stats.", Kind.GAUGE, _INSTANCE
    )
    for row in rows:
        age.add(row["load"]["age_seconds"], *_labels(row))
    yield age
