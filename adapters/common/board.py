"""Gauges in the Prometheus of the engine's front end: whether each engine has its cache.

Owns: the values of the gauges. Refuses to know: how the daemon is queried (`watch`), how reports become a status
(`cache_status`). Limit: the daemon of an idle engine on another machine is not seen, so the engine's last report counts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from kvserver.adapters.common.cache_status import CacheStatus, EngineCacheStatus, known

_MOST_DETAILS = 16  # texts of one engine; further ones are left out
_DETAIL_CHARS = 200

Labels: TypeAlias = Mapping[int, Sequence[object]]  # the values of the engines' labels, by the engine's index
MakeGauge: TypeAlias = Callable[..., Any]  # as prometheus_client.Gauge


class Board:
    """Gauges of one front end. Several front ends each receive a part of the reports, so the worst value counts."""

    def __init__(
        self, prefix: str, gauge: MakeGauge, labelnames: Sequence[str], per_engine: Labels, local: bool
    ) -> None:
        """`prefix`: of the names of metrics. `local`: all engines are on this machine."""
        self._lock = threading.Lock()  # the front end's thread and the watch's thread both report
        self._labels = per_engine
        self._statuses = {index: EngineCacheStatus(known_here=local) for index in per_engine}
        self._shown: dict[int, tuple[CacheStatus, bool]] = {}
        self._details: dict[int, set[str]] = {index: set() for index in per_engine}
        text = "1 while the engine's cache is on: kvserver answers, and all ranks of the engine are registered with kvserver."
        made = gauge(prefix + "connected", text, list(labelnames), multiprocess_mode="livemin")
        self._connected = {index: made.labels(*labels) for index, labels in per_engine.items()}
        text = "1 while the engine sends nothing to kvserver, since kvserver did not answer in time."
        made = gauge(prefix + "breaker_open", text, list(labelnames), multiprocess_mode="livemax")
        self._breaker = {index: made.labels(*labels) for index, labels in per_engine.items()}
        text = "1 for the reason why the engine runs without cache. No series is 1 while the cache is on."
        names = [*labelnames, "reason", "detail"]
        self._why = gauge(prefix + "without_cache_info", text, names, multiprocess_mode="livemax")
        for index in per_engine:
            self._show(index)

    def engine_reported(self, index: int, halves: Mapping[str, Sequence[str]]) -> None:
        """The engine's halves reported with a step."""
        with self._lock:
            statuses = {name: CacheStatus(*half) for name, half in halves.items()}
            self._statuses[index].report_halves(statuses, time.monotonic())
            self._show(index)

    def daemon_answered(self, index: int, answer: CacheStatus, began: float) -> None:
        """The daemon answered a query, or failed to."""
        with self._lock:
            self._statuses[index].report_answer(answer, began)
            self._show(index)

    def _show(self, index: int) -> None:
        status, breaker = self._statuses[index].verdict(), self._statuses[index].breaker_open
        before, self._shown[index] = self._shown.get(index), (status, breaker)
        if before == self._shown[index]:
            return
        self._connected[index].set(int(status.connected))
        self._breaker[index].set(int(breaker))
        if before is not None and before[0] != status and not before[0].connected:
            self._series(index, before[0]).set(0)
        if not status.connected:
            self._series(index, status).set(1)

    def _series(self, index: int, status: CacheStatus) -> Any:
        """Series of the info metric. Their number is bounded: details contain numbers, and no series is ever removed."""
        detail, kept = " ".join(status.detail.split())[:_DETAIL_CHARS], self._details[index]
        if detail not in kept and len(kept) >= _MOST_DETAILS:
            detail = ""
        kept.add(detail)
        return self._why.labels(*self._labels[index], known(status.reason), detail)
