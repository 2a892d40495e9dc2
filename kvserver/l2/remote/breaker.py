"""Breaker: whether a tier's store is worth a request.

Owns: the count of failures in a row, and when to try again. Refuses to know: what a request was.
"""

from __future__ import annotations

import random
from typing import Literal

FAILURES_TO_OPEN = 3  # in a row
_FIRST_WAIT_SECONDS = 1.0
_LONGEST_WAIT_SECONDS = 30.0


class StoreBreaker:
    """Breaker of one store.

    - closed: requests pass.
    - open: no request passes until the wait is over.
    - probing: one request decides between the two.

    It begins as probing, for the request with which a tier opens. Waits double up to 30 s. Each is multiplied by a random number
    between a half and one and a half, so that daemons do not try all at once.
    """

    def __init__(self, draw: random.Random | None = None) -> None:
        self.state: Literal["closed", "open", "probing"] = "probing"
        self.breaks = 0
        self._failures = 0
        self._wait_seconds = _FIRST_WAIT_SECONDS
        self._until_ns = 0
        self._random = draw or random.Random()

    @property
    def passes(self) -> bool:
        return self.state == "closed"

    def succeeded(self) -> None:
        """The store answered, whatever it answered."""
        self._failures = 0
        if self.state == "probing":
            self.state = "closed"
            self._wait_seconds = _FIRST_WAIT_SECONDS

    def failed(self, now_ns: int) -> bool:
        """A request got no answer, or the store was not there. True: the breaker, which was closed, opens."""
        self._failures += 1
        was_closed = self.state == "closed"
        if self.state == "open" or (was_closed and self._failures < FAILURES_TO_OPEN):
            return False
        self.breaks += was_closed
        self._open(now_ns)
        return was_closed

    def begins_probe(self, now_ns: int) -> bool:
        """True: a probe is due, and the caller sends it."""
        if self.state != "open" or now_ns < self._until_ns:
            return False
        self.state = "probing"
        return True

    def _open(self, now_ns: int) -> None:
        self.state = "open"
        self._failures = 0
        wait = self._wait_seconds * self._random.uniform(0.5, 1.5)
        self._until_ns = now_ns + int(wait * 1e9)
        self._wait_seconds = min(2 * self._wait_seconds, _LONGEST_WAIT_SECONDS)
