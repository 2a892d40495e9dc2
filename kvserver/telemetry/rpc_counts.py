"""Counters of requests and replies.

Owns: how long requests took and which errors were sent. Written by the loop thread only; a snapshot may go anywhere.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import partial
from typing import get_args

from kvserver.protocol import WAIT_SECONDS, Buckets, ErrorCode, Histogram, Request

REQUESTS = tuple(kind.__name__ for kind in get_args(Request))
UNREADABLE = "unreadable"  # a message that is no request
LOOP = "loop"  # work of the loop that answers no message
TYPES = (*REQUESTS, UNREADABLE, LOOP)
_REGISTERING = ("Hello", "RegisterWorker")


@dataclass(frozen=True, slots=True)
class RpcCounts:
    """Counts at one moment: times by type of request, errors by code and type."""

    times: dict[str, Buckets]
    errors: dict[tuple[str, str], int]


class Rpc:
    """Times of requests from their arrival to their reply, and errors that were sent, both by TYPES."""

    def __init__(self) -> None:
        self._times: defaultdict[str, Histogram] = defaultdict(partial(Histogram, WAIT_SECONDS))
        self.errors: Counter[tuple[str, str]] = Counter()  # by code and type
        self.undelivered = 0  # replies to peers that had disconnected or did not read

    def observe(self, type_name: str, seconds: float) -> None:
        self._times[type_name].observe(seconds)

    @property
    def faults(self) -> int:
        """All errors but REPORT_GAP, which requests the full state of an engine older than this daemon."""
        return sum(count for (code, _), count in self.errors.items() if code != ErrorCode.REPORT_GAP.value)

    def refused_registrations(self) -> Counter[str]:
        """Errors that answered a registration or what comes before it, by code."""
        refused: Counter[str] = Counter()
        for (code, type_name), count in self.errors.items():
            if type_name in _REGISTERING:
                refused[code] += count
        return refused

    def snapshot(self) -> RpcCounts:
        return RpcCounts({name: times.snapshot() for name, times in self._times.items()}, dict(self.errors))
