"""`KVServerStatLogger`: sends the engine stats to the daemon, from the engine's front end.

Owns: the sums of what vLLM reports. Refuses to know: the connector, which runs in other processes; how the stats are
sent and used. Does nothing in an engine without the connector. vLLM's thread only adds numbers.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from dataclasses import asdict
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from kvserver.adapters.common.engine_stats import send_stats
from kvserver.adapters.vllm.names import names_of
from kvserver.adapters.vllm.nesting import own_settings
from kvserver.protocol import EngineLoad

log = logging.getLogger("vllm.kvserver")


class KVServerStatLogger(StatLoggerBase):  # type: ignore[misc]
    """Stats of one engine. vLLM makes one logger for each data-parallel rank, in each of its front ends."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.stats: EngineLoad | None = None  # None: nothing is sent
        try:
            self._set_up(vllm_config, engine_index)
        except Exception:
            log.exception("kvserver: the stats of this engine are not sent to the daemon")

    def _set_up(self, config: Any, engine_index: int) -> None:
        settings = own_settings(config.kv_transfer_config)
        if settings is None or not settings.load_interval_ms:
            return
        self.stats = EngineLoad(
            **asdict(names_of(config, engine_index)),
            interval_seconds=settings.load_interval_ms / 1000,
            running=0,
            waiting=0,
            front_end=max(0, config.parallel_config._api_process_rank),
        )
        stop = threading.Event()
        self._end = weakref.finalize(self, stop.set)
        arguments = (settings.endpoint, self.stats, stop)
        threading.Thread(target=send_stats, args=arguments, name="kvserver-load", daemon=True).start()

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0, **_: Any
    ) -> None:
        if self.stats is None:
            return
        try:
            if scheduler_stats is not None:
                add_scheduler_stats(self.stats, scheduler_stats)
            if iteration_stats is not None:
                add_iteration_stats(self.stats, iteration_stats)
        except Exception:
            self.stats = None
            self._end()
            log.exception("kvserver: the stats of this engine are no longer sent to the daemon")

    def log_engine_initialized(self) -> None:
        return


def add_scheduler_stats(total: EngineLoad, stats: Any) -> None:
    total.deferred = stats.num_skipped_waiting_reqs
    total.running = stats.num_running_reqs
    total.waiting = stats.num_waiting_reqs + total.deferred
    total.kv_cache_usage = min(max(stats.kv_cache_usage, 0.0), 1.0)
    total.as_of_ns = time.monotonic_ns()
    total.prefix_queries += stats.prefix_cache_stats.queries
    total.prefix_hits += stats.prefix_cache_stats.hits
    external = stats.connector_prefix_cache_stats
    if external is not None:
        total.external_queries += external.queries
        total.external_hits += external.hits


def add_iteration_stats(total: EngineLoad, stats: Any) -> None:
    total.preemptions += stats.num_preempted_reqs
    total.prompt_tokens += stats.num_prompt_tokens
    total.generation_tokens += stats.num_generation_tokens
    total.finished_requests += len(stats.finished_requests)
