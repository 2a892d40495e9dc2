"""Bounds of a load: the time that SGLang's scheduler may wait for it, and the pages that are copied in that time.

A load runs on the scheduler's thread, so all requests of the engine wait for it. It is worth that only while it takes a small part of
the time that computing its tokens would.

Owns: the rates, measured here, and the bound. Refuses to know: copies.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_WEIGHT = 0.2  # of the newest measurement
_LEAST_SECONDS = 0.02  # a load may always take as long
_FLOOR_TOKENS = 256  # computed in one batch: in fewer, fixed costs would be taken for prefill
_FLOOR_COPIED = 0.001  # seconds: in shorter loads, fixed costs would be taken for copying
_FORGET_SECONDS = (
    10.0  # after which a rate of copying is not known any more, so that one slow load does not end all hits
)
_IDLE_SECONDS = 1.0  # a batch without a page that is stored: then the engine was idle


class Budget:
    def __init__(
        self, most_seconds: float, share: float, page_tokens: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most_seconds, self._share, self._page_tokens, self._clock = most_seconds, share, page_tokens, clock
        self._prefill = 0.0  # tokens a second; 0: not known yet
        self._copying = 0.0  # pages a second; 0: not known yet
        self._copied_at = clock()
        self._began: float | None = None
        self._computed = 0  # tokens of the batches begun since

    def seconds(self, pages: int) -> float:
        """Bound the time of a load of so many pages."""
        computing = pages * self._page_tokens / self._prefill * self._share if self._prefill else self._most_seconds
        return min(self._most_seconds, max(_LEAST_SECONDS, computing))

    def affordable(self, pages: int) -> int:
        """Count the pages, of these, that are copied in the time that their load may take."""
        if not self._copying or self._clock() - self._copied_at > _FORGET_SECONDS:
            return pages
        pays = not self._prefill or self._copying * self._page_tokens * self._share >= self._prefill
        return min(pages, int(self._copying * (self._most_seconds if pays else _LEAST_SECONDS)))

    # ---- what is measured ---------------------------------------------------------------------

    def copied(self, pages: int, seconds: float) -> None:
        if seconds >= _FLOOR_COPIED:
            self._copying = _mean(self._copying, pages / seconds)
            self._copied_at = self._clock()

    def batch_begins(self) -> None:
        if self._began is None:
            self._began, self._computed = self._clock(), 0

    def computed(self, pages: int) -> None:
        """A request's pages were computed, by a batch that has begun."""
        self._computed += pages * self._page_tokens

    def pass_ends(self) -> None:
        if self._began is None:
            return
        seconds = self._clock() - self._began
        if not self._computed:
            if seconds > _IDLE_SECONDS:
                self._began = None
            return
        if self._computed >= _FLOOR_TOKENS and seconds > 0:
            self._prefill = _mean(self._prefill, self._computed / seconds)
        self._began = None


def _mean(known: float, now: float) -> float:
    return known + _WEIGHT * (now - known) if known else now
