"""The scheduler half's lookups: sent when a request arrives, polled when the engine needs the answer, sent again when it is old.

Owns: the lookups in flight, and those that wait for a place in the queue. Refuses to know: requests, loads, stores.
The only wait of the engine's scheduler thread is here: `poll_seconds` per pass over all requests together, none
with an open breaker.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from kvserver.adapters.common.dispatcher import Dispatcher
from kvserver.adapters.common.settings import CommonSettings

from kvserver.protocol import HelloReply, Lookup, LookupReply, Reply

MOST_IN_FLIGHT = 512  # fewer than the answers that a channel and a daemon queue for a peer that does not read


@dataclass(slots=True, kw_only=True)
class Question:
    """The lookup of one request: how many of its chunks, from the first on, the daemon has."""

    number: int | None = None  # of the lookup in flight
    deadline: float = 0.0  # of the answer; 0 = not set: it is set when the lookup is sent or when the engine needs it, whichever is first
    hit_chunks: int | None = None  # the answer; None = not sent or not answered
    answered_at: float = 0.0
    timed_out: bool = False  # the answer is 0 because none arrived in time


Q = TypeVar("Q", bound=Question)


class Lookups(Generic[Q]):
    def __init__(
        self,
        dispatcher: Dispatcher,
        message: Callable[[Q], Lookup],
        settings: CommonSettings,
        counters: Counter[str],
    ) -> None:
        self._dispatcher = dispatcher
        self._message = message
        self._counters = counters
        self._timeout_seconds = settings.lookup_timeout_ms / 1000
        self._poll_seconds = self._poll_left = settings.lookup_poll_ms / 1000
        self._age_seconds = self._longest_age = settings.lookup_age_ms / 1000
        self._in_flight: set[int] = set()  # numbers
        self._waiting: dict[int, Q] = {}  # for a place in the queue, by id()
        self._full = False  # the queue had no place; an answer may have freed one
        dispatcher.on_session.append(self._begin_session)

    def _begin_session(self, hello: HelloReply | None) -> None:
        """The oldest answer that is used is well within the lease."""
        lease = hello.lease_seconds if hello is not None else 0.0
        self._longest_age = min(self._age_seconds, lease / 2) if lease > 0 else self._age_seconds
        self._in_flight.clear()
        self._waiting.clear()

    def next_pass(self) -> None:
        """A scheduler pass ends. Lookups that wait are sent, the oldest first."""
        self._poll_left = self._poll_seconds
        self._full = False
        self._send_waiting()

    def send(self, question: Q) -> None:
        """Send a lookup, or send it again. REQUIRES: it is not in flight."""
        question.hit_chunks = None
        question.deadline = 0.0
        if self._dispatcher.usable() is None:
            self._answer(question, 0)
            return
        self._waiting[id(question)] = question
        if self._full:
            self._dispatcher.receive()
        self._send_waiting()

    def _send_waiting(self) -> None:
        while self._waiting and self._send_now(next(iter(self._waiting.values()))):
            pass

    def _send_now(self, question: Q) -> bool:
        """Send a lookup that waits; False if the queue is full. Then a pass sends no other until an answer has arrived."""
        if self._dispatcher.usable() is None or self._full or id(question) not in self._waiting:
            return False  # also where the question was dropped with its session
        number = None
        if len(self._in_flight) < MOST_IN_FLIGHT:
            number = self._dispatcher.send(self._message(question), partial(self._answered, question))
        if number is None:
            self._full = True
            return False
        self._counters["lookups"] += 1
        self._in_flight.add(number)
        del self._waiting[id(question)]
        question.number = number
        question.deadline = question.deadline or time.monotonic() + self._timeout_seconds
        return True

    def answered(self, question: Q) -> bool:
        """Whether there is an answer that is not old. Waits for it within what is left of this pass's time."""
        now = time.monotonic()
        if question.hit_chunks is not None and now - question.answered_at <= self._longest_age:
            return True
        if question.number is None and id(question) not in self._waiting:  # the answer is old, or void by a preemption
            self.send(question)
        question.deadline = question.deadline or now + self._timeout_seconds
        self._receive_for(question)
        while question.hit_chunks is None and self._poll_left > 0 and self._dispatcher.usable() is not None:
            began = time.monotonic()
            replied = self._dispatcher.wait(self._poll_left)
            self._poll_left -= time.monotonic() - began
            if not replied:
                break
            self._receive_for(question)
        unusable = self._dispatcher.usable() is None
        if question.hit_chunks is None and (unusable or time.monotonic() > question.deadline):
            self._give_up(question)
        return question.hit_chunks is not None

    def _receive_for(self, question: Q) -> None:
        """Receive answers; the places that they free are for the request that is scheduled now."""
        self._dispatcher.receive()
        if id(question) in self._waiting:
            self._send_now(question)

    def _give_up(self, question: Q) -> None:
        self._counters["lookup_timeouts"] += 1
        # A lookup that was never sent is no sign of a hung daemon, as long as the daemon answers others.
        if question.number is not None or time.monotonic() - self._dispatcher.replied_at > self._timeout_seconds:
            self._dispatcher.timed_out()
        self.drop_question(question)
        self._answer(question, 0)
        question.timed_out = True

    def _answered(self, question: Q, reply: Reply) -> None:
        self._landed(question)
        self._full = False
        self._answer(question, reply.hit_chunks if isinstance(reply, LookupReply) else 0)
        self._counters["lookup_hits"] += question.hit_chunks != 0

    def _answer(self, question: Q, hit_chunks: int) -> None:
        question.hit_chunks = hit_chunks
        question.answered_at = time.monotonic()
        question.timed_out = False

    def drop_question(self, question: Q) -> None:
        self._waiting.pop(id(question), None)
        self._landed(question)

    def _landed(self, question: Q) -> None:
        """The lookup is no longer in flight, if it was."""
        if question.number is not None:
            self._dispatcher.forget(question.number)
            self._in_flight.discard(question.number)
            question.number = None
