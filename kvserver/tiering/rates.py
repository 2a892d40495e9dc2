"""Read rates of L2's tiers, as measured, and how long a fill would take.

A rate is bytes over the time in which at least one read was under way. It belongs to the mean number of reads at once. If a fill
would have more at once, the rate is assumed to grow with them: a wrong assumption is corrected by the fill's own reads. A rate
that is too low would keep fills away and never be measured again. For that reason a measurement is forgotten after a while, too.

Owns: what was measured of each tier's last reads, and the bytes that fills have still to read from it. Refuses to know: which
objects those are, and whether a fill is worth its time (`presence`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

MOST_READS = 64  # of one tier under way at a time, those that hang included
_WINDOW_SECONDS = 4.0  # of reading, after which all that was measured counts half
_FORGOTTEN_SECONDS = 60.0  # after the last read


class TierReads(NamedTuple):
    """Reads of a fill from one tier."""

    objects: int
    bytes: int


class _Tier:
    __slots__ = ("busy_seconds", "bytes", "changed", "last_end", "open", "queued_bytes", "read_seconds", "shortest")

    def __init__(self) -> None:
        self.open = 0  # reads under way
        self.changed = 0.0  # when `open` changed last
        self.last_end = -math.inf
        self.busy_seconds = 0.0  # with reads under way
        self.read_seconds = 0.0  # of all reads together
        self.bytes = 0.0
        self.shortest = math.inf  # seconds of one read
        self.queued_bytes = 0  # that fills have still to read

    def change(self, now: float, more: int) -> None:
        """A read begins, or ends."""
        if not self.open and now - self.last_end > _FORGOTTEN_SECONDS:
            self.busy_seconds = self.read_seconds = self.bytes = 0.0
            self.shortest = math.inf
        if self.open:
            self.busy_seconds += now - self.changed
            self.read_seconds += (now - self.changed) * self.open
        self.open += more
        self.changed = now

    def ended(self, now: float, seconds: float, size: int) -> None:
        self.last_end = now
        self.bytes += size
        if size:
            self.shortest = min(self.shortest, seconds)
        if self.busy_seconds > _WINDOW_SECONDS:
            self.busy_seconds /= 2
            self.read_seconds /= 2
            self.bytes /= 2
            self.shortest = min(2 * self.shortest, seconds) if size else 2 * self.shortest

    def rate(self, now: float) -> float:
        """Bytes a second; 0 while it is not known."""
        if not self.bytes or self.busy_seconds <= 0 or now - self.last_end > _FORGOTTEN_SECONDS:
            return 0.0
        return self.bytes / self.busy_seconds

    def expected_seconds(self, reads: TierReads, now: float) -> float | None:
        rate = self.rate(now)
        if not rate:
            return None
        at_once = max(1.0, self.read_seconds / self.busy_seconds)
        grown = rate * max(1.0, min(reads.objects, MOST_READS) / at_once)
        return max(self.shortest, (reads.bytes + self.queued_bytes) / grown)


class ReadRates:
    """Rates by the places of the tiers. REQUIRES: one thread uses it."""

    def __init__(self, tiers: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._tiers = [_Tier() for _ in range(tiers)]
        self._clock = clock

    def begun(self, tier: int) -> float:
        """A read has begun; returns when, for ended()."""
        now = self._clock()
        self._tiers[tier].change(now, 1)
        return now

    def ended(self, tier: int, began: float, size: int) -> None:
        """`size`: the bytes it brought; 0 if it failed."""
        now = self._clock()
        self._tiers[tier].change(now, -1)
        self._tiers[tier].ended(now, now - began, size)

    def open(self, tier: int) -> int:
        return self._tiers[tier].open

    def queue(self, tier: int, more: int) -> None:
        """Fills have so many bytes more to read from the tier, or less."""
        self._tiers[tier].queued_bytes += more

    @property
    def queued_bytes(self) -> int:
        """Bytes still to read from all tiers; 0 without fills."""
        return sum(tier.queued_bytes for tier in self._tiers)

    def bytes_per_second(self, tier: int) -> float:
        """0 while it is not known."""
        return self._tiers[tier].rate(self._clock())

    def expected_seconds(self, reads: Sequence[TierReads]) -> float | None:
        """Seconds until a fill has read this from each tier, behind what is queued; None if a tier's rate is not known."""
        now, longest = self._clock(), 0.0
        for tier, part in zip(self._tiers, reads, strict=True):
            if part.objects:
                seconds = tier.expected_seconds(part, now)
                if seconds is None:
                    return None
                longest = max(longest, seconds)
        return longest
