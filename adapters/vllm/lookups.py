"""The scheduler half's lookups: sent as a request comes, polled for when vLLM asks.

Owns: the session of the scheduler half and the lookups in flight in it. Refuses to know: loads, stores, blocks.
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

from kvserver.adapters.vllm.chunks import Chunks
from kvserver.adapters.vllm.link import Link, Session
from kvserver.adapters.vllm.settings import AdapterSettings

from kvserver.errors import ErrorCode
from kvserver.protocol import MAX_CHUNKS, Error, Lookup, LookupReply, Reply

if TYPE_CHECKING:
    from vllm.v1.request import Request

log = logging.getLogger("vllm.kvserver")

_LONGEST_TRACEPARENT = 512  # as the protocol has it
# What a daemon may say that is not the one of this session: it took the endpoint of a dead one, and our workers are there already.
_RENEW = {
    ErrorCode.UNKNOWN_INSTANCE.value,
    ErrorCode.BAD_KEYS.value,
    ErrorCode.DUPLICATE_INSTANCE.value,
    ErrorCode.REPORT_GAP.value,
}


def traceparent(request: Request) -> str:
    """Of the headers that came with the request; empty if there is none."""
    for name, value in (getattr(request, "trace_headers", None) or {}).items():
        if name.lower() == "traceparent" and len(value) <= _LONGEST_TRACEPARENT:
            return str(value)
    return ""


@dataclass(slots=True)
class Question:
    """How many of its chunks, from the first on, the daemon has."""

    request: Request
    variant: str
    lookup: int | None = None  # number of the lookup in flight
    lookup_deadline: float = 0.0
    hit_chunks: int | None = None  # its answer; None = not asked or not answered


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
        heard: Callable[[int, Reply], None],
    ) -> None:
        """`new_session`: no answer to anything asked before will come. `heard`: to whichever message, by its number."""
        self._settings = settings
        self._link = link
        self._instance_id = instance_id
        self._incarnation = incarnation
        self._chunks = chunks
        self._counters = counters
        self._new_session = new_session
        self._heard = heard
        self._session: Session | None = None
        self._in_flight: dict[int, Question] = {}
        self._poll_left = 0.0
        self.next_pass()

    def next_pass(self) -> None:
        self._poll_left = self._settings.lookup_poll_ms / 1000

    def usable(self) -> Session | None:
        """The session to talk to; a new one means that answers from the old one will never come."""
        session = self._link.usable()
        current = self._link.session
        if current is not self._session:
            self._in_flight.clear()
            self._new_session()
            self._hang_up()
            self._session = current
            self._chunks.resize(current.hello.chunk_tokens if current is not None else 0)
        return session if session is current else None

    def send(self, question: Question) -> None:
        session = self.usable()
        request = question.request
        asked = min(self._chunks.hashed(request), MAX_CHUNKS)  # so a hit, and the load of it, is one message too
        keys = self._chunks.keys(request, 0, asked) if session is not None else b""
        number = None
        if session is not None and keys:
            number = session.channel.send(
                Lookup(
                    instance_id=self._instance_id,
                    incarnation=self._incarnation,
                    request_id=request.request_id,
                    chunk_blocks=self._chunks.blocks,
                    keys=keys,
                    variant=question.variant,
                    tokens=request.num_tokens,
                    traceparent=traceparent(request),
                )
            )
            self._counters["lookups" if number is not None else "unsent"] += 1
        if number is None:
            question.hit_chunks = 0
            return
        question.lookup = number
        question.hit_chunks = None
        question.lookup_deadline = time.monotonic() + self._settings.lookup_timeout_ms / 1000
        self._in_flight[number] = question

    def answered(self, question: Question) -> bool:
        """Whether the lookup has its answer, waiting what is left of this pass's budget."""
        if question.lookup is None:  # after a preemption
            self.send(question)
        self.receive()
        while question.hit_chunks is None and self._poll_left > 0 and (session := self.usable()) is not None:
            began = time.monotonic()
            came = session.channel.wait(max(self._poll_left, 0.001))
            self._poll_left -= time.monotonic() - began
            if not came:
                break
            self.receive()
        if question.hit_chunks is None and (self.usable() is None or time.monotonic() > question.lookup_deadline):
            self._counters["lookup_timeouts"] += 1
            if self._link.session is self._session and not self._link.breaker.open:
                self._link.breaker.timed_out()
            self.forget(question)
            question.hit_chunks = 0
        return question.hit_chunks is not None

    def receive(self) -> None:
        """Take every answer that has come."""
        if self._session is None:
            return
        for number, reply in self._session.channel.receive():
            self._link.breaker.answered()
            question = self._in_flight.pop(number, None)
            if question is not None:
                question.lookup = None
                question.hit_chunks = reply.hit_chunks if isinstance(reply, LookupReply) else 0
                self._counters["lookup_hits"] += question.hit_chunks > 0
            if isinstance(reply, Error):
                self._note_refusal(reply)
            self._heard(number, reply)

    def _note_refusal(self, error: Error) -> None:
        self._counters[f"refused_{error.code}"] += 1
        if self._counters[f"refused_{error.code}"] == 1:
            log.warning("kvserver refused a message of the scheduler: %s: %s", error.code, error.message)
        if error.code in _RENEW:
            self._link.refresh()

    def forget(self, question: Question) -> None:
        if question.lookup is not None:
            self._in_flight.pop(question.lookup, None)
            question.lookup = None

    def close(self) -> None:
        self._hang_up()
        self._session = None

    def _hang_up(self) -> None:
        if self._session is not None:
            self._session.channel.close()
