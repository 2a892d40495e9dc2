"""Hands the events of the loop to subscribers, in a thread of its own.

The loop publishes and goes on; the thread calls the subscribers, in order. Nothing waits: an event for which the queue
has no space is dropped and counted.

Owns: what is dropped, and the errors of subscribers. Refuses to know: the queue and the thread (`runner`).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from kvserver.events.runner import QUEUE_COST, Runner
from kvserver.events.types import (
    NAMES,
    ChunksEvicted,
    ChunksStored,
    Event,
    InstanceDescribed,
    InstanceDisconnected,
    InstanceRegistered,
    L1Cleared,
    L1Resynced,
    L2Cleared,
    L2Removed,
    L2Resynced,
    L2Stored,
    NamespaceFormed,
    WorkerDisconnected,
    WorkerRegistered,
)
from kvserver.protocol import WAIT_SECONDS, Histogram
from kvserver.protocol.status import EventsStatus, SubscriberStatus

log = logging.getLogger(__name__)


class Subscriber:
    """Handler of the events of its types, in the bus's thread. Its exceptions are counted and do not affect other subscribers."""

    name: str
    handles: frozenset[type[Event]] = frozenset(NAMES)  # all types

    def handle(self, event: Event) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Called once, after the last event; subscribers close in reverse order."""


_NEVER_DROPPED = {  # few, and later events mean nothing without them
    InstanceRegistered,
    InstanceDisconnected,
    InstanceDescribed,
    NamespaceFormed,
    WorkerRegistered,
    WorkerDisconnected,
}
_RESYNCED: dict[type[Event], type[Event]] = {  # without all of these what a tier has is not known: the resync for it
    **dict.fromkeys((ChunksStored, ChunksEvicted, L1Cleared, L1Resynced), L1Resynced),
    **dict.fromkeys((L2Stored, L2Removed, L2Cleared, L2Resynced), L2Resynced),
}


class Bus:
    """Queue from the loop to the subscribers. REQUIRES: one thread publishes; start() before close(), both once."""

    def __init__(
        self, subscribers: Sequence[Subscriber] = (), limit: int = QUEUE_COST, idle: Callable[[], None] = lambda: None
    ) -> None:
        """The thread calls `idle` once a second."""
        self.subscribers = tuple(subscribers)
        self._of_type = {kind: tuple(s for s in subscribers if kind in s.handles) for kind in NAMES}
        self.published = dict.fromkeys(NAMES.values(), 0)
        self.dropped = dict.fromkeys(NAMES.values(), 0)
        self.errors: Counter[str] = Counter()  # exceptions, by subscriber
        self.lag_seconds = 0.0  # from an event's time until the thread handled it: the longest of the last second
        self.needs_resync: set[type[Event]] = set()  # L1Resynced, L2Resynced: events were dropped; the resync resets it
        self._waits = Histogram(WAIT_SECONDS)  # from an event's time until the thread handled it, of every event
        self._lag = 0.0  # the longest since then
        self._last_errors: dict[str, str] = {}
        self._limit = limit
        self._call_idle = idle
        self._runner = Runner("events", self._handle, self._idle, limit=limit)

    def publish(self, event: Event, size: int = 0) -> bool:
        """Queue the event; False if the queue has no space for it. Never waits. `size`: bytes that the event carries."""
        if not self.subscribers:
            return True
        kind = type(event)
        name = NAMES[kind]
        if self._runner.put(event, size) or (kind in _NEVER_DROPPED and self._runner.put(event, size, always=True)):
            self.published[name] += 1
            return True
        self.dropped[name] += 1
        if kind in _RESYNCED:
            self.needs_resync.add(_RESYNCED[kind])
        return False

    def start(self) -> None:
        self._runner.start()

    @property
    def failure(self) -> str:
        """Reason why events are no longer handled; empty while they are."""
        reason = self._runner.reason
        return f"the event thread handles no more events: {reason}" if reason else ""

    def has_room(self, share: int) -> bool:
        """True if less than a `share`-th of the queue is used."""
        return self._runner.queued < max(1, self._limit // share)

    def flush(self, seconds: float = 5.0) -> bool:
        """Wait until all events published so far were handled. False if they were not within `seconds`."""
        return self._runner.flush(seconds)

    def status(self) -> EventsStatus:
        return EventsStatus(
            published=sum(self.published.values()),
            dropped=sum(self.dropped.values()),
            published_types=dict(self.published),
            dropped_types=dict(self.dropped),
            queue_depth=self._runner.queued,
            lag_seconds=round(self.lag_seconds, 6),
            waits=self._waits.snapshot(),
            subscribers=[
                SubscriberStatus(name=s.name, errors=self.errors[s.name], last_error=self._last_errors.get(s.name, ""))
                for s in self.subscribers
            ],
        )

    def close(self, seconds: float = 5.0) -> None:
        """Handle the queued events, for at most `seconds`, then close the subscribers in reverse order."""
        self._runner.finish()
        self._runner.join(time.monotonic() + seconds)
        for subscriber in reversed(self.subscribers):
            try:
                subscriber.close()
            except Exception as error:
                self._count_error(subscriber, error)

    # ---- the thread ---------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        waited = (time.monotonic_ns() - event.time_ns) * 1e-9
        self._waits.observe(waited)
        self._lag = max(self._lag, waited)
        for subscriber in self._of_type[type(event)]:
            try:
                subscriber.handle(event)
            except Exception as error:
                self._count_error(subscriber, error)

    def _idle(self) -> None:
        if self._lag:
            self.lag_seconds, self._lag = self._lag, 0.0
        self._call_idle()

    def _count_error(self, subscriber: Subscriber, error: Exception) -> None:
        self.errors[subscriber.name] += 1
        self._last_errors[subscriber.name] = f"{type(error).__name__}: {error}"[:500]
        if self.errors[subscriber.name] == 1:
            log.exception(
                "subscriber %s of events failed; its further errors are only counted (/status, events.subscribers)",
                subscriber.name,
            )
