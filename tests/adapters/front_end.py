"""The front end of an engine without a model: vLLM's Prometheus logger, fed with the engine's steps.

Owns: one logger, and what of the steps it was given. Refuses to know: what the metrics should be.
"""

from __future__ import annotations

import threading
from typing import Any

from modelless import Engine
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

OWN = ("model_name", "engine")


class FrontEnd:
    """There is one at a time: vLLM unregisters the metrics of the one before. close() at the end."""

    def __init__(self, engine: Engine, config: Any = None) -> None:
        """`config`: the front end's, if it differs from the engine's."""
        self._engine = engine
        self._logger: Any = PrometheusStatLogger(config or engine.config, [0])
        self._recorded = 0

    def close(self) -> None:
        self._logger = None

    def record_steps(self) -> None:
        """Record the stats of the engine's steps since the last call, as they come out of the engine's process."""
        encoder, decoder = MsgpackEncoder(), MsgpackDecoder(SchedulerStats)
        for stats in self._engine.stats[self._recorded :]:
            self._logger.record(decoder.decode(encoder.encode(stats)), None, engine_idx=0)
        self._recorded = len(self._engine.stats)

    def observe(self, stats: dict[str, Any]) -> None:
        """As if a step had put these out."""
        self._logger.kv_connector_prom.observe(stats, 0)

    def series(self, name: str) -> dict[tuple[str, ...], float]:
        """Of a metric, by the labels beside vLLM's own."""
        families = text_string_to_metric_families(exposition())
        return {
            tuple(value for label, value in sample.labels.items() if label not in OWN): sample.value
            for family in families
            for sample in family.samples
            if sample.name == f"vllm:kvserver_{name}"
        }

    @property
    def connected(self) -> bool:
        return self.series("connected") == {(): 1.0}

    @property
    def reasons(self) -> list[tuple[str, str]]:
        """(reason, detail) whose series are 1."""
        found = families_by_labels("vllm:kvserver_without_cache_info")
        return [(labels["reason"], labels["detail"]) for labels, value in found if value == 1]

    @property
    def reason(self) -> str:
        """The one; "" with a cache. Both gauges agree at any time, but for the moment between them."""
        reasons = self.reasons
        assert len(reasons) <= 1, reasons
        return reasons[0][0] if reasons else ""


def exposition() -> str:
    text: str = generate_latest(REGISTRY).decode()
    return text


def families_by_labels(name: str) -> list[tuple[dict[str, str], float]]:
    return [
        (sample.labels, sample.value)
        for family in text_string_to_metric_families(exposition())
        for sample in family.samples
        if sample.name == name
    ]


def watches() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kvserver-watch"]
