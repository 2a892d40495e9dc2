"""The scheduler half's notices to the daemon: what the block pool did, and which requests ended.

Owns: the sequence of these notices, and when a full state is due: at the start of a session, when records or a notice
were lost, when the daemon requests it. Refuses to know: lookups, loads, stores, and how a daemon uses a report.

A pass sends one report at most; only a full state is split where one message cannot carry it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from kvserver.adapters.common.link import Session
from kvserver.adapters.vllm.blockpool import PoolHook, Records
from kvserver.adapters.vllm.sources import Prompt

from kvserver.protocol import EndRequest, Error, ErrorCode, ExactRecords, ReportBlockAllocations

_LOST = {ErrorCode.REPORT_GAP.value, ErrorCode.UNKNOWN_INSTANCE.value, ErrorCode.DUPLICATE_INSTANCE.value}
_REST = 50  # times the duration of a full state: a daemon that always requests another costs 2% of the engine's thread


class Notices:
    """begin_session() for each session, before its first notice."""

    def __init__(
        self,
        instance_id: str,
        incarnation: str,
        model_name: str,
        pool: PoolHook,
        counters: Counter[str],
        unsent: Callable[[], None] = lambda: None,
    ) -> None:
        """`unsent`: called for a notice that had no connection. The next connection may be to another daemon, which
        cannot see the gap: a full state is sent first.
        """
        self._sender: dict[str, Any] = {
            "instance_id": instance_id,
            "incarnation": incarnation,
            "model_name": model_name,
        }
        self._pool = pool
        self._counters = counters
        self._unsent = unsent
        self._sequence = 0
        self._full_due = True
        self._full_number = 0  # of the last full state's message: refusals of earlier messages no longer matter
        self._full_after = 0.0

    def begin_session(self) -> None:
        self._full_due = True
        self._full_number = 0
        self._full_after = 0.0

    def refused(self, number: int, error: Error) -> None:
        """Any message was refused: a daemon that does not know the instance does not know its blocks either."""
        if error.code in _LOST and number >= self._full_number:
            self._full_due = True

    def end_request(
        self, session: Session, request_id: str, prefill_speed: float, prompt: Prompt, not_loaded: str = ""
    ) -> None:
        end = EndRequest(
            **self._sender,
            sequence=self._sequence,
            request_id=request_id,
            prefill_tokens_per_second=prefill_speed,
            prompt_tokens=prompt.prompt_tokens,
            local_tokens=prompt.local_tokens,
            loaded_tokens=prompt.loaded_tokens,
            loads=prompt.loads,
            failed_loads=prompt.failed_loads,
            not_loaded=not_loaded,
        )
        self._send(session, end)

    @property
    def has_unsent_records(self) -> bool:
        """Whether the next pass sends records; False while a full state is due, which is sent at its own time."""
        return self._pool.has_records and not (self._full_due or self._pool.lost)

    def send_blocks(self, session: Session) -> None:
        """Send what the pool did since the last pass, or a full state. Ends a scheduler pass."""
        if not (self._full_due or self._pool.lost):
            if (taken := self._pool.drain_records()).records:
                self._send_records(session, taken, full=False)
        elif (began := time.monotonic()) >= self._full_after:
            self._send_full(session)
            now = time.monotonic()
            self._full_after = now + _REST * (now - began)

    def _send_full(self, session: Session) -> None:
        first, *others = self._pool.drain_full_state()
        self._full_due = False
        self._counters["full_states"] += 1
        self._full_number = self._send_records(session, first, full=True) or 0
        for part in others:
            self._send_records(session, part, full=False)

    def _send_records(self, session: Session, taken: Records, full: bool) -> int | None:
        payload = ExactRecords(records=taken.records, marks=taken.marks, full=full)
        return self._send(session, ReportBlockAllocations(**self._sender, sequence=self._sequence, payload=payload))

    def _send(self, session: Session, notice: ReportBlockAllocations | EndRequest) -> int | None:
        """A notice that cannot be sent is lost, and leaves a gap in the sequence."""
        self._sequence += 1
        number = session.channel.send(notice)
        self._counters["notices" if number is not None else "unsent"] += 1
        if number is None:
            self._full_due = True
            self._unsent()
        return number
