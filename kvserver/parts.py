"""Parts of one daemon's loop, made and connected.

Owns: which part gets which other. Refuses to know: what a part does, what it shows (`snapshots`), sockets, the process
(`daemon`).
"""

from __future__ import annotations

import secrets
import time
from array import array
from collections.abc import Callable, Sequence

from kvserver import __version__
from kvserver.cache import Cache
from kvserver.config import Placement, Settings
from kvserver.copy import Devices, Tickets
from kvserver.engines import EngineReports, Instances, Lifelines, Ticket, Workers
from kvserver.observability import Observability
from kvserver.protocol import PROTOCOL_VERSION, HelloReply
from kvserver.protocol.status import DaemonStatus
from kvserver.restart import KeptL1, NoKeptL1
from kvserver.server import (
    Copies,
    Endpoint,
    Handlers,
    L1Lookups,
    Loads,
    Server,
    Serving,
    Stores,
    StoreWaits,
    Upkeep,
    take_sample,
)
from kvserver.tiering import ConfiguredTier, Prefetches, make_storage, resync_of_l1

_NO_PLACEMENT, _NOT_KEPT = Placement(), NoKeptL1()


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
        kept_l1: KeptL1 = _NOT_KEPT,
    ) -> None:
        """ConfigError if an exporter or observer of the settings cannot be made. `placement`: of L1. `tiers`: of L2."""
        self.settings = settings
        self.boot_id = secrets.token_hex(8)
        self.cache = cache
        self.devices = devices
        self.lifelines = lifelines
        self.placement = placement
        self.kept_l1 = kept_l1
        self.clock = clock
        self.observability = observability = Observability(
            settings, self.boot_id, cache.pool.pages, cache.pool.page_bytes
        )
        self.bus = bus = observability.bus
        self.instances = instances = Instances()
        cache.protections.fraction = settings.pin_share
        self.serving = Serving(settings.serving)
        self.tickets: Tickets[Ticket] = Tickets(devices)
        copies = Copies(cache.pool, self.tickets, instances, bus, clock)
        self.storage = storage = make_storage(tiers, cache, bus, settings.lease_seconds, clock)
        store_waits = StoreWaits(cache, instances, clock)
        lookups = L1Lookups(
            cache, devices, instances, settings.lease_seconds, storage, self.serving, bus, store_waits, clock
        )
        self.stores = Stores(cache, copies, bus, storage, self.serving)
        loads = Loads(cache, copies, bus, storage, self.serving)
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
            prefetches=Prefetches(cache, storage, instances, clock),
            store_waits=store_waits,
            kept_l1=kept_l1,
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
            store_waits,
            EngineReports(cache, instances, bus, observability.block_lifecycle.unapplied, clock),
            self.upkeep,
            observability.feed,
            self.serving,
        )

    def make_server(
        self, endpoint: Endpoint, make_status: Callable[[Server], DaemonStatus], stops_when_lost: bool = False
    ) -> Server:
        return Server(
            endpoint.router,
            self.handlers,
            self.upkeep,
            self.lifelines,
            self.bus,
            make_status,
            stops_when_lost,
            lambda: endpoint.keep_bound() or self.lifelines.keep_bound(),
        )

    def sample(self, server: Server) -> array[float]:
        """Sample for the page's charts, from the loop's thread."""
        return take_sample(self.instances, self.cache, self.storage, self.bus, server.rpc)
