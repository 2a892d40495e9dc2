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
    DirectEvent,
    DirectObserver,
    KeysCleared,
    KeysRemoved,
    KeysStored,
    KVEventObserver,
    KVRemoved,
    KVStored,
    ObserverContext,
)
from kvserver.protocol import ConfigError

log = logging.getLogger(__name__)

STALL_SECONDS = 5.0  # most for one call
CLOSE_SECONDS = 2.0  # to handle queued events; the same again for close()


class Observers:
    """Observers of KV events. REQUIRES: start() at most once, close() once; no two calls of hand_over() at once; one thread calls tick()."""

    def __init__(
        self,
        context: ObserverContext,
        own: Mapping[str, KVEventObserver | None],
        direct: Mapping[str, DirectObserver],
        limit: int = QUEUE_COST,
        stall_seconds: float = STALL_SECONDS,
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        """`own`: the daemon's observers by name. `direct`: those that change memory only, for a bounded number of chunks an
        event or without the GIL, so that hand_over() can call them. ConfigError if the settings name an observer that is
        not installed.
        """
        self._limit, self._stall_seconds, self._close_seconds = limit, stall_seconds, close_seconds
        self._direct = [_Direct(name, observer) for name, observer in direct.items()]
        self._threaded: list[_Threaded] = []
        self._failed: dict[str, str] = {}  # why an observer could not be made, by name
        self.foreign = False  # True if any observer is not the daemon's own
        try:
            for name, observer in own.items():
                self._add(name, observer)
            self._load(context, {*own, *direct})
        except BaseException:
            self.close()
            raise

    def hand_over(self, event: DirectEvent) -> None:
        """Hand the event to every observer, keys alone only to direct observers. Never waits."""
        for direct in self._direct:
            direct.observe(event)
        if isinstance(event, KeysStored | KeysRemoved | KeysCleared):
            return
        size = 0
        if isinstance(event, KVStored | KVRemoved):
            size = sum(chunk.description.size for chunk in event.chunks)
        for threaded in self._threaded:
            if not threaded.runner.put(event, size):
                threaded.runner.cut_off("it did not keep up: its queue was full")

    def tick(self) -> None:
        """Look for observers that stall. REQUIRES: called once a second. Never waits."""
        for direct in self._direct:
            direct.tick()
        for threaded in self._threaded:
            if threaded.runner.busy_seconds() > self._stall_seconds:
                threaded.runner.cut_off(f"it stalled: one call took more than {self._stall_seconds:g} s")

    def cut_off_reason(self, name: str) -> str:
        """Reason why the observer receives no more events; "" if it receives them."""
        observed: list[_Direct | _Threaded] = [*self._direct, *self._threaded]
        return next((each.reason for each in observed if each.name == name), "")

    def status(self) -> list[dict[str, Any]]:
        direct = [each.row(each.reason, each.handled, 0) for each in self._direct]
        threaded = [each.row(each.reason, each.runner.handled, each.runner.queued) for each in self._threaded]
        failed = [{"name": name, "state": "failed", "reason": why} for name, why in self._failed.items()]
        return direct + threaded + failed

    def start(self) -> None:
        for threaded in self._threaded:
            threaded.runner.start()

    def close(self) -> None:
        """Let observers handle their queued events, then close them. Takes a few seconds at most, however they behave."""
        runners = [threaded.runner for threaded in self._threaded]
        for runner in runners:
            runner.finish()
        for direct in self._direct:
            direct.close()
        deadline = time.monotonic() + self._close_seconds
        late = [runner for runner in runners if not runner.join(deadline)]
        for runner in late:
            runner.cut_off(f"it had not handled all events within {self._close_seconds:g} s at the daemon's end")
        for runner in late:
            runner.join(deadline + self._close_seconds)

    # ---- making -------------------------------------------------------------------------------

    def _add(self, name: str, observer: KVEventObserver | None) -> None:
        if observer is not None:
            self._threaded.append(_Threaded(name, observer, self._limit))

    def _load(self, context: ObserverContext, taken: Collection[str]) -> None:
        wanted = [name.strip() for name in context.settings.kv_event_observers.split(",")]
        if wanted == ["none"]:
            return
        found = {entry.name: entry for entry in importlib.metadata.entry_points(group=GROUP)}
        own = len(self._threaded)
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
        self.foreign = len(self._threaded) > own


class _Observed:
    """An observer and its last status."""

    def __init__(self, name: str, observer: KVEventObserver) -> None:
        self.name = name
        self._observer = observer
        self._shown: dict[str, Any] = {}

    def row(self, reason: str, handled: int, queued: int) -> dict[str, Any]:
        """Row of the observer in /status."""
        return {
            **self._shown,
            "name": self.name,
            "state": "cut off" if reason else "running",
            "reason": reason,
            "handled": handled,
            "queue_depth": queued,
        }

    def read_status(self) -> None:
        if (status := getattr(self._observer, "status", None)) is not None:
            self._shown = json.loads(json.dumps(dict(msgspec.to_builtins(status(), enc_hook=dict)), allow_nan=False))

    def close(self) -> None:
        if (close := getattr(self._observer, "close", None)) is not None:
            try:
                close()
            except BaseException:
                log.exception("closing the KV events observer %s failed", self.name)


class _Threaded(_Observed):
    """Observer that a runner calls."""

    def __init__(self, name: str, observer: KVEventObserver, limit: int) -> None:
        super().__init__(name, observer)
        self.runner = Runner(f"kv events: {name}", observer.observe, self.read_status, self.close, limit)

    @property
    def reason(self) -> str:
        """Reason why the observer is not called any more; empty while it is."""
        return self.runner.reason


class _Direct(_Observed):
    """Observer that hand_over() and tick() call."""

    def __init__(self, name: str, observer: DirectObserver) -> None:
        super().__init__(name, observer)
        self._call = observer.observe
        self.reason = ""  # why it is not called any more
        self.handled = 0

    def observe(self, event: DirectEvent) -> None:
        if not self.reason:
            try:
                self._call(event)
                self.handled += 1
            except BaseException as error:
                self._cut_off(error)

    def tick(self) -> None:
        if not self.reason:
            try:
                self.read_status()
            except BaseException as error:
                self._cut_off(error)

    def _cut_off(self, error: BaseException) -> None:
        self.reason = f"it raised {type(error).__name__}: {error}"[:500]
        log.error("kv events: %s: no more events are handled: %s", self.name, self.reason, exc_info=error)
