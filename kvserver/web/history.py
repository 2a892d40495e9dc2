"""The last hour of the daemon, for the charts of the page: a ring of samples of its counters.

`tick()` starts a sample in the loop and collects the previous one; it never waits. While the loop does not answer there is no
sample.

Owns: the ring, and when the next sample is due. Refuses to know: what a sample consists of (`server.samples`).
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from itertools import islice
from typing import NamedTuple

SAMPLES = 720
_LEAST_INTERVAL_SECONDS = 1.0


class Samples(NamedTuple):
    first: int  # number of the first of `rows`, counted from the daemon's start
    rows: list[array[float]]


class History:
    """Ring of samples. REQUIRES: one thread calls tick(); any calls since()."""

    def __init__(
        self,
        seconds: float,
        take_sample: Callable[[], Future[array[float]]],
        boot_id: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.boot_id = boot_id
        self.seconds = seconds
        self.interval_seconds = max(_LEAST_INTERVAL_SECONDS, seconds / SAMPLES)
        self._take_sample, self._clock = take_sample, clock
        self._due = clock()
        self._pending: Future[array[float]] | None = None
        self._rows: deque[array[float]] = deque(maxlen=max(1, int(seconds / self.interval_seconds)))
        self._taken = 0
        self._lock = threading.Lock()  # of the ring

    def tick(self) -> None:
        """Begin a sample if one is due, and keep it once it was taken. To be called several times a second."""
        if self._pending is not None:
            if not self._pending.done():
                return
            if self._pending.exception() is None:
                with self._lock:
                    self._rows.append(self._pending.result())
                    self._taken += 1
            self._pending = None
        now = self._clock()
        if now >= self._due:
            self._due = now + self.interval_seconds
            self._pending = self._take_sample()

    def since(self, number: int) -> Samples:
        """The samples from that number on, as far as they are kept."""
        with self._lock:
            first = max(number, self._taken - len(self._rows))
            return Samples(first, list(islice(self._rows, first - (self._taken - len(self._rows)), None)))


def _never() -> Future[array[float]]:
    return Future()


NO_HISTORY = History(60, _never)
