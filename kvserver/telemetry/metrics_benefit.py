"""Metrics of what the cache brought each instance, and what its copies took.

Owns: names and help texts of these metrics; their values come from a status.
"""

from __future__ import annotations

from kvserver.protocol.status import RequestsStatus
from kvserver.telemetry.benefit import COPY_BUCKETS, RATIO_BUCKETS
from kvserver.telemetry.families import Kind, Metric

BENEFIT: tuple[Metric[RequestsStatus], ...] = (
    Metric("kvserver_prompt_tokens", "Prompt tokens by source: the engine's own prefix cache (l0), loaded from L1 or L2, or computed.", Kind.COUNTER, lambda of: of.prompt_tokens, ("source",)),
    Metric("kvserver_request_loads", "Loads of requests, each once for all ranks; failed if it failed on any rank.", Kind.COUNTER, lambda of: of.request_loads, ("outcome",)),
    Metric("kvserver_prefill_seconds_gained", "Prefill time that loads spared the engine, less the time the loads took, of loads faster than computing.", Kind.COUNTER, lambda of: of.prefill_seconds_gained),
    Metric("kvserver_prefill_seconds_lost", "Time that loads took beyond the prefill time they spared, of loads slower than computing and failed ones.", Kind.COUNTER, lambda of: of.prefill_seconds_lost),
    Metric("kvserver_request_hit_ratio", "Share of each request's prompt tokens that the engine did not compute.", Kind.HISTOGRAM, lambda of: of.hit_ratio, bounds=RATIO_BUCKETS),
    Metric("kvserver_store_duration_seconds", "Time of completed stores at the daemon, by rank: waiting (queue), and copying by the device (copy).", Kind.HISTOGRAM, lambda of: of.store_duration, ("phase",), COPY_BUCKETS),
    Metric("kvserver_load_duration_seconds", "Time of completed loads at the daemon, by rank: waiting (queue), and copying by the device (copy).", Kind.HISTOGRAM, lambda of: of.load_duration, ("phase",), COPY_BUCKETS),
)  # fmt: skip
