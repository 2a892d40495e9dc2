"""Runs the observers of KV events, each in its own thread.

Owns: making the observers, their queues, and cutting off an observer that raises, stalls or does not keep up. Refuses to
know: what observers do with events. An observer's methods are called in its thread only, so none can delay the daemon.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

from kvserver.kv_events.types import (
    GROUP,
    KVEvent,
    KVEventObserver,
    KVRemoved,
    KVStored,
    MakeObserver,
    ObserverContext,
)
from kvserver.protocol import ConfigError
from kvserver.telemetry import Family, Kind

log = logging.getLogger(__name__)

QUEUE_COST = 1 << 16  # queued events of one observer; descriptions cost one more per _COST_BYTES
STALL_SECONDS = 5.0  # most for one call
_COST_BYTES = 4096
_NAP_SECONDS = 0.01  # lets events gather, so that hand_over() rarely has to wake the thread
_STATUS_SECONDS = 1.0
_MOST_A_LOOK = 1.0  # seconds that one look may count as busy: a daemon that was stopped cuts off no observer
_CLOSE_SECONDS = 2.0  # to handle queued events; the same again for close()


class Observers:
    """REQUIRES: start() at most once, close() once."""

    def __init__(
        self,
        context: ObserverContext,
        own: Mapping[str, MakeObserver],
        limit: int = QUEUE_COST,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        """`own`: the daemon's observers by name. ConfigError if the settings name an observer that is not installed."""
        self._bounds = limit, stall_seconds
        self._runners: list[_Runner] = []
        self._failed: dict[str, str] = {}  # why an observer could not be made, by name
        self.foreign = False  # True if any observer is not the daemon's own
        try:
            for name, make in own.items():
                self._add(name, make(context))
            self._load(context, own)
        except BaseException:
            self.close()
            raise

    def hand_over(self, event: KVEvent) -> None:
        """Queue the event for every observer. Never waits."""
        size = 0
        if isinstance(event, KVStored | KVRemoved):
            size = sum(chunk.description.size for chunk in event.chunks if chunk.description is not None)
        for runner in self._runners:
            runner.offer(event, 1 + size // _COST_BYTES)

    def observer_named(self, name: str) -> KVEventObserver | None:
        return next((runner.observer for runner in self._runners if runner.name == name), None)

    def cut_off_reason(self, name: str) -> str:
        """Why the observer receives no more events; "" if it receives them."""
        return next((runner.reason for runner in self._runners if runner.name == name), "")

    def status(self) -> list[dict[str, Any]]:
        failed = [{"name": name, "state": "failed", "reason": why} for name, why in self._failed.items()]
        return [runner.status() for runner in self._runners] + failed

    def families(self) -> list[Family]:
        up = Family(
            "kvserver_kv_event_observer_up",
            "1 while an observer receives KV events, 0 after it was cut off or could not be made.",
            Kind.GAUGE,
            ("observer",),
        )
        for runner in self._runners:
            up.add(int(not runner.reason), runner.name)
        for name in self._failed:
            up.add(0, name)
        return [up]

    def start(self) -> None:
        for runner in self._runners:
            runner.start()

    def close(self) -> None:
        """Let observers handle their queued events, then close them. Takes a few seconds at most, however they behave."""
        for runner in self._runners:
            runner.finish()
        deadline = time.monotonic() + _CLOSE_SECONDS
        late = [runner for runner in self._runners if not runner.join(deadline)]
        for runner in late:
            runner.cut_off(f"it had not handled all events within {_CLOSE_SECONDS:g} s at the daemon's end")
        for runner in late:
            runner.join(deadline + _CLOSE_SECONDS)

    # ---- making -------------------------------------------------------------------------------

    def _add(self, name: str, observer: KVEventObserver | None) -> None:
        if observer is not None:
            self._runners.append(_Runner(name, observer, *self._bounds))

    def _load(self, context: ObserverContext, taken: Collection[str]) -> None:
        wanted = [name.strip() for name in context.settings.kv_event_observers.split(",")]
        if wanted == ["none"]:
            return
        found = {entry.name: entry for entry in importlib.metadata.entry_points(group=GROUP)}
        own = len(self._runners)
        for name in sorted(found) if wanted == ["all"] else wanted:
            if name not in found:
                raise ConfigError(
                    f"--kv-event-observers {context.settings.kv_event_observers}: no observer {name!r} is installed "
                    f"(entry points {GROUP}); there are {', '.join(sorted(found)) or 'none'}"
                )
            if name in taken:
                self._failed[name] = "the daemon's own observer has that name"
                continue
            try:
                self._add(name, found[name].load()(context))
            except Exception as error:
                log.exception("the KV events observer %s could not be made and is left out", name)
                self._failed[name] = f"{type(error).__name__}: {error}"[:500]
        self.foreign = len(self._runners) > own


class _Runner:
    """One observer, its queue and its thread."""

    def __init__(self, name: str, observer: KVEventObserver, limit: int, stall_seconds: float) -> None:
        self.name = name
        self.observer = observer
        self.reason = ""  # why it was cut off
        self._limit = limit
        self._stall_seconds = stall_seconds
        self._lock = threading.Lock()  # of the queue, and of the record of the running call
        self._filled = threading.Event()
        self._queue: deque[tuple[KVEvent, int]] = deque()
        self._depth = 0
        self._finishing = False
        self._handled = 0
        self._shown: dict[str, Any] = {}  # its last status()
        self._shown_at = 0.0
        self._calls = 0
        self._busy = False
        self._looked_at = (0, 0.0, 0.0)  # call, time of the look, seconds that the call had run
        self._thread = threading.Thread(target=self._run, name=f"kv events: {name}", daemon=True)

    # ---- from any thread ------------------------------------------------------------------------

    def offer(self, event: KVEvent, cost: int) -> None:
        self._look()
        with self._lock:
            if self.reason:
                return
            overflows = self._depth + cost > self._limit
            if not overflows:
                self._queue.append((event, cost))
                self._depth += cost
        if overflows:
            self.cut_off("it did not keep up: its queue was full")
        self._filled.set()

    def cut_off(self, reason: str) -> None:
        with self._lock:
            first = not self.reason
            self.reason = self.reason or reason
            self._queue.clear()
            self._depth = 0
        if first:
            log.error("the KV events observer %s is cut off: %s", self.name, reason)

    def status(self) -> dict[str, Any]:
        self._look()
        return {
            **self._shown,
            "name": self.name,
            "state": "cut off" if self.reason else "running",
            "reason": self.reason,
            "handled": self._handled,
            "queue_depth": self._depth,
        }

    def start(self) -> None:
        self._thread.start()

    def finish(self) -> None:
        """End the thread after the queued events, and close the observer."""
        self._finishing = True
        self._filled.set()
        if self._thread.ident is None:
            self._close()

    def join(self, deadline: float) -> bool:
        """True if the thread ended before `deadline`."""
        if self._thread.ident is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _look(self) -> None:
        """Cut the observer off if one call takes too long."""
        with self._lock:
            call, now = self._calls if self._busy else 0, time.monotonic()
            before, when, busy = self._looked_at
            busy = busy + min(now - when, _MOST_A_LOOK) if call and call == before else 0.0
            self._looked_at = (call, now, busy)
        if busy > self._stall_seconds:
            self.cut_off(f"it stalled: one call took more than {self._stall_seconds:g} s")

    # ---- in its thread -------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._finishing or self._queue:
            self._filled.wait(_STATUS_SECONDS)
            if not self._finishing:
                time.sleep(_NAP_SECONDS)
            self._filled.clear()
            while (event := self._pop()) is not None:
                self._call(self.observer.observe, event)
                self._handled += 1
            if time.monotonic() - self._shown_at >= _STATUS_SECONDS and not self.reason:
                self._call(self._show)
        self._close()

    def _pop(self) -> KVEvent | None:
        with self._lock:
            if not self._queue:
                return None
            event, cost = self._queue.popleft()
            self._depth -= cost
            return event

    def _call(self, function: Callable[..., None], *args: Any) -> None:
        with self._lock:
            self._calls += 1
            self._busy = True
        try:
            function(*args)
        except BaseException as error:
            self.cut_off(f"it raised {type(error).__name__}: {error}"[:500])
            log.debug("error of the KV events observer %s", self.name, exc_info=True)
        self._busy = False

    def _show(self) -> None:
        if (status := getattr(self.observer, "status", None)) is not None:
            self._shown = json.loads(json.dumps(dict(status()), allow_nan=False))
        self._shown_at = time.monotonic()

    def _close(self) -> None:
        if (close := getattr(self.observer, "close", None)) is not None:
            try:
                close()
            except BaseException:
                log.exception("closing the KV events observer %s failed", self.name)
