"""Work of a loop's turn beside requests: it completes tickets, continues deferred work, keeps time, audits.

Owns: the order of that work. Refuses to know: requests (`handlers`), the poll (`loop`). Runs in the loop's thread; nothing here
blocks, but drain().
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from kvserver._native import Outcome
from kvserver.cache import Cache
from kvserver.copy import Completion, Devices, Tickets
from kvserver.engines import (
    Disconnect,
    Lifeline,
    LoadTicket,
    MapTicket,
    StoreTicket,
    Ticket,
    UnmapTicket,
    Workers,
    log_fields,
)
from kvserver.events import Bus, L1Cleared
from kvserver.restart import KeptL1
from kvserver.server.loads import Loads
from kvserver.server.store_waits import StoreWaits
from kvserver.server.stores import Stores
from kvserver.tiering import Prefetches, Resync, Storage

log = logging.getLogger(__name__)

_QUIET_SECONDS = 0.25  # without a message, before the accounting is audited
_AUDIT_CHUNKS = 4096  # counting more would hold up the loop
_MAY_RETURN = ("opening", "unavailable")  # a tier in these states may have more than it shows


class Audit(Enum):
    BALANCED = "balanced"
    UNBALANCED = "unbalanced"
    NOT_COUNTED = "not counted"  # copies or other work are under way, or L1 holds more than _AUDIT_CHUNKS


@dataclass(kw_only=True)
class Upkeep:
    cache: Cache
    devices: Devices
    tickets: Tickets[Ticket]
    stores: Stores
    loads: Loads
    workers: Workers
    resync: Resync
    storage: Storage
    prefetches: Prefetches
    store_waits: StoreWaits
    kept_l1: KeptL1
    bus: Bus
    clock: Callable[[], float] = time.monotonic
    audit_seconds: float = 10.0  # at least between two audits while messages come
    audits: int = 0  # of the accounting
    unbalanced: int = 0  # audits that failed
    _logged_loss: str = ""
    _looks_for_losses: bool = False  # the next step() does, in which storage.present() gets its view of the tiers
    _work_left: bool = False  # the last step() left something to do
    _audited: bool = False  # since the last message
    _audit_after: float = 0.0

    @property
    def lost_device(self) -> str:
        """Reason why nothing can be copied any more; empty while it can."""
        return self.devices.lost

    @property
    def lost_tier(self) -> str:
        """Reason why a required tier of L2 cannot be used; empty while all can."""
        return self.storage.failure

    # ---- completions --------------------------------------------------------------------------

    @property
    def completion_fds(self) -> list[int]:
        """Readable when tickets have completed."""
        return [*self.tickets.completion_fds, *self.storage.completion_fds, *self.kept_l1.completion_fds]

    def complete_tickets(self) -> None:
        """Complete every ticket whose copy or mapping has ended. Never raises: a fault in one ticket stops no other."""
        self._log_loss()
        for ticket, completion in self.tickets.drain_completions():
            try:
                self._complete(ticket, completion)
            except Exception:
                log.exception("internal error while completing a %s", type(ticket).__name__)
        for ticket, slots in self.tickets.drain_parts():
            try:
                assert isinstance(ticket, StoreTicket)
                self.stores.copied(ticket, slots)
            except Exception:
                log.exception("internal error while publishing a part of a store")
        self.storage.complete()

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
            log.warning(
                "worker %s/%d: %s; dropped", worker.spec.instance_id, worker.spec.rank, completion.what,
                extra=log_fields(worker.spec),
            )  # fmt: skip
            self.workers.close_worker(worker, Disconnect.DIED)
        self.workers.unmap_if_idle(worker)

    def lifeline_ended(self, lifeline: Lifeline) -> None:
        """End the lifeline's worker: its process died, or closed the connection."""
        self.workers.lifeline_ended(lifeline)

    # ---- time ---------------------------------------------------------------------------------

    def tick(self) -> None:
        """Once a second or so: expire leases and departed instances, close silent connections, note what has been pinned."""
        self.devices.update_pinned_pages(self.cache.pool)
        self.storage.tick()
        self.prefetches.tick()
        self.kept_l1.tick()
        self.workers.tick()
        self.cache.expire_leases(self.clock())
        self._looks_for_losses = not self.kept_l1.adopting

    def _hides_objects(self) -> bool:
        return any(tier.state in _MAY_RETURN for tier in self.storage.tiers.local)

    def seconds_left(self) -> float:
        """Seconds until something is due that no message and no completion announces."""
        due = [due_ns for part in (self.storage, self.store_waits) if (due_ns := part.next_due_ns) is not None]
        return max(0.0, min(due) * 1e-9 - self.clock()) if due else 3600.0

    def step(self) -> bool:
        """Do a slice of deferred work at the end of a turn. True while there is more to do at once."""
        self.store_waits.step()
        looks, self._looks_for_losses = self._looks_for_losses and not self._hides_objects(), False
        more = self.cache.step() | self.resync.step() | self.storage.step() | self.kept_l1.step()
        if looks and not self._hides_objects():
            self.cache.protections.forget_lost(self.storage.present)
        for worker in self.stores.step():
            self.workers.unmap_if_idle(worker)
        self._work_left = more or self.stores.waiting > 0
        return self._work_left

    def clear(self, base: bytes, done: Callable[[int, str], None]) -> None:
        """Remove all chunks of the namespaces whose id begins with `base` from L1 and L2.

        Nothing of them is found from now on. `done` is called with their number in L1, and with what failed or "", once none
        can come back from L2, after a power loss either.
        """
        chunks = self.cache.clear_namespaces(base)
        self.kept_l1.clear(base)
        self.prefetches.clear(base)
        log.info("%d chunks cleared from L1", chunks)
        self.storage.clear(base, lambda failure: done(chunks, failure))
        # Behind L2's events: what both tiers have shares a description.
        self.bus.publish(L1Cleared(int(self.clock() * 1e9), base))

    # ---- accounting ---------------------------------------------------------------------------

    def audit_if_quiet(self, waited_seconds: float, idle: bool) -> None:
        """Audit once after each activity, and now and then beside engines that send something every second."""
        self._audited = self._audited and idle
        if self._audited or waited_seconds < _QUIET_SECONDS or not (idle or time.monotonic() >= self._audit_after):
            return
        self._audited = True  # also if it fails: not again in each idle turn
        self._audited = self._audit() is not Audit.NOT_COUNTED

    def audit_now(self) -> Audit:
        """Audit without the wait for quiet. From the loop's thread, at any time."""
        self.step()
        return self._audit()

    def _audit(self) -> Audit:
        outcome = Audit.BALANCED
        try:
            if not self.audit_if_idle():
                return Audit.NOT_COUNTED
        except AssertionError as error:  # a bug of ours, but no reason to end engines' cache
            outcome = Audit.UNBALANCED
            self.unbalanced += 1
            log.critical("the daemon's accounting does not balance, which is a bug: %s", error)
        self.audits += 1
        self._audit_after = time.monotonic() + self.audit_seconds
        return outcome

    def audit_if_idle(self) -> bool:
        """Assert the accounting when nothing is in flight and L1 is small enough to count; True if it was asserted.

        REQUIRES: step() was the last call.
        """
        if (
            self._work_left
            or self.tickets.open_tickets
            or not self.storage.is_idle
            or self.cache.index.count > _AUDIT_CHUNKS
        ):
            return False
        self.cache.audit()
        assert self.cache.space.pins == 0, f"{self.cache.space.pins} pins without a ticket"
        self.storage.audit()
        self.workers.audit()
        return True

    # ---- the end ------------------------------------------------------------------------------

    def drain(self, deadline_seconds: float) -> bool:
        """End every copy before memory goes away: cancelled ones stop at their next block. False if some did not.

        What is left of the time is for the objects that wait for an open tier of L2.
        """
        deadline = time.monotonic() + deadline_seconds
        self.workers.close_all(Disconnect.STOPPED)
        self.storage.end_fills()
        while (self.tickets.open_tickets or self.stores.waiting) and time.monotonic() < deadline:
            self.complete_tickets()
            self.step()
            time.sleep(0.001)
        if left := self.storage.drain(deadline):
            log.warning("%d objects were not written to L2 within %.0f s", left, deadline_seconds)
        self.storage.close(deadline)
        if self.tickets.open_tickets:
            log.error("%d copies did not end within %.0f s", self.tickets.open_tickets, deadline_seconds)
        return self.tickets.open_tickets == 0
