"""Bytes over time, in windows.

Owns: mean and peak of a stream of transfers. Refuses to know: what is transferred.
"""

from __future__ import annotations

from collections import defaultdict


class Traffic:
    def __init__(self, window_seconds: float) -> None:
        self._window_seconds = window_seconds
        self._windows: defaultdict[int, int] = defaultdict(int)  # bytes by number of the window

    def add(self, seconds: float, sent: int) -> None:
        if sent:
            self._windows[int(seconds / self._window_seconds)] += sent

    @property
    def peak(self) -> float:
        """Bytes a second of the window with most."""
        return max(self._windows.values(), default=0) / self._window_seconds

    def mean(self, seconds: float) -> float:
        """Bytes a second over that time, which is no shorter than a window."""
        return sum(self._windows.values()) / max(seconds, self._window_seconds)
