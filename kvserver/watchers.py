"""Whoever watches the events of one daemon, and how their figures leave it.

Owns: the bus and its subscribers, the sending over OTLP, their starts and ends. Refuses to know: what they make of events.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvserver import metrics
from kvserver.config import Settings, parse_otlp_endpoint
from kvserver.events import Bus, Subscriber
from kvserver.families import Family
from kvserver.l0 import L0
from kvserver.l1 import L1

if TYPE_CHECKING:
    from kvserver.otlp import OtlpMetrics
    from kvserver.tracing import Traces

_LAST_EVENTS_SECONDS = 2.0  # for what is queued when the daemon stops


class Watchers:
    """REQUIRES: start() before close(), both once."""

    def __init__(self, settings: Settings, boot_id: str) -> None:
        self._settings = settings
        self.l0 = L0(settings.metrics_sample_rate)
        self.l1 = L1(settings.metrics_sample_rate)
        self.traces: Traces | None = None
        self._sender: OtlpMetrics | None = None
        self._make_sender: Callable[[Callable[[], list[Family]]], OtlpMetrics] | None = None
        endpoint = parse_otlp_endpoint(settings.otlp_endpoint)
        if endpoint is not None:  # what it imports takes time and memory, which others need not spend
            from kvserver import otlp, tracing

            sender = otlp.resource(boot_id)
            self.traces = tracing.Traces(otlp.span_exporter(endpoint), sender, settings.trace_sample_rate)
            self._make_sender = lambda read: otlp.OtlpMetrics(endpoint, sender, read, settings.otlp_interval_seconds)
        subscribers: list[Subscriber] = [self.l0, self.l1]
        self.bus = Bus([*subscribers, self.traces] if self.traces is not None else subscribers)

    def families(self, status: dict[str, Any], rpc: dict[str, Any]) -> list[Family]:
        """All of the daemon's; from any thread."""
        return metrics.families(status, rpc, [*self.l0.families(), *self.l1.families()])

    @property
    def wants_contents(self) -> bool:
        """Whether engines should say with each store what is in its blocks."""
        settings = self._settings
        return settings.kv_events == "on" or bool(settings.kv_events_endpoint or settings.kv_events_file)

    def status(self) -> dict[str, Any]:
        """The parts of `/status` about what leaves."""
        if self._sender is None or self.traces is None:
            return {}
        return {"otlp": self._sender.status(), "traces": self.traces.status()}

    def start(self, read: Callable[[], list[Family]]) -> None:
        """`read` gives the present families, from any thread; it may take its time."""
        self.bus.start()
        if self._make_sender is not None:
            self._sender = self._make_sender(read)
            self._sender.start()

    def close(self, read: Callable[[], list[Family]]) -> None:
        """Hand over and send what is left, for a few seconds at most. `read` is asked when all was handed over."""
        self.bus.flush(_LAST_EVENTS_SECONDS)
        last = read()
        self.bus.close(_LAST_EVENTS_SECONDS)
        if self._sender is not None:
            self._sender.close(last)
