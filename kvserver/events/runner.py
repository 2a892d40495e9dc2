"""A bounded queue and the thread that handles its items in order.

The bus has one, and each observer of KV events that is not direct. No caller waits: put() refuses an item for which the queue has
no space. A runner whose handling raises is cut off: it drops what is queued and handles no more.

Owns: the queue, the thread, and how long a call takes. Refuses to know: the items, and what an item that was refused means.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

QUEUE_COST = 1 << 16  # queued items; one that carries bytes counts once more per _COST_BYTES
_COST_BYTES = 4096
_NAP_SECONDS = 0.01  # lets items gather, so that put() rarely has to wake the thread
# After a slice of handling comes a pause in which the loop gets the interpreter's lock: else it waits up to 5 ms for it.
_SLICE_SECONDS = 0.0002
_PAUSE_SECONDS = 0.00001  # what the system adds is longer
_IDLE_SECONDS = 1.0
_MOST_A_LOOK = 1.0  # seconds that one look may count as busy: a process that was stopped is not busy meanwhile
Item = TypeVar("Item")


class Runner(Generic[Item]):
    """Queue and thread of one handler. REQUIRES: one thread calls put(); start() at most once, finish() once."""

    def __init__(
        self,
        name: str,
        handle: Callable[[Item], None],
        idle: Callable[[], None] = lambda: None,
        end: Callable[[], None] = lambda: None,
        limit: int = QUEUE_COST,
    ) -> None:
        """The thread calls `handle` with each item, `idle` once a second, and `end` after the last item."""
        self.reason = ""  # why items are no longer handled; empty while they are
        self._handle, self._idle, self._end = handle, idle, end
        self.handled = 0  # items
        self._limit = limit
        self._edges = 0  # begins and ends of calls: odd while one runs
        self._looked_at = (0, 0.0, 0.0)  # edges, time of the look, seconds that the call had run
        self._queue: queue.SimpleQueue[tuple[Item, int] | None] = queue.SimpleQueue()
        self._cost_in = 0  # written by put() only
        self._cost_out = 0  # by the thread only; the difference is what is queued
        self._finishing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

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

    def busy_seconds(self) -> float:
        """Duration of the running call so far. REQUIRES: called once a second, by one thread."""
        edges, now = self._edges, time.monotonic()
        before, when, busy = self._looked_at
        busy = busy + min(now - when, _MOST_A_LOOK) if edges % 2 and edges == before else 0.0
        self._looked_at = (edges, now, busy)
        return busy

    def flush(self, seconds: float) -> bool:
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
        while self._next() is not None:
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
        seconds, idle_at, finishing = _IDLE_SECONDS, 0.0, False  # idle() is due after the first items
        while not finishing:
            finishing = self._finishing  # before the queue is read: then it has all that was put before finish()
            try:
                entry = self._next(0.0 if finishing else seconds)
                slice_ends = time.monotonic() + _SLICE_SECONDS
                while entry is not None and not self.reason:
                    self._edges += 1
                    self._handle(entry[0])
                    self._edges += 1
                    self.handled += 1
                    self._cost_out += entry[1]
                    if time.monotonic() >= slice_ends:
                        time.sleep(_PAUSE_SECONDS)
                        slice_ends = time.monotonic() + _SLICE_SECONDS
                    entry = self._next()
                if time.monotonic() >= idle_at:
                    if not self.reason:
                        self._edges += 1
                        self._idle()
                        self._edges += 1
                    idle_at = time.monotonic() + _IDLE_SECONDS
            except BaseException as error:
                self.cut_off(f"it raised {type(error).__name__}: {error}"[:500], error)
            seconds = max(0.0, idle_at - time.monotonic())
            if not self._finishing:
                time.sleep(_NAP_SECONDS)
        self._end()

    def _next(self, seconds: float = 0.0) -> tuple[Item, int] | None:
        try:
            return self._queue.get(timeout=seconds)
        except queue.Empty:
            return None
