"""Runs the observers of KV events: each in a thread of its own, or directly if it is the daemon's and never waits.

Owns: making the observers, and cutting off an observer that raises, stalls or does not keep up. Refuses to know: what
observers do with events, and their queues and threads (`events.runner`).
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import time
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from kvserver.events import QUEUE_COST, Runner
from kvserver.kv_events.types import (
    GROUP,
    KVEvent,
    KVEventObserver,
    KVRemoved,
    KVStored,
    ObserverContext,
)
from kvserver.protocol import ConfigError

log = logging.getLogger(__name__)

STALL_SECONDS = 5.0  # most for one call
_STATUS_SECONDS = 1.0
_MOST_A_LOOK = 1.0  # seconds that one look may count as busy: a daemon that was stopped cuts off no observer
_CLOSE_SECONDS = 2.0  # to handle queued events; the same again for close()


class Observers:
    """REQUIRES: start() at most once, close() once; one thread calls hand_over() and tick()."""

    def __init__(
        self,
        context: ObserverContext,
        own: Mapping[str, KVEventObserver | None],
        direct: Mapping[str, KVEventObserver],
        limit: int = QUEUE_COST,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        """`own`: the daemon's observers by name. `direct`: those that change memory only, for a bounded number of chunks an
        event, so that hand_over() can call them. ConfigError if the settings name an observer that is not installed.
        """
        self._limit, self._stall_seconds = limit, stall_seconds
        self._observed: list[_Observed] = []
        self._failed: dict[str, str] = {}  # why an observer could not be made, by name
        self.foreign = False  # True if any observer is not the daemon's own
        try:
            for name, observer in own.items():
                self._add(name, observer)
            self._observed += [_Direct(name, observer, limit) for name, observer in direct.items()]
            self._load(context, {*own, *direct})
        except BaseException:
            self.close()
            raise

    def hand_over(self, event: KVEvent) -> None:
        """Queue the event for every observer. Never waits."""
        size = 0
        if isinstance(event, KVStored | KVRemoved):
            size = sum(chunk.description.size for chunk in event.chunks if chunk.description is not None)
        for each in self._observed:
            if not each.put(event, size):
                each.cut_off("it did not keep up: its queue was full")

    def tick(self) -> None:
        """Look for observers that stall. REQUIRES: called once a second. Never waits."""
        for each in self._observed:
            each.tick(self._stall_seconds)

    def cut_off_reason(self, name: str) -> str:
        """Why the observer receives no more events; "" if it receives them."""
        return next((each.reason for each in self._observed if each.name == name), "")

    def status(self) -> list[dict[str, Any]]:
        failed = [{"name": name, "state": "failed", "reason": why} for name, why in self._failed.items()]
        return [each.status() for each in self._observed] + failed

    def start(self) -> None:
        for each in self._observed:
            each.start()

    def close(self) -> None:
        """Let observers handle their queued events, then close them. Takes a few seconds at most, however they behave."""
        for each in self._observed:
            each.finish()
        deadline = time.monotonic() + _CLOSE_SECONDS
        late = [each for each in self._observed if not each.join(deadline)]
        for each in late:
            each.cut_off(f"it had not handled all events within {_CLOSE_SECONDS:g} s at the daemon's end")
        for each in late:
            each.join(deadline + _CLOSE_SECONDS)

    # ---- making -------------------------------------------------------------------------------

    def _add(self, name: str, observer: KVEventObserver | None) -> None:
        if observer is not None:
            self._observed.append(_Observed(name, observer, self._limit))

    def _load(self, context: ObserverContext, taken: Collection[str]) -> None:
        wanted = [name.strip() for name in context.settings.kv_event_observers.split(",")]
        if wanted == ["none"]:
            return
        found = {entry.name: entry for entry in importlib.metadata.entry_points(group=GROUP)}
        own = len(self._observed)
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
        self.foreign = len(self._observed) > own


class _Observed(Runner[KVEvent]):
    """One observer, its last status, and how long its running call takes."""

    def __init__(self, name: str, observer: KVEventObserver, limit: int) -> None:
        super().__init__(f"kv events: {name}", limit)
        self.name = name
        self._observer = observer
        self._handled = 0
        self._shown: dict[str, Any] = {}  # its last status()
        self._shown_at = 0.0
        self._edges = 0  # begins and ends of calls: odd while one runs
        self._looked_at = (0, 0.0, 0.0)  # edges, time of the look, seconds that the call had run

    def tick(self, stall_seconds: float) -> None:
        """Cut the observer off if one call takes too long."""
        edges, now = self._edges, time.monotonic()
        before, when, busy = self._looked_at
        busy = busy + min(now - when, _MOST_A_LOOK) if edges % 2 and edges == before else 0.0
        self._looked_at = (edges, now, busy)
        if busy > stall_seconds:
            self.cut_off(f"it stalled: one call took more than {stall_seconds:g} s")

    def status(self) -> dict[str, Any]:
        return {
            **self._shown,
            "name": self.name,
            "state": "cut off" if self.reason else "running",
            "reason": self.reason,
            "handled": self._handled,
            "queue_depth": self.queued,
        }

    # ---- in its thread -------------------------------------------------------------------------

    def _handle(self, event: KVEvent) -> None:
        self._edges += 1
        self._observer.observe(event)
        self._edges += 1
        self._handled += 1

    def _idle(self) -> None:
        if time.monotonic() - self._shown_at < _STATUS_SECONDS:
            return
        self._edges += 1
        if (status := getattr(self._observer, "status", None)) is not None:
            self._shown = json.loads(json.dumps(dict(msgspec.to_builtins(status(), enc_hook=dict)), allow_nan=False))
        self._edges += 1
        self._shown_at = time.monotonic()

    def _end(self) -> None:
        if (close := getattr(self._observer, "close", None)) is not None:
            try:
                close()
            except BaseException:
                log.exception("closing the KV events observer %s failed", self.name)


class _Direct(_Observed):
    """An observer without a thread, called by the one that hands over."""

    def put(self, event: KVEvent, size: int = 0, always: bool = False) -> bool:
        if not self.reason:
            self._guarded(self._handle, event)
        return not self.reason

    def tick(self, stall_seconds: float) -> None:
        if not self.reason:
            self._guarded(self._idle)

    def start(self) -> None:
        pass
