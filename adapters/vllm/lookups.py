"""The scheduler half's lookups: sent when a request arrives, polled when vLLM needs the answer, sent again when it is old.

Owns: the session of the scheduler half, the lookups in flight in it, and those that wait for a place in the queue. Refuses to know: loads,
stores, blocks.
The only wait of the engine's scheduler thread is here: `lookup_poll_ms` per pass over all requests together, none
with an open breaker.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvserver.adapters.common.link import Link, Session
from kvserver.adapters.vllm.chunks import Chunks
from kvserver.adapters.vllm.settings import AdapterSettings

from kvserver.protocol import MAX_CHUNKS, Error, ErrorCode, Lookup, LookupReply, Reply

if TYPE_CHECKING:
    from vllm.v1.request import Request

log = logging.getLogger("vllm.kvserver")

MOST_IN_FLIGHT = 512  # fewer than the answers that a channel and a daemon queue for a peer that does not read
_LONGEST_TRACEPARENT = 512  # as the protocol has it
# Errors of another daemon than the session's: it replaced a dead one, and this engine's workers are registered with it.
_RENEW = {
    ErrorCode.UNKNOWN_INSTANCE.value,
    ErrorCode.BAD_KEYS.value,
    ErrorCode.DUPLICATE_INSTANCE.value,
    ErrorCode.REPORT_GAP.value,
}


def traceparent(request: Request) -> str:
    """The traceparent of the request's headers; empty if there is none."""
    for name, value in (getattr(request, "trace_headers", None) or {}).items():
        if name.lower() == "traceparent" and len(value) <= _LONGEST_TRACEPARENT:
            return str(value)
    return ""


@dataclass(slots=True)
class Question:
    """The lookup of one request: how many of its chunks, from the first on, the daemon has."""

    request: Request
    variant: str
    lookup: int | None = None  # number of the lookup in flight
    deadline: float = (
        0.0  # of the answer; 0 = not set: it is set when the lookup is sent or when vLLM needs it, whichever is first
    )
    hit_chunks: int | None = None  # the answer; None = not sent or not answered
    answered_at: float = 0.0
    timed_out: bool = False  # the answer is 0 because none arrived in time


class Lookups:
    def __init__(
        self,
        settings: AdapterSettings,
        link: Link,
        instance_id: str,
        incarnation: str,
        chunks: Chunks,
        counters: Counter[str],
        *,
        new_session: Callable[[], None],
        on_reply: Callable[[int, Reply], None],
    ) -> None:
        """`new_session`: messages sent before will not be answered. `on_reply`: a reply to any message, by its number."""
        self._settings = settings
        self._link = link
        self._instance_id = instance_id
        self._incarnation = incarnation
        self._chunks = chunks
        self._counters = counters
        self._new_session = new_session
        self._on_reply = on_reply
        self._session: Session | None = None
        self._in_flight: dict[int, Question] = {}
        self._waiting: dict[int, Question] = {}  # for a place in the queue, by id()
        self._full = False  # the queue had no place; an answer may have freed one
        self._replied_at = 0.0
        self._poll_left = settings.lookup_poll_ms / 1000

    def next_pass(self) -> None:
        """A scheduler pass ends. Lookups that wait are sent, the oldest first."""
        self._poll_left = self._settings.lookup_poll_ms / 1000
        self._full = False
        self._send_waiting()

    def usable(self) -> Session | None:
        """The session in use, if any; a new session voids the lookups of the old one."""
        session = self._link.usable()
        current = self._link.session
        if current is not self._session:
            self._in_flight.clear()
            self._waiting.clear()
            self._new_session()
            self._hang_up()
            self._session = current
            self._chunks.resize(current.hello.chunk_tokens if current is not None else 0)
        return session if session is current else None

    def send(self, question: Question) -> None:
        """Send a lookup, or send it again. REQUIRES: it is not in flight."""
        question.hit_chunks = None
        question.deadline = 0.0
        if self.usable() is None or not self._asked(question.request):
            self._answer(question, 0)
            return
        self._waiting[id(question)] = question
        if self._full:
            self.receive()
        self._send_waiting()

    def _asked(self, request: Request) -> int:
        """How many chunks of the request are looked up."""
        return min(self._chunks.hashed(request), MAX_CHUNKS)  # so a hit, and the load of it, is one message too

    def _send_waiting(self) -> None:
        while self._waiting and self._send_now(next(iter(self._waiting.values()))):
            pass

    def _send_now(self, question: Question) -> bool:
        """Send a lookup that waits; False if the queue is full. Then a pass sends no other until an answer has arrived."""
        session = self.usable()
        if session is None or self._full or id(question) not in self._waiting:  # void with the session it waited in
            return False
        request, number = question.request, None
        if len(self._in_flight) < MOST_IN_FLIGHT:
            number = session.channel.send(
                Lookup(
                    instance_id=self._instance_id,
                    incarnation=self._incarnation,
                    request_id=request.request_id,
                    chunk_blocks=self._chunks.blocks,
                    keys=self._chunks.keys(request, 0, self._asked(request)),
                    variant=question.variant,
                    tokens=request.num_tokens,
                    traceparent=traceparent(request),
                )
            )
        if number is None:
            self._full = True
            return False
        self._counters["lookups"] += 1
        del self._waiting[id(question)]
        question.lookup = number
        question.deadline = question.deadline or time.monotonic() + self._settings.lookup_timeout_ms / 1000
        self._in_flight[number] = question
        return True

    def answered(self, question: Question) -> bool:
        """Whether there is an answer that is not old. Waits for it within what is left of this pass's time."""
        now = time.monotonic()
        if question.hit_chunks is not None and now - question.answered_at <= self._longest_age:
            return True
        if (
            question.lookup is None and id(question) not in self._waiting
        ):  # the answer is old, or void since a preemption
            self.send(question)
        question.deadline = question.deadline or now + self._settings.lookup_timeout_ms / 1000
        self._receive_for(question)
        while question.hit_chunks is None and self._poll_left > 0 and (session := self.usable()) is not None:
            began = time.monotonic()
            came = session.channel.wait(max(self._poll_left, 0.001))
            self._poll_left -= time.monotonic() - began
            if not came:
                break
            self._receive_for(question)
        if question.hit_chunks is None and (self.usable() is None or time.monotonic() > question.deadline):
            self._give_up(question)
        return question.hit_chunks is not None

    def _receive_for(self, question: Question) -> None:
        """Receive answers; the places that they free are for the request that vLLM schedules now."""
        self.receive()
        if id(question) in self._waiting:
            self._send_now(question)

    def _give_up(self, question: Question) -> None:
        self._counters["lookup_timeouts"] += 1
        now = time.monotonic()
        # A lookup that was never sent is no sign of a hung daemon, as long as the daemon answers others.
        silent = question.lookup is not None or now - self._replied_at > self._settings.lookup_timeout_ms / 1000
        if silent and self._link.session is self._session and not self._link.breaker.open:
            self._link.breaker.timed_out()
        self.drop_question(question)
        self._answer(question, 0)
        question.timed_out = True

    @property
    def _longest_age(self) -> float:
        """The oldest answer that is used, in seconds: well within the lease."""
        lease = self._session.hello.lease_seconds if self._session is not None else 0.0
        seconds = self._settings.lookup_age_ms / 1000
        return min(seconds, lease / 2) if lease > 0 else seconds

    def _answer(self, question: Question, hit_chunks: int) -> None:
        question.hit_chunks = hit_chunks
        question.answered_at = time.monotonic()
        question.timed_out = False

    def receive(self) -> None:
        """Process every answer that has arrived."""
        if self._session is None:
            return
        for number, reply in self._session.channel.receive():
            self._link.breaker.answered()
            self._replied_at = time.monotonic()
            self._full = False
            question = self._in_flight.pop(number, None)
            if question is not None:
                question.lookup = None
                self._answer(question, reply.hit_chunks if isinstance(reply, LookupReply) else 0)
                self._counters["lookup_hits"] += question.hit_chunks != 0
            if isinstance(reply, Error):
                self._note_refusal(reply)
            self._on_reply(number, reply)

    def _note_refusal(self, error: Error) -> None:
        self._counters[f"refused_{error.code}"] += 1
        if self._counters[f"refused_{error.code}"] == 1:
            log.warning("kvserver refused a message of the scheduler: %s: %s", error.code, error.message)
        if error.code in _RENEW:
            self._link.refresh()

    def drop_question(self, question: Question) -> None:
        self._waiting.pop(id(question), None)
        if question.lookup is not None:
            self._in_flight.pop(question.lookup, None)
            question.lookup = None

    def close(self) -> None:
        self._hang_up()
        self._session = None

    def _hang_up(self) -> None:
        if self._session is not None:
            self._session.channel.close()
