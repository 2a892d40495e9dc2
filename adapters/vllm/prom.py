"""vLLM's own Prometheus: `vllm:kvserver_*`, in its front end, with its labels.

Owns: the metrics. Refuses to know: how the daemon is queried (`watch`), the gauges of an engine's status (`board`), how counts
add up (`stats`).
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

import prometheus_client
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics
from vllm.v1.metrics.utils import create_metric_per_engine

from kvserver.adapters.common.board import Board, Labels
from kvserver.adapters.common.stats import (
    COUNTERS,
    FAULTS,
    HALVES,
    LOADED_TOKENS,
    PROMISED_TOKENS,
    QUARANTINED,
    REFUSED,
    TIERS,
    TIMES,
    WITHDRAWN_REASONS,
    WITHDRAWN_TOKENS,
)
from kvserver.adapters.common.watch import Watch
from kvserver.adapters.vllm.names import names_of
from kvserver.adapters.vllm.nesting import own_settings
from kvserver.protocol import ErrorCode

log = logging.getLogger("vllm.kvserver")

_PREFIX = "vllm:kvserver_"
_OTHER = "other"
_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
# Where a fault was kept from the engine: methods of vLLM's interface, and parts of what they do.
_PLACES = """
    _begin_loads, _begin_stores, _finished, _plan_stores, _set_up, _unregister, a failed load, a new session, a session's new turn, aborting a load, aborting a store, an
    answer, a wait for fills, answers, beginning of a load, beginning of a store, bind_gpu_block_pool, bind_scheduler_context, blocks that only stores keep, get_mem_pool_context,
    build_connector_meta, build_connector_worker_meta, cancelling a copy, ending the connection, failing a load,
    get_block_ids_with_load_errors, get_external_cache_hit_sources, get_kv_connector_stats, get_num_new_matched_tokens,
    has_pending_push_work, introduction, loads in a reset, looking at a load, looking at a store, on_new_request, planning of a load, poll, prefill speed,
    quarantine, question for events, receiving answers, register_kv_caches, reports of blocks,
    request_finished_all_groups,
    reset_cache, resets, restore_kv_caches, shutdown, sources of a prompt, stores of a request, tables
    of a request, take_events, the end of a quarantine, the end of a step, the end of a store, the next state,
    update_connector_output, update_state_after_alloc, waiting for the engine's own work
"""
PLACES = [" ".join(place.split()) for place in _PLACES.split(",")]
_WITHDRAWN = [f"{tier} {reason}" for tier in TIERS for reason in WITHDRAWN_REASONS]
# (labels, text, the values of each series). In a report a space is between the values of several labels.
_BY_LABEL: dict[str, tuple[list[str], str, list[str]]] = {
    REFUSED: (["code"], "Messages of all ranks that kvserver refused, by error code.", [c.value for c in ErrorCode]),
    FAULTS: (
        ["place"],
        "Faults in the connector that were kept from the engine, by place; the engine's log has each once.",
        PLACES,
    ),
    PROMISED_TOKENS: (
        ["tier"],
        "Tokens that kvserver promised to vLLM for requests, by the tier that has them: l1 is memory, l2 storage.",
        [*TIERS],
    ),
    LOADED_TOKENS: (["tier"], "Promised tokens that a load brought, by the tier that had them.", [*TIERS]),
    WITHDRAWN_TOKENS: (
        ["tier", "reason"],
        "Promised tokens that no load brought, by the tier that had them and why.",
        _WITHDRAWN,
    ),
}


class KVServerPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Metrics `vllm:kvserver_*` with vLLM's labels: one series for each engine of this front end.

    Never raises: vLLM would not catch it, and its front end would end.
    """

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine: Labels) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine)
        self._failed = False
        self._counters: dict[str, Any] = {}
        self._times: dict[str, Any] = {}
        self._by_label: dict[str, dict[int, dict[str, Any]]] = {}
        self._board: Board | None = None
        try:
            # With data parallelism ranks may be on other machines, beside a front end that serves them all.
            parallel = getattr(vllm_config, "parallel_config", None)
            local = getattr(parallel, "data_parallel_size", 1) == 1
            self._make(metric_types, labelnames, per_engine, local)
            self._watch(vllm_config, per_engine)
        except Exception:
            self._incomplete()

    def _make(self, metric_types: Any, labelnames: list[str], per_engine: Labels, local: bool) -> None:
        gauge, counter, histogram = (
            metric_types[kind]
            for kind in (prometheus_client.Gauge, prometheus_client.Counter, prometheus_client.Histogram)
        )
        text = (
            "Blocks of the engine that are out of use, since a load that was given up may still write into the blocks."
        )
        made = gauge(_PREFIX + QUARANTINED, text, labelnames, multiprocess_mode="mostrecent")
        self._quarantined = create_metric_per_engine(made, per_engine)
        for name, text in COUNTERS.items():
            self._counters[name] = create_metric_per_engine(counter(_PREFIX + name, text, labelnames), per_engine)
        for name, text in TIMES.items():
            made = histogram(_PREFIX + name, text, labelnames, buckets=_BUCKETS)
            self._times[name] = create_metric_per_engine(made, per_engine)
        for name, (own, text, values) in _BY_LABEL.items():
            made = counter(_PREFIX + name, text, [*labelnames, *own])
            # All series exist from the start, so that the first event of a kind is an increase too.
            self._by_label[name] = {
                index: {
                    value: made.labels(*labels, *(value.split(" ") if len(own) > 1 else [value]))
                    for value in (*values, " ".join([_OTHER] * len(own)))
                }
                for index, labels in per_engine.items()
            }
        self._board = Board(_PREFIX, gauge, labelnames, per_engine, local)
        text = "Always 1; instance_id is the name of the engine in kvserver: its engine_id."
        self._info = gauge(_PREFIX + "engine_info", text, [*labelnames, "instance_id"], multiprocess_mode="livemax")

    def _watch(self, config: Any, per_engine: Labels) -> None:
        """Name the engines, and start the thread that queries the daemon. It ends with this object."""
        settings = own_settings(config.kv_transfer_config)
        if settings is None or self._board is None:
            return
        engines = {index: names_of(config, index) for index in per_engine}
        for index, names in engines.items():
            self._info.labels(*per_engine[index], names.instance_id).set(1)
        watch = Watch(settings.endpoint, engines, self._board.daemon_answered)
        weakref.finalize(self, watch.stop.set)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        try:
            for name, value in transfer_stats_data.items():
                if name in self._counters:
                    self._counters[name][engine_idx].inc(value)
                elif name in self._times:
                    for seconds in value:
                        self._times[name][engine_idx].observe(seconds)
                elif name in self._by_label:
                    series = self._by_label[name][engine_idx]
                    *_, other = series
                    for label, count in value.items():
                        series[label if label in series else other].inc(count)
                elif name == QUARANTINED:
                    self._quarantined[engine_idx].set(value)
                elif name == HALVES and self._board is not None:
                    self._board.engine_reported(engine_idx, value)
        except Exception:
            self._incomplete()

    def _incomplete(self) -> None:
        """REQUIRES: called while an exception is handled."""
        if not self._failed:
            log.exception("kvserver: vllm:kvserver_* in vLLM's metrics are not complete")
        self._failed = True
