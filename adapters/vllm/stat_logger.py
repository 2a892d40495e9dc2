"""`KVServerStatLogger`: sends the engine stats to the daemon, from the engine's front end.

Owns: the sums of what vLLM reports, and the thread that sends them. Refuses to know: the connector, which runs in
other processes; how the daemon uses the stats. Does nothing in an engine without the connector.

vLLM's thread only adds numbers; the sender's thread has the socket. A daemon that is absent, hangs or does not know
the engine costs the engine nothing.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import Any

from kvserver.adapters.vllm.identity import served_name
from kvserver.adapters.vllm.nesting import extra_config
from kvserver.adapters.vllm.settings import read_settings
from kvserver.adapters.vllm.watch import incarnation, instance_id
from vllm.v1.metrics.loggers import StatLoggerBase

from kvserver.protocol import EngineLoad, Error
from kvserver.protocol.client import Client, RequestFailed

log = logging.getLogger("vllm.kvserver")

_HELLO_SECONDS = 2.0
_LONGEST_REST = 8  # intervals, for an engine that the daemon does not know


class KVServerStatLogger(StatLoggerBase):  # type: ignore[misc]
    """The stats of one engine: vLLM makes one logger for each data-parallel rank, in each of its front ends."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.stats: EngineLoad | None = None  # None: nothing is sent
        try:
            self._set_up(vllm_config, engine_index)
        except Exception:
            log.exception("kvserver: the stats of this engine are not sent to the daemon")

    def _set_up(self, config: Any, engine_index: int) -> None:
        extra = extra_config(config.kv_transfer_config)
        if extra is None:
            return
        settings = read_settings(extra)
        if not settings.load_interval_ms:
            return
        interval = settings.load_interval_ms / 1000
        self.stats = EngineLoad(
            instance_id=instance_id(config, engine_index),
            incarnation=incarnation(config),
            model_name=served_name(config.model_config),
            interval_seconds=interval,
            running=0,
            waiting=0,
            front_end=max(0, getattr(config.parallel_config, "_api_process_rank", 0)),
        )
        sender = EngineStatsSender(settings.endpoint, self.stats, interval)
        self._end = weakref.finalize(self, sender.stop.set)
        sender.thread.start()

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
    total.deferred = getattr(stats, "num_skipped_waiting_reqs", 0)
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


class EngineStatsSender:
    """The thread that sends the current `stats` once in each interval; it ends when `stop` is set."""

    def __init__(self, endpoint: str, stats: EngineLoad, interval: float) -> None:
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._run, name="kvserver-load", daemon=True)
        self._endpoint = endpoint
        self._stats = stats
        self._interval = interval
        self._understood = False  # by the daemon that answered last

    def _run(self) -> None:
        try:
            with Client(self._endpoint, _HELLO_SECONDS) as client:
                while not self.stop.is_set():
                    self.stop.wait(self._send(client))
        except Exception:
            log.exception("kvserver: the stats of this engine are no longer sent to the daemon")

    def _send(self, client: Client) -> float:
        """Send once; returns the pause until the next time, which grows while the daemon refuses."""
        refused = any(isinstance(reply, Error) for _, reply in client.channel.receive())
        if refused:  # the daemon does not know the engine yet, or never will; or it is another daemon
            self._understood = False
        rest = min(self._stats.interval_seconds * 2, self._interval * _LONGEST_REST) if refused else self._interval
        self._stats.interval_seconds = min(rest, 86400.0)
        if self._understood or self._greet(client):
            client.channel.send(self._stats)
        return self._stats.interval_seconds

    def _greet(self, client: Client) -> bool:
        """Whether a daemon answers that speaks this protocol version."""
        try:
            client.hello("load")
            self._understood = True
        except (RequestFailed, TimeoutError):
            self._understood = False
        return self._understood
