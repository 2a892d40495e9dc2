"""A bounded queue and the thread that handles its items in order: what the bus is, and each observer of KV events.

Nothing waits for it: put() refuses an item for which the queue has no space. A runner whose handling raises is cut off: it
drops what is queued and handles no more.

Owns: the queue and the thread. Refuses to know: the items, and what an item that was refused means.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

log = logging.getLogger(__name__)

QUEUE_COST = 1 << 16  # queued items; one that carries bytes counts once more per _COST_BYTES
_COST_BYTES = 4096
_NAP_SECONDS = 0.01  # lets items gather, so that put() rarely has to wake the thread
_IDLE_SECONDS = 1.0
Item = TypeVar("Item")


class Runner(Generic[Item]):
    """REQUIRES: one thread calls put(); start() at most once, finish() once."""

    def __init__(self, name: str, limit: int = QUEUE_COST) -> None:
        self.reason = ""  # why items are no longer handled; empty while they are
        self._limit = limit
        self._queue: queue.SimpleQueue[tuple[Item, int] | None] = queue.SimpleQueue()
        self._cost_in = 0  # written by put() only
        self._cost_out = 0  # by the thread only; the difference is what is queued
        self._finishing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    # ---- what a runner is for: called in its thread ---------------------------------------------

    def _handle(self, item: Item) -> None:
        raise NotImplementedError

    def _idle(self) -> None:
        """After all queued items, and once a second."""

    def _end(self) -> None:
        """Once, after the last item."""

    # ---- the queue ------------------------------------------------------------------------------

    def put(self, item: Item, size: int = 0, always: bool = False) -> bool:
        """Queue the item, which carries `size` bytes. False if there is no space, unless `always`, or after a cut-off."""
        cost = 1 + size // _COST_BYTES
        if self.reason or (self._cost_in - self._cost_out + cost > self._limit and not always):
            return False
        self._cost_in += cost
        self._queue.put((item, cost))
        return True

    def start(self) -> None:
        self._thread.start()

    # ---- from any thread ------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        """The cost of the queued items."""
        return 0 if self.reason else self._cost_in - self._cost_out

    @property
    def half_empty(self) -> bool:
        return self.queued < self._limit // 2

    def flush(self, seconds: float = 5.0) -> bool:
        """Wait until all items put so far were handled. False if they were not within `seconds`."""
        target, deadline = self._cost_in, time.monotonic() + seconds
        while self._cost_out < target:
            if self.reason or time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    def cut_off(self, reason: str, error: BaseException | None = None) -> None:
        if not self.reason:
            self.reason = reason
            log.error("%s: no more events are handled: %s", self._thread.name, reason, exc_info=error)
        while self._next(wait=False) is not None:
            pass

    def finish(self) -> None:
        """End the thread after the queued items."""
        self._finishing = True
        self._queue.put(None)  # wakes the thread
        if self._thread.ident is None:
            self._end()

    def join(self, deadline: float) -> bool:
        """True if the thread ended before `deadline` (monotonic seconds)."""
        if self._thread.ident is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    # ---- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        self._guarded(self._work)
        while not self._finishing:
            self._next(wait=True)
        self._end()

    def _work(self) -> None:
        finishing = False
        while not finishing:
            finishing = self._finishing  # before the queue is read: then it has all that was put before finish()
            entry = self._next(wait=not finishing)
            while entry is not None and not self.reason:
                self._handle(entry[0])
                self._cost_out += entry[1]
                entry = self._next(wait=False)
            if not self.reason:
                self._idle()
            if not self._finishing:
                time.sleep(_NAP_SECONDS)

    def _next(self, wait: bool) -> tuple[Item, int] | None:
        try:
            return self._queue.get(wait, _IDLE_SECONDS)
        except queue.Empty:
            return None

    def _guarded(self, function: Callable[..., None], *args: Any) -> None:
        """What it raises cuts the runner off."""
        try:
            function(*args)
        except BaseException as error:
            self.cut_off(f"it raised {type(error).__name__}: {error}"[:500], error)
