"""The parts of one daemon, made and connected: those of the loop, and all that observes its events.

Owns: which part gets which other, how observers start and end, and what all parts show of themselves (`/status`, metrics).
Refuses to know: what a part does, sockets, the process (`daemon`).
"""

from __future__ import annotations

import secrets
import time
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msgspec import UNSET
from msgspec.structs import replace

from kvserver import __version__
from kvserver.cache import Cache
from kvserver.config import Placement, Settings, parse_otlp_endpoint, parse_size
from kvserver.copy import Devices, Tickets
from kvserver.engines import EngineReports, Instances, Lifelines, Ticket, Workers
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
from kvserver.protocol import PROTOCOL_VERSION, HelloReply
from kvserver.protocol.kv_status import PublisherStatus
from kvserver.protocol.status import AccountingStatus, DaemonStatus, InstanceStatus
from kvserver.replay import Recorder, make_recorder
from kvserver.routing import make_index
from kvserver.server import (
    Copies,
    Endpoint,
    Handlers,
    L1Lookups,
    Loads,
    Server,
    Serving,
    Stores,
    Upkeep,
    connects_status,
    departed_status,
    instance_status,
    l1_status,
    take_sample,
    totals_status,
)
from kvserver.telemetry import (
    BlockLifecycle,
    ChunkLifecycle,
    Explain,
    Family,
    ResidentAges,
    RpcCounts,
    WhatIfCurve,
    all_families,
    with_l2,
)
from kvserver.tiering import ConfiguredTier, make_storage, resync_of_l1

if TYPE_CHECKING:
    from kvserver.telemetry.otlp import OtlpMetrics
    from kvserver.telemetry.tracing import Traces

_NO_PLACEMENT = Placement()
_LAST_EVENTS_SECONDS = 2.0  # for the events that are queued when the daemon stops


class Observability:
    """REQUIRES: start() before close(), both once; or observers.close()."""

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

    def close(self, read: Callable[[], list[Family]]) -> None:
        """Handle and send what is queued, for a few seconds at most. `read` is called after the events were handled."""
        self.bus.flush(_LAST_EVENTS_SECONDS)
        last = read()
        self.bus.close(_LAST_EVENTS_SECONDS)
        self.observers.close()
        if self.sender is not None:
            self.sender.close(last)


class Parts:
    """The parts by name. All but `observability` belong to the thread of the server's loop."""

    def __init__(
        self,
        settings: Settings,
        cache: Cache,
        devices: Devices,
        lifelines: Lifelines,
        placement: Placement = _NO_PLACEMENT,
        clock: Callable[[], float] = time.monotonic,
        tiers: Sequence[ConfiguredTier] = (),
    ) -> None:
        """ConfigError if an exporter or observer of the settings cannot be made. `placement`: of L1. `tiers`: of L2."""
        self.settings = settings
        self.boot_id = secrets.token_hex(8)
        self.cache = cache
        self.devices = devices
        self.lifelines = lifelines
        self._placement = placement
        self._clock = clock
        self.observability = observability = Observability(
            settings, self.boot_id, cache.pool.pages, cache.pool.page_bytes
        )
        self.bus = bus = observability.bus
        self.instances = instances = Instances()
        self.serving = Serving(settings.serving)
        self.tickets: Tickets[Ticket] = Tickets(devices)
        copies = Copies(cache.pool, self.tickets, instances, bus, clock)
        self.storage = storage = make_storage(tiers, cache, bus, settings.lease_seconds, clock)
        lookups = L1Lookups(cache, devices, instances, settings.lease_seconds, storage, self.serving, bus, clock)
        self.stores = Stores(cache, copies, bus, storage, self.serving)
        loads = Loads(cache, copies, bus, storage)
        self.workers = Workers(
            settings, cache, devices, self.tickets, instances, lifelines, storage.instance_ended, bus, clock
        )
        self.upkeep = Upkeep(
            cache=cache,
            devices=devices,
            tickets=self.tickets,
            stores=self.stores,
            loads=loads,
            workers=self.workers,
            resync=resync_of_l1(cache.index, bus),
            storage=storage,
            bus=bus,
            clock=clock,
        )
        self.handlers = Handlers(
            HelloReply(
                protocol_version=PROTOCOL_VERSION,
                server_version=__version__,
                boot_id=self.boot_id,
                chunk_tokens=settings.chunk_tokens,
                boundary_interval=settings.boundary_interval,
                fd_path=lifelines.path,
                token=lifelines.token,
                traces=observability.traces is not None,
                kv_events=observability.needs_contents,
                lease_seconds=settings.lease_seconds,
                tails=settings.tails == "on",
                parents=bool(tiers),
            ),
            instances,
            self.workers,
            lookups,
            self.stores,
            loads,
            storage,
            EngineReports(cache, storage.ended, instances, bus, observability.block_lifecycle.unapplied, clock),
            self.upkeep,
            observability.feed,
            self.serving,
        )

    def make_server(self, endpoint: Endpoint, stops_when_lost: bool = False) -> Server:
        return Server(
            endpoint.router,
            self.handlers,
            self.upkeep,
            self.lifelines,
            self.bus,
            self.status,
            stops_when_lost,
            lambda: endpoint.keep_bound() or self.lifelines.keep_bound(),
        )

    def status(self, server: Server) -> DaemonStatus:
        """`/status`, but for what the pages know. From the loop's thread."""
        observability, now = self.observability, self._clock()
        totals = totals_status(self.instances, server.rpc)
        return DaemonStatus(
            version=__version__,
            boot_id=self.boot_id,
            uptime_seconds=round(now - server.started, 3),
            ready=not server.failure,
            protocol_version=PROTOCOL_VERSION,
            loop_lag_seconds=server.lag_seconds,
            loop_turns=server.turns.snapshot(),
            metrics_sample_rate=self.settings.metrics_sample_rate,
            l1=l1_status(self.cache, self._placement),
            what_if=with_l2(observability.what_if.status(), totals.prompt_tokens["l2"], totals.fill_seconds),
            l2=self.storage.status(),
            gpus=self.devices.status(),
            instances=self.instances_status(),
            connects=connects_status(self.instances),
            departed=[departed_status(departed, now) for departed in self.instances.departed.values()],
            totals=totals,
            events=self.bus.status(),
            kv_events=replace(observability.hub.status(), observers=observability.observers.status()),
            explain=observability.explain.status(),
            otlp=observability.sender.status() if observability.sender is not None else UNSET,
            traces=observability.traces.status() if observability.traces is not None else UNSET,
            recording=observability.recorder.status() if observability.recorder is not None else UNSET,
            books=AccountingStatus(
                tickets=self.tickets.open_tickets,
                pins=self.cache.space.pins,
                leases=self.cache.lease_count,
                mappings=self.workers.mappings,
                attachments=len(self.lifelines),
                free_pages=self.cache.pool.unused_pages,
                used_pages=self.cache.pool.used_pages,
                audits=self.upkeep.audits,
                unbalanced=self.upkeep.unbalanced,
            ),
            refused_registrations=dict(server.rpc.refused_registrations() + self.lifelines.refused),
            refused_engines=self.workers.refused_engines(),
            serving=self.serving.mode,
            not_ready=server.failure.strip(),
        )

    def sample(self, server: Server) -> array[float]:
        """From the loop's thread."""
        return take_sample(self.instances, self.cache, self.storage, self.bus, server.rpc)

    def instances_status(self) -> list[InstanceStatus]:
        now, l0 = self._clock(), self.observability.block_lifecycle
        return [
            instance_status(instance, self.devices, l0.status(instance.instance_id), now)
            for instance in self.instances.by_id.values()
        ]
