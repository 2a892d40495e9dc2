"""Hands the events of the loop to subscribers, in a thread of its own.

The loop publishes and goes on; the thread calls the subscribers, in order. Nothing waits: an event for which the queue
has no space is dropped and counted.

Owns: the queue and the thread.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

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
    NamespaceFormed,
    WorkerDisconnected,
    WorkerRegistered,
)
from kvserver.protocol import WAIT_SECONDS, Histogram

log = logging.getLogger(__name__)

QUEUE_COST = 1 << 16  # outstanding events; one that carries bytes counts once more per _COST_BYTES
_COST_BYTES = 4096
_NAP_SECONDS = 0.01  # the thread lets events gather, so that the loop rarely pays for waking it


class Subscriber(Protocol):
    """Runs in the bus's thread. An exception of one is counted and harms no other."""

    name: str

    def handle(self, event: Event) -> None: ...

    def close(self) -> None:
        """Called once, after the last event; subscribers close in reverse order."""
        ...


_NEVER_DROPPED = (  # few, and later events mean nothing without them
    InstanceRegistered,
    InstanceDisconnected,
    InstanceDescribed,
    NamespaceFormed,
    WorkerRegistered,
    WorkerDisconnected,
)
_OF_CHUNKS = (ChunksStored, ChunksEvicted, L1Cleared, L1Resynced)  # without all of these, what L1 has is not known


class Bus:
    """REQUIRES: one thread publishes; start() before close(), both once."""

    def __init__(self, subscribers: Sequence[Subscriber] = (), limit: int = QUEUE_COST) -> None:
        self.subscribers = tuple(subscribers)
        self.published = dict.fromkeys(NAMES.values(), 0)
        self.dropped = dict.fromkeys(NAMES.values(), 0)
        self.errors: Counter[str] = Counter()  # exceptions, by subscriber
        self.lag_seconds = 0.0  # from an event's time until the thread handled it: the longest of the last round
        self._waits = Histogram(WAIT_SECONDS)  # the same, of every event
        self.lost_chunks = False  # events about chunks were dropped; the resync resets it
        self._limit = limit
        self._queue: queue.SimpleQueue[tuple[Event, int] | None] = queue.SimpleQueue()
        self._cost_in = 0  # written by the publisher only
        self._cost_out = 0  # by the thread only; the difference is what is queued
        self._last_errors: dict[str, str] = {}
        self._failure = ""
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)

    # ---- the publisher's ----------------------------------------------------------------------

    def publish(self, event: Event, size: int = 0) -> bool:
        """Queue the event; False if the queue has no space for it. Never waits. `size`: bytes that the event carries."""
        if not self.subscribers:
            return True
        name = NAMES[type(event)]
        cost = 1 + size // _COST_BYTES
        if self._cost_in - self._cost_out + cost > self._limit and not isinstance(event, _NEVER_DROPPED):
            self.dropped[name] += 1
            self.lost_chunks |= isinstance(event, _OF_CHUNKS)
            return False
        self._cost_in += cost
        self.published[name] += 1
        self._queue.put((event, cost))
        return True

    @property
    def half_empty(self) -> bool:
        return self._cost_in - self._cost_out < self._limit // 2

    # ---- from any thread ----------------------------------------------------------------------

    @property
    def failure(self) -> str:
        """Why events are no longer handled; empty while they are."""
        if self._failure or not self._thread.ident or self._thread.is_alive():
            return self._failure
        return "the event thread has ended"

    def flush(self, seconds: float = 5.0) -> bool:
        """Wait until all events published so far were handled. False if they were not within `seconds`."""
        target, deadline = self._cost_in, time.monotonic() + seconds
        while self._cost_out < target:
            if time.monotonic() > deadline or self.failure:
                return False
            time.sleep(0.001)
        return True

    def status(self) -> dict[str, Any]:
        return {
            "published": sum(self.published.values()),
            "dropped": sum(self.dropped.values()),
            "published_types": dict(self.published),
            "dropped_types": dict(self.dropped),
            "queue_depth": self._cost_in - self._cost_out,
            "lag_seconds": round(self.lag_seconds, 6),
            "waits": self._waits.status(),
            "subscribers": [
                {"name": s.name, "errors": self.errors[s.name], "last_error": self._last_errors.get(s.name, "")}
                for s in self.subscribers
            ],
        }

    # ---- start and end ------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def close(self, seconds: float = 5.0) -> None:
        """Handle the queued events, for at most `seconds`, then close the subscribers in reverse order."""
        self._queue.put(None)
        self._thread.join(seconds)
        for subscriber in reversed(self.subscribers):
            self._guarded(subscriber, subscriber.close)

    def _run(self) -> None:
        try:
            while self._drain():
                time.sleep(_NAP_SECONDS)
        except BaseException as error:
            self._failure = f"the event thread has ended: {type(error).__name__}: {error}"
            log.critical("%s", self._failure, exc_info=True)

    def _drain(self) -> bool:
        """Wait for an event, then handle all that are queued. False at the end."""
        item = self._queue.get()
        lag = 0.0
        while item is not None:
            event, cost = item
            waited = (time.monotonic_ns() - event.time_ns) * 1e-9
            self._waits.observe(waited)
            lag = max(lag, waited)
            for subscriber in self.subscribers:
                self._guarded(subscriber, subscriber.handle, event)
            self._cost_out += cost
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                self.lag_seconds = lag
                return True
        return False

    def _guarded(self, subscriber: Subscriber, function: Callable[..., None], *args: Any) -> None:
        try:
            function(*args)
        except Exception as error:
            self.errors[subscriber.name] += 1
            self._last_errors[subscriber.name] = f"{type(error).__name__}: {error}"[:500]
            if self.errors[subscriber.name] == 1:
                log.exception(
                    "subscriber %s of events failed; its further errors are only counted (/status, events.subscribers)",
                    subscriber.name,
                )
