"""Observers of one daemon's events: made, started and ended together, with their metrics.

Owns: which observers there are and the order in which they see an event. Refuses to know: what an observer does, and the parts of
the loop (`parts`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvserver.config import Settings, parse_otlp_endpoint, parse_size
from kvserver.events import NAMES, Bus, LookupEnded, Subscriber
from kvserver.kv_events import (
    Feed,
    Hub,
    ObserverContext,
    Observers,
    make_lines,
    make_publisher,
    publisher_families,
)
from kvserver.protocol.kv_status import PublisherStatus
from kvserver.protocol.status import DaemonStatus
from kvserver.replay import Recorder, make_recorder
from kvserver.routing import make_index
from kvserver.telemetry import (
    BlockLifecycle,
    ChunkLifecycle,
    Explain,
    Family,
    ResidentAges,
    RpcCounts,
    WhatIfCurve,
    all_families,
)

if TYPE_CHECKING:
    from kvserver.telemetry.otlp import OtlpMetrics
    from kvserver.telemetry.tracing import Traces

_LAST_EVENTS_SECONDS = 2.0  # in all, for the events that are queued when the daemon stops


class Observability:
    """Observers of one daemon. REQUIRES: start() before close(), both once; or observers.close()."""

    def __init__(self, settings: Settings, boot_id: str, l1_pages: int = 0, page_bytes: int = 1) -> None:
        """ConfigError if an exporter or observer of the settings cannot be made."""
        self.what_if = WhatIfCurve(l1_pages, page_bytes, settings.eviction_policy, settings.boundary_interval)
        self.block_lifecycle = BlockLifecycle(settings.metrics_sample_rate)
        self.chunk_lifecycle = ChunkLifecycle(settings.metrics_sample_rate)
        self.ages = ResidentAges()
        self.explain = Explain()
        self.traces: Traces | None = None
        self.sender: OtlpMetrics | None = None
        endpoint = parse_otlp_endpoint(settings.otlp_endpoint)
        if endpoint is not None:  # its imports cost time and memory: only a daemon with a collector pays
            from kvserver.telemetry import otlp, tracing

            sender = otlp.resource(settings.endpoint)
            self.sender = otlp.OtlpMetrics(endpoint, sender)
            self.traces = tracing.Traces(otlp.span_exporter(endpoint), sender, attributes=self.explain.attributes)
        self.hub = Hub(parse_size(settings.kv_events_memory), lambda event: self.observers.hand_over(event))
        boot_micros = time.time_ns() // 1000
        context = ObserverContext(settings, boot_id, boot_micros, self.hub.snapshot, self.hub.snapshot_of_tiers)
        self._lines = make_lines(context)  # first: it may raise, and the others begin threads
        self.publisher = make_publisher(context)  # None where no KV events are published
        self.index, self.feed = make_index(context), Feed(context)
        self.observers = Observers(
            context, {"zmq": self.publisher, "lines": self._lines}, {"index": self.index, "feed": self.feed}
        )
        # Whether an engine's stores should describe the contents of their blocks:
        self.needs_contents = settings.kv_events == "on" or bool(
            settings.kv_events_endpoint or settings.kv_events_file or self.observers.foreign
        )
        if self.needs_contents and settings.engine_kv_events == "auto":  # SGLang's stores cannot: its own events do
            self.hub.reads_pages = True
            self.index.read_pages(self.hub.describe_pages)
        # Each event reaches `explain` before the traces, whose spans show what it knows.
        subscribers: list[Subscriber] = [
            self.block_lifecycle,
            self.chunk_lifecycle,
            self.what_if,
            self.hub,
            self.explain,
            self.ages,
        ]
        if self.traces is not None:
            subscribers.append(self.traces)
        self.recorder: Recorder | None = make_recorder(settings, lambda: self.bus.dropped[NAMES[LookupEnded]])
        if self.recorder is not None:
            subscribers.append(self.recorder)
        self.bus = Bus(subscribers, idle=self._tick)
        self._until = 0.0  # the end of the time for the last events

    def _tick(self) -> None:
        self.what_if.tick()
        self.observers.tick()

    def families(self, status: DaemonStatus, rpc: RpcCounts) -> list[Family]:
        """All metric families of the daemon. From any thread."""
        more = [
            family
            for each in (self.block_lifecycle, self.chunk_lifecycle, self.hub, self.index)
            for family in each.families()
        ]
        published = publisher_families(self.publisher.status() if self.publisher is not None else PublisherStatus())
        families = all_families(status, rpc, [*more, *published])
        if self.traces is not None:
            for family in families:
                family.exemplars = self.traces.exemplars.get(family.name, {})
        return families

    def reopen_files(self) -> None:
        """Write to the files that have the settings' paths now, from the next line on. Also from a signal's handler."""
        for writer in (self._lines, self.recorder):
            if writer is not None:
                writer.file.reopen()

    def start(self, read: Callable[[], list[Family]]) -> None:
        """`read` returns the present families, from any thread; it may be slow."""
        self.observers.start()
        self.bus.start()
        if self.sender is not None:
            self.sender.start(read)

    def flush(self) -> bool:
        """Wait for the queued events, as long as close() would: the time counts from the first call on. False if some are left."""
        self._until = self._until or time.monotonic() + _LAST_EVENTS_SECONDS
        return self.bus.flush(max(0.0, self._until - time.monotonic()))

    def close(self, read: Callable[[], list[Family]]) -> None:
        """Handle and send what is queued, for a few seconds at most. `read` is called after the events were handled."""
        self.flush()
        last = read()
        self.bus.close(max(_LAST_EVENTS_SECONDS / 4, self._until - time.monotonic()))
        self.observers.close()
        if self.sender is not None:
            self.sender.close(last)
