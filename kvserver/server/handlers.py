"""What the server does for each request, and when a ticket ends.

Owns: one match arm per request and per kind of ticket. Refuses to know: frames, sockets, polling
(`loop`); what a copy (`stores`, `loads`) or a worker (`workers`) needs. Runs in the loop thread; nothing here
blocks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from kvserver import __version__
from kvserver._native import Outcome
from kvserver.cache import Cache
from kvserver.config import Placement, Settings
from kvserver.copy import Completion, Devices, Tickets
from kvserver.events import L1Cleared
from kvserver.protocol import (
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    Clear,
    Cleared,
    DescribeScheduler,
    EndRequest,
    EngineLoad,
    ErrorCode,
    Heartbeat,
    Hello,
    HelloReply,
    KVEventsTaken,
    KVServerError,
    Lookup,
    RegisterWorker,
    ReportBlockAllocations,
    Request,
    Retrieve,
    Store,
    TakeKVEvents,
    UnregisterWorker,
)
from kvserver.server.copies import Copies
from kvserver.server.instances import Disconnect, Instances
from kvserver.server.lifeline import Lifelines
from kvserver.server.loads import Loads
from kvserver.server.lookups import L1Lookups
from kvserver.server.observability import Observability
from kvserver.server.reports import EngineReports
from kvserver.server.resync import Resync
from kvserver.server.status import (
    accounting_status,
    connects_status,
    departed_status,
    instance_status,
    l1_status,
    totals_status,
)
from kvserver.server.stores import Stores
from kvserver.server.tickets import LoadTicket, MapTicket, Respond, StoreTicket, Ticket, UnmapTicket
from kvserver.server.workers import Workers

log = logging.getLogger(__name__)
_NO_PLACEMENT = Placement()


class Handlers:
    """The state of a server, and all that changes it."""

    def __init__(
        self,
        settings: Settings,
        boot_id: str,
        token: str,
        cache: Cache,
        devices: Devices,
        lifelines: Lifelines,
        observability: Observability,
        clock: Callable[[], float] = time.monotonic,
        placement: Placement = _NO_PLACEMENT,
    ) -> None:
        self.settings = settings
        self.boot_id = boot_id
        self.cache = cache
        self.tickets: Tickets[Ticket] = Tickets(devices)
        self.devices = devices
        self.instances = Instances()
        self.lifelines = lifelines
        self.observability = observability
        self.bus = observability.bus
        self.lookups = L1Lookups(cache, devices, self.instances, settings.lease_seconds, clock, self.bus)
        copies = Copies(cache.pool, self.tickets, self.instances, clock, self.bus)
        self.stores = Stores(cache, copies, self.bus)
        self.loads = Loads(cache, copies, self.bus)
        self.workers = Workers(settings, cache, self.tickets, self.instances, lifelines, clock, self.bus)
        self.resync = Resync(cache.index, self.bus, clock)
        self.reports = EngineReports(cache, self.instances, clock, self.bus, observability.block_lifecycle.unapplied)
        self._placement = placement  # of L1, for /status
        self._token = token
        self._clock = clock
        self._logged_loss = ""
        self._work_left = False  # the last step() left something to do

    # ---- requests -----------------------------------------------------------------------------

    def handle(self, request: Request, respond: Respond) -> None:
        """Answer now, or later from `complete_tickets()`; notices only on error. KVServerError is the caller's to send.

        All requests but Status, which needs the server's own state.
        """
        match request:
            case Lookup():
                respond(self.lookups.answer(request))
            case Store():
                self._check_boot(request.boot_id)
                self.stores.begin(request, respond)
            case Retrieve():
                self._check_boot(request.boot_id)
                self.loads.begin(request, respond)
            case ReportBlockAllocations():
                self.reports.add_block_report(request)
            case EndRequest():
                self.reports.end_request(request)
            case DescribeScheduler():
                self.reports.describe_scheduler(request)
            case EngineLoad():
                self.reports.add_engine_stats(request)
            case TakeKVEvents():
                respond(self._take_kv_events(request))
            case Heartbeat():
                self._check_boot(request.boot_id)
            case Hello():
                respond(self._hello(request))
            case RegisterWorker():
                self.workers.register(request, respond)
            case UnregisterWorker():
                self._check_boot(request.boot_id)
                self.workers.unregister(request, respond)
            case Clear():
                respond(self._clear(request))

    def _hello(self, request: Hello) -> HelloReply:
        if not OLDEST_PROTOCOL_VERSION <= request.protocol_version <= PROTOCOL_VERSION:
            raise KVServerError(
                ErrorCode.VERSION_MISMATCH,
                f"the client speaks protocol {request.protocol_version}, server {__version__} speaks "
                f"{OLDEST_PROTOCOL_VERSION} to {PROTOCOL_VERSION}",
            )
        standing, text = self.workers.registration_state(request.instance_id, request.incarnation)
        return HelloReply(
            protocol_version=request.protocol_version,
            server_version=__version__,
            boot_id=self.boot_id,
            chunk_tokens=self.settings.chunk_tokens,
            fd_path=self.lifelines.path,
            token=self._token,
            traces=self.observability.traces is not None,
            kv_events=self.observability.wants_contents,
            lease_seconds=self.settings.lease_seconds,
            standing=standing,
            standing_text=text,
        )

    def _take_kv_events(self, request: TakeKVEvents) -> KVEventsTaken:
        instance = self.instances.instance(request.instance_id, request.incarnation)
        if instance.description is None:
            raise KVServerError(
                ErrorCode.NOT_READY, f"instance {request.instance_id!r} was not described; send DescribeScheduler first"
            )
        return self.observability.feed.take_kv_events(request)

    def _clear(self, request: Clear) -> Cleared:
        if not request.instance_id:
            return Cleared(chunks=self.clear())
        instance = self.instances.by_id.get(request.instance_id)
        if instance is None:
            raise KVServerError(ErrorCode.UNKNOWN_INSTANCE, f"instance {request.instance_id!r} is not registered")
        if instance.namespace is None:
            return Cleared(chunks=0)
        return Cleared(chunks=self.clear(instance.namespace))

    def clear(self, base: bytes = b"") -> int:
        """Remove all chunks of the namespaces whose id begins with `base`; returns their number."""
        chunks = self.cache.clear_namespaces(base)
        self.bus.publish(L1Cleared(self._now_ns(), base, chunks))
        log.info("%d chunks cleared from L1", chunks)
        return chunks

    # ---- completions --------------------------------------------------------------------------

    def complete_tickets(self) -> None:
        """Complete every ticket whose copy or mapping has ended. Never raises: a fault in one ticket stops no other."""
        self._log_loss()
        for ticket, completion in self.tickets.drain_completions():
            try:
                self._complete(ticket, completion)
            except Exception:
                log.exception("internal error while completing a %s", type(ticket).__name__)

    def _log_loss(self) -> None:
        lost = self.devices.lost
        if lost and lost != self._logged_loss:
            log.critical("the device is lost: %s; no lookup hits from now on, restart this daemon", lost)
        self._logged_loss = lost

    def _complete(self, ticket: Ticket, completion: Completion) -> None:
        if isinstance(ticket, UnmapTicket):
            self.workers.unmapped(ticket, completion)
            return
        worker = ticket.worker
        worker.tickets.discard(completion.number)
        match ticket:
            case MapTicket():
                self.workers.mapped(ticket, completion)
            case StoreTicket():
                self.stores.ended(ticket, completion)
            case LoadTicket():
                self.loads.ended(ticket, completion)
        if completion.outcome == Outcome.MEMORY_LOST:
            log.warning("worker %s/%d: %s; dropped", worker.spec.instance_id, worker.spec.rank, completion.what)
            self.workers.close_worker(worker, Disconnect.DIED)
        self.workers.unmap_if_idle(worker)

    # ---- time ---------------------------------------------------------------------------------

    def tick(self) -> None:
        """Once a second or so: expire leases and departed instances, close silent connections, note what has been pinned."""
        self.devices.update_pinned_pages(self.cache.pool)
        self.lifelines.close_silent()
        self.instances.forget_departed(self._clock())
        self.cache.expire_leases(self._clock())

    def step(self) -> bool:
        """At the end of each turn: a slice of the work that was left. True while there is more to do at once."""
        more = self.cache.step() | self.resync.step()
        for worker in self.stores.step():
            self.workers.unmap_if_idle(worker)
        self._work_left = more or self.stores.waiting > 0
        return self._work_left

    def audit_if_idle(self) -> bool:
        """Assert the accounting when nothing is in flight and L1 is small enough to count; True if it was asserted.

        REQUIRES: step() was the last call.
        """
        if self._work_left or self.tickets.open_tickets or self.cache.index.chunk_count > _AUDIT_CHUNKS:
            return False
        self.cache.audit()
        assert self.cache.pins == 0, f"{self.cache.pins} pins without a ticket"
        expected = sum(len(w.mappings) for w in self.instances.by_registration.values())
        assert self.workers.mappings == expected, f"{self.workers.mappings} mappings are open, workers have {expected}"
        return True

    # ---- status -------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """The part of `/status` that this module knows."""
        now = self._clock()
        return {
            "l1": l1_status(self.cache, self._placement),
            "l2": [],
            "gpus": self.devices.status(),
            "instances": self.instances_status(),
            "connects": connects_status(self.instances),
            "departed": [departed_status(departed, now) for departed in self.instances.departed.values()],
            "totals": totals_status(self.instances),
            "events": self.bus.status(),
            **self.observability.status(),
            "books": accounting_status(self.cache, self.tickets, self.workers, len(self.lifelines)),
        }

    def instances_status(self) -> list[dict[str, Any]]:
        now = self._clock()
        return [
            instance_status(
                instance, self.devices, self.observability.block_lifecycle.status(instance.instance_id), now
            )
            for instance in self.instances.by_id.values()
        ]

    # ---- inside -------------------------------------------------------------------------------

    def _now_ns(self) -> int:
        return int(self._clock() * 1e9)

    def _check_boot(self, boot_id: str) -> None:
        if boot_id != self.boot_id:
            raise KVServerError(
                ErrorCode.STALE_BOOT, f"meant for boot {boot_id!r}, this is {self.boot_id!r}; register again"
            )


_AUDIT_CHUNKS = 4096  # counting more would hold up the loop
