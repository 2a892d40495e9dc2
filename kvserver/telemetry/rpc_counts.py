"""Counters of requests and replies.

Owns: how long requests took and which errors were sent. Written by the loop thread only; a snapshot may go anywhere.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import Any, get_args

from kvserver.protocol import WAIT_SECONDS, ErrorCode, Request

REQUESTS = tuple(kind.__name__ for kind in get_args(Request))
UNREADABLE = "unreadable"  # a message that is no request
LOOP = "loop"  # work of the loop that answers no message
TYPES = (*REQUESTS, UNREADABLE, LOOP)
_REGISTERING = ("Hello", "RegisterWorker")


class Rpc:
    """How long requests took from their arrival to their reply, and which errors were sent, both by TYPES."""

    def __init__(self) -> None:
        self.times: dict[str, list[int]] = {}  # type -> counts per bucket, the last one is +Inf
        self.seconds: Counter[str] = Counter()
        self.errors: Counter[tuple[str, str]] = Counter()  # by code and type

    def observe(self, type_name: str, seconds: float) -> None:
        buckets = self.times.get(type_name)
        if buckets is None:
            buckets = self.times[type_name] = [0] * (len(WAIT_SECONDS) + 1)
        buckets[bisect_left(WAIT_SECONDS, seconds)] += 1
        self.seconds[type_name] += seconds  # type: ignore[assignment]

    def error(self, code: str, type_name: str) -> None:
        self.errors[code, type_name] += 1

    def of_code(self, code: ErrorCode) -> int:
        return sum(count for (sent, _), count in self.errors.items() if sent == code.value)

    def refused_registrations(self) -> Counter[str]:
        """Errors that answered a registration or what comes before it, by code."""
        refused: Counter[str] = Counter()
        for (code, type_name), count in self.errors.items():
            if type_name in _REGISTERING:
                refused[code] += count
        return refused

    def snapshot(self) -> dict[str, Any]:
        return {
            "times": {name: list(counts) for name, counts in self.times.items()},
            "seconds": dict(self.seconds),
            "errors": dict(self.errors),
        }
