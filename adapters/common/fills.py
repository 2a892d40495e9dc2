"""The scheduler half's fills: awaits once, and with a limit, what the daemon has in its storage (L2) and not in memory (L1).

A fill uses none of the scheduler's poll time. Storage may be slow, so the end of a fill is neither a timeout of the daemon nor
counted by the breaker.

Owns: the fills in flight and their deadlines. Refuses to know: lookups, and what a request does meanwhile.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from kvserver.adapters.common.dispatcher import Dispatcher
from kvserver.protocol import AwaitFill, Lookup, LookupReply, Reply

MOST_FILLS = 128  # in flight; further lookups go without: each is a message that the daemon keeps
_MOST_HANDED_OVER = 96  # of these: clients state hand-overs
_GRACE_SECONDS = 0.5  # for the daemon's answer, which is due at the fill's own limit

Q = TypeVar("Q")


class AwaitedFills(Generic[Q]):
    """Fills in flight. `answer` is called once for each fill, unless the fill is dropped first."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        timeout_ms: float,
        counters: Counter[str],
        answer: Callable[[Q, LookupReply], None],
    ) -> None:
        self._dispatcher = dispatcher
        self._timeout_ms = timeout_ms
        self._counters = counters
        self._answer = answer
        # The message's number, deadline, what was found before, whether it was handed over; the first is due first, since all have the
        # same time.
        self._in_flight: dict[Q, tuple[int, float, LookupReply, bool]] = {}

    def __len__(self) -> int:
        return len(self._in_flight)

    def __contains__(self, question: Q) -> bool:
        return question in self._in_flight

    def begin(self, question: Q, message: Lookup, found: LookupReply) -> bool:
        """Await what the lookup's reply promises; False if it promises nothing, or the fill cannot be awaited."""
        if found.fill_chunks <= found.hit_chunks or not self._timeout_ms or len(self) >= MOST_FILLS:
            return False
        handed_over = message.handed_over is not None
        if handed_over and sum(fill[3] for fill in self._in_flight.values()) >= _MOST_HANDED_OVER:
            return False
        number = self._dispatcher.send(AwaitFill(message, int(self._timeout_ms)), partial(self._filled, question))
        if number is None:
            return False
        self._counters["fills"] += 1
        deadline = time.monotonic() + self._timeout_ms / 1000 + _GRACE_SECONDS
        self._in_flight[question] = number, deadline, found, handed_over
        return True

    def _filled(self, question: Q, reply: Reply) -> None:
        _, _, before, _ = self._in_flight.pop(question)
        self._answer(question, reply if isinstance(reply, LookupReply) else before)

    def end_late(self) -> None:
        """Answer with what was found before, where the daemon has not answered in time or cannot any more."""
        usable, now = self._dispatcher.usable() is not None, time.monotonic()
        while self._in_flight:
            question = next(iter(self._in_flight))
            number, deadline, before, _ = self._in_flight[question]
            if usable and now <= deadline:
                return
            self._counters["late_fills"] += 1
            self._dispatcher.forget(number)
            del self._in_flight[question]
            self._answer(question, before)

    def drop(self, question: Q) -> None:
        if (fill := self._in_flight.pop(question, None)) is not None:
            self._dispatcher.forget(fill[0])

    def clear(self) -> None:
        self._in_flight.clear()
