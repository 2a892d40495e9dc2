"""Metric families of the instances: what each requested and got, and its engine stats.

Owns: names and help texts of the families with the labels `instance_id` and `model_name` that come from a status snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvserver.families import Family, Kind

_INSTANCE = ("instance_id", "model_name")
_INSTANCE_COUNTERS = (  # name, text, key of the instance's requests, unit
    ("kvserver_lookup_requests", "Lookups answered.", "lookups", 1),
    ("kvserver_lookup_tokens", "Tokens of whole chunks asked for.", "lookup_tokens", 1),
    ("kvserver_lookup_hit_tokens", "Tokens of chunks found READY.", "hit_tokens", 1),
    ("kvserver_saved_prefill_tokens", "Tokens whose KV was loaded instead of computed.", "saved_tokens", 1),
    ("kvserver_saved_prefill_seconds", "Those over the prefill speed that the engine told.", "saved_seconds", 1),
    ("kvserver_store_bytes", "Bytes copied L0 to L1.", "stored_bytes", 1),
    ("kvserver_load_bytes", "Bytes copied L1 to L0.", "loaded_bytes", 1),
    ("kvserver_store_seconds", "Time copying L0 to L1.", "store_nanos", 1e-9),
    ("kvserver_load_seconds", "Time copying L1 to L0.", "load_nanos", 1e-9),
    ("kvserver_failed_stores", "Stores refused, cancelled or failed.", "failed_stores", 1),
    ("kvserver_failed_loads", "Loads refused, cancelled or failed.", "failed_loads", 1),
    ("kvserver_l1_stored_chunks", "Chunks copied L0 to L1, by each rank.", "stored_chunks", 1),
    ("kvserver_l1_stores_avoided_chunks", "Chunks to be stored that L1 had already.", "avoided_chunks", 1),
    ("kvserver_l1_starved_chunks", "Chunks to be stored that found no room.", "starved_chunks", 1),
    ("kvserver_l1_loaded_chunks", "Chunks copied L1 to L0, by each rank.", "loaded_chunks", 1),
    ("kvserver_engine_preemptions", "Requests the engine preempted.", "engine_preemptions", 1),
    ("kvserver_engine_prompt_tokens", "Tokens of prompts the engine took.", "engine_prompt_tokens", 1),
    ("kvserver_engine_generation_tokens", "Tokens the engine generated.", "engine_generation_tokens", 1),
    ("kvserver_engine_finished_requests", "Requests the engine finished.", "engine_finished_requests", 1),
    ("kvserver_engine_prefix_query_tokens", "Tokens looked up in the engine's own cache.", "engine_prefix_queries", 1),
    ("kvserver_engine_prefix_hit_tokens", "Tokens found there.", "engine_prefix_hits", 1),
    ("kvserver_engine_external_query_tokens", "Tokens it asked its connector for.", "engine_external_queries", 1),
    ("kvserver_engine_external_hit_tokens", "Tokens that one had.", "engine_external_hits", 1),
)
_LOADS = (  # name, text, key of the instance's load
    ("kvserver_engine_running_requests", "Requests in the engine's batch.", "running"),
    ("kvserver_engine_waiting_requests", "Requests waiting in the engine.", "waiting"),
    ("kvserver_engine_deferred_requests", "Those of them that do not wait for room.", "deferred"),
    ("kvserver_engine_kv_cache_usage_ratio", "Share of the engine's blocks in use.", "kv_cache_usage"),
    ("kvserver_engine_prompt_token_rate", "Tokens of prompts a second.", "prompt_tokens_per_second"),
    ("kvserver_engine_generation_token_rate", "Tokens generated a second.", "generation_tokens_per_second"),
)


def instance_families(rows: Sequence[dict[str, Any]]) -> Iterable[Family]:
    for name, text, key, unit in _INSTANCE_COUNTERS:
        family = Family(name, text, Kind.COUNTER, _INSTANCE)
        for row in rows:
            family.add(row["requests"][key] * unit, row["instance_id"], row["model_name"])
        yield family
    missed = Family(
        "kvserver_lookup_missed_tokens",
        "Tokens looked up and not found, by what became of the first missing chunk.",
        Kind.COUNTER,
        (*_INSTANCE, "reason"),
    )
    for row in rows:
        for reason, tokens in row["requests"]["missed_tokens"].items():
            missed.add(tokens, row["instance_id"], row["model_name"], reason)
    yield missed
    yield from _loads([row for row in rows if row.get("load") is not None])


def _loads(rows: Sequence[dict[str, Any]]) -> Iterable[Family]:
    for name, text, key in _LOADS:
        family = Family(name, text, Kind.GAUGE, _INSTANCE)
        for row in rows:
            if not row["load"]["stale"]:
                family.add(row["load"][key], row["instance_id"], row["model_name"])
        yield family
    age = Family("kvserver_engine_load_age_seconds", "Since the engine told its load.", Kind.GAUGE, _INSTANCE)
    for row in rows:
        age.add(row["load"]["age_seconds"], row["instance_id"], row["model_name"])
    yield age
