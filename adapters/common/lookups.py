"""The scheduler half's lookups: sent when a request arrives, polled when the engine needs the answer, sent again when it is old.

The engine's scheduler thread waits only here: `poll_seconds` per pass over all requests together, 0 with an open breaker. The
daemon may want the single blocks of the first missed chunk. They are sent when its reply arrives, for most lookups need none.

Owns: the lookups in flight, and those that wait for a place in the queue. Refuses to know: requests, loads, stores.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvserver.adapters.common.dispatcher import Dispatcher
from kvserver.adapters.common.fills import AwaitedFills
from kvserver.adapters.common.settings import CommonSettings
from kvserver.protocol import HelloReply, Lookup, LookupReply, LookupTail, Reply

MOST_IN_FLIGHT = 512  # fewer than the answers that a channel and a daemon queue for a peer that does not read


@dataclass(slots=True, frozen=True)
class Answer:
    hit_chunks: int  # from the first on
    at: float
    full_chunks: int = 0  # that full attention alone would find
    tail_blocks: int = 0  # behind these chunks
    timed_out: bool = False  # the daemon did not answer in time: a miss
    l2_chunks: int = 0  # of the hit: read from L2 for it
    boundaries: tuple[int, ...] = ()  # at which a load can end, if the lookup wanted them


@dataclass(slots=True, kw_only=True, eq=False)
class Question:
    """Lookup of one request: the number of its leading chunks that the daemon has."""

    answer: Answer | None = None
    deadline: float = 0.0  # of the answer; 0 = not set: it is set when the lookup is sent or when the engine needs it, whichever is first
    waits_for_fills: bool = True


TailOf = Callable[[int], LookupTail]  # the single blocks behind so many chunks


class Lookups:
    def __init__(
        self,
        dispatcher: Dispatcher,
        settings: CommonSettings,
        counters: Counter[str],
        *,
        answers_at_once: bool = False,
    ) -> None:
        """`answers_at_once`: the engine cannot put a request off. What is known stays the answer while a fill runs, or the lookup is renewed."""
        self._dispatcher = dispatcher
        self._answers_at_once = answers_at_once
        self._counters = counters
        self._timeout_seconds = settings.lookup_timeout_ms / 1000
        self.poll_seconds = self.seconds_left = settings.lookup_poll_ms / 1000  # `seconds_left`: of this pass
        self._age_seconds = self._longest_age = settings.lookup_age_ms / 1000
        self._waiting: dict[Question, tuple[Lookup, TailOf]] = {}  # for a place in the queue, the oldest first
        self._in_flight: dict[Question, int] = {}  # the messages' numbers
        self._full = False  # the queue had no place; an answer may have freed one
        self._received = False  # in this pass, for lookups that have an answer or await a fill
        self._fills: AwaitedFills[Question] = AwaitedFills(dispatcher, settings.fill_timeout_ms, counters, self._answer)
        dispatcher.on_session.append(self._begin_session)

    def _begin_session(self, hello: HelloReply | None) -> None:
        """The oldest answer that is used is well within the lease."""
        lease = hello.lease_seconds if hello is not None else 0.0
        self._longest_age = min(self._age_seconds, lease / 2) if lease > 0 else self._age_seconds
        self._in_flight.clear()
        self._waiting.clear()
        self._fills.clear()

    def next_pass(self) -> None:
        """A scheduler pass ends. Lookups that wait are sent, the oldest first."""
        self.seconds_left = self.poll_seconds
        self._full = self._received = False
        self._send_waiting()

    @property
    def fills(self) -> int:
        """Requests that wait for the daemon to read from its storage: the engine may wait a little where it has no other work."""
        return len(self._fills)

    def must_send(self, question: Question) -> bool:
        """True if a lookup is to be sent: none is under way, and the answer is old or void. With an open breaker the lookup is a miss."""
        if self._is_asked(question) or question in self._fills:
            return False
        now = time.monotonic()
        if question.answer is not None and now - question.answer.at <= self._longest_age:
            return False
        if self._dispatcher.usable() is None:
            question.answer = Answer(0, now)
            return False
        return True

    def send(self, question: Question, message: Lookup, tail_of: TailOf) -> None:
        """Send a lookup, as soon as the queue has a place. REQUIRES: `message` is of the session in use, and none is under way."""
        if not self._answers_at_once:
            question.answer = None
        question.deadline = 0.0
        self._waiting[question] = message, tail_of
        if self._full:
            self._dispatcher.receive()
        self._send_waiting()

    def _send_waiting(self) -> None:
        while self._waiting and self._try_send(next(iter(self._waiting))):
            pass

    def _try_send(self, question: Question) -> bool:
        """Send a lookup that waits; False if the queue is full. Then a pass sends no other until an answer has arrived."""
        if self._dispatcher.usable() is None or self._full or question not in self._waiting:
            return False  # also where the question was dropped with its session
        number = None
        if len(self._in_flight) < MOST_IN_FLIGHT:
            message, tail_of = self._waiting[question]
            number = self._dispatcher.send(message, partial(self._answered, question, message, tail_of))
        if number is None:
            self._full = True
            return False
        self._counters["lookups"] += 1
        self._in_flight[question] = number
        del self._waiting[question]
        question.deadline = question.deadline or time.monotonic() + self._timeout_seconds
        return True

    def _answered(self, question: Question, message: Lookup, tail_of: TailOf, reply: Reply) -> None:
        del self._in_flight[question]
        self._full = False
        found = reply if isinstance(reply, LookupReply) else LookupReply(0)
        if question.waits_for_fills and self._fills.begin(question, message, found):
            if self._answers_at_once:
                self._answer(question, found)
            return
        number = None
        if found.wants_tail:
            number = self._dispatcher.send(tail_of(found.hit_chunks), partial(self._tail_answered, question, found))
        if number is not None:
            self._in_flight[question] = number
        else:
            self._answer(question, found)

    def _tail_answered(self, question: Question, before: LookupReply, reply: Reply) -> None:
        """Answer the lookup by `reply`, or by the reply before it if `reply` is an error."""
        del self._in_flight[question]
        self._full = False
        self._answer(question, reply if isinstance(reply, LookupReply) else before)

    def _answer(self, question: Question, found: LookupReply) -> None:
        question.answer = Answer(
            found.hit_chunks, time.monotonic(), found.full_chunks, found.tail_blocks, l2_chunks=found.l2_chunks,
            boundaries=found.boundaries,
        )  # fmt: skip
        self._counters["lookup_hits"] += found.hit_chunks != 0 or found.tail_blocks != 0

    def forgo(self, question: Question) -> None:
        """The engine has all that the daemon could find for it: no fill is awaited. A lookup under way may still be answered."""
        question.waits_for_fills = False
        self._fills.drop(question)

    def awaits_fill(self, question: Question) -> bool:
        """True while the daemon still reads from L2 for the lookup. A pass looks for replies once, for any number of waiting lookups."""
        if question not in self._fills:
            return False
        self._receive_once()
        return question in self._fills

    def _receive_once(self) -> None:
        if not self._received:
            self._received = True
            self._dispatcher.receive()
            self._fills.end_late()

    def known_until(self, question: Question) -> float:
        """Time at which the lookup must be sent again; 0 while it, or a fill, is under way. Another session ends it before."""
        if question.answer is None or self._is_asked(question) or question in self._fills:
            return 0.0
        return question.answer.at + self._longest_age

    def answer_to(self, question: Question, waits: bool = True) -> Answer | None:
        """The answer; with `waits`, waits for it within what is left of this pass's time. REQUIRES: no lookup must be sent."""
        if self.awaits_fill(question) and not self._answers_at_once:
            return None
        if question.answer is not None and not self._is_asked(question):
            return question.answer
        question.deadline = question.deadline or time.monotonic() + self._timeout_seconds
        if question.answer is not None or not waits:
            self._receive_once()
        replied = waits and question.answer is None
        while replied:
            self._dispatcher.receive()
            self._try_send(question)  # the places that answers free are for the request that is scheduled now
            replied = question.answer is None and question not in self._fills and self._wait()
        if question in self._fills:  # which has a limit of its own
            return question.answer
        unanswered = question.answer is None or self._is_asked(question)
        if unanswered and (self._dispatcher.usable() is None or time.monotonic() > question.deadline):
            self._give_up(question)
        return question.answer

    def _is_asked(self, question: Question) -> bool:
        return question in self._waiting or question in self._in_flight

    def _wait(self) -> bool:
        """Wait for a reply, to any question."""
        if self.seconds_left <= 0 or self._dispatcher.usable() is None:
            return False
        began = time.monotonic()
        replied = self._dispatcher.wait(self.seconds_left)
        self.seconds_left -= time.monotonic() - began
        return replied

    def _give_up(self, question: Question) -> None:
        self._counters["lookup_timeouts"] += 1
        # A lookup that was never sent is no sign of a hung daemon, as long as the daemon answers others.
        now = time.monotonic()
        if question in self._in_flight or now - self._dispatcher.replied_at > self._timeout_seconds:
            self._dispatcher.timed_out()
        self.drop_question(question)
        question.answer = Answer(0, now, timed_out=True)

    def drop_question(self, question: Question) -> None:
        self._waiting.pop(question, None)
        if (number := self._in_flight.pop(question, None)) is not None:
            self._dispatcher.forget(number)
        self._fills.drop(question)
