"""The scheduler half's notices to the daemon: what the block pool did, and which requests ended.

A full state is due at the start of a session, after records or a notice were lost, and when the daemon requests it. A pass sends
one report at most; only a full state that exceeds one message is split.

Owns: the sequence of these notices, and when a full state is due. Refuses to know: lookups, loads, stores, and how a daemon uses
a report.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Protocol

from kvserver.adapters.common.dispatcher import Dispatcher
from kvserver.protocol import EndRequest, Error, ErrorCode, ExactRecords, HelloReply, ReportBlockAllocations

_LOST = {ErrorCode.REPORT_GAP.value, ErrorCode.UNKNOWN_INSTANCE.value, ErrorCode.DUPLICATE_INSTANCE.value}
_REST = 50  # times the duration of a full state: a daemon that always requests another costs 2% of the engine's thread


@dataclass(frozen=True)
class EngineNames:
    instance_id: str
    incarnation: str  # of this start of the engine
    model_name: str


@dataclass(frozen=True)
class Records:
    """Records of the block pool: the fields of ExactRecords with the same names."""

    records: bytes
    marks: bytes


class RecordedPool(Protocol):
    """The engine's pool of blocks, and what happened to them since the last drain."""

    lost: bool  # records were dropped: the daemon needs a full state

    @property
    def has_records(self) -> bool: ...

    def drain_records(self) -> Records:
        """The records since the last call. REQUIRES: not `lost`."""

    def drain_full_state(self) -> list[Records]:
        """Records that build the pool's present state from an empty pool; one message each."""


@dataclass(slots=True)
class Prompt:
    """Prompt tokens of a request by source: the fields of EndRequest with the same names."""

    prompt_tokens: int = 0
    local_tokens: int = 0
    loaded_tokens: int = 0
    loads: int = 0
    failed_loads: int = 0
    l2_tokens: int = 0


class Notices:
    def __init__(self, dispatcher: Dispatcher, names: EngineNames, pool: RecordedPool, counters: Counter[str]) -> None:
        self._dispatcher = dispatcher
        self._sender = asdict(names)
        self._pool = pool
        self._counters = counters
        self._sequence = 0
        self._full_due = True
        self._full_number = 0  # of the last full state's message: refusals of earlier messages no longer matter
        self._full_after = 0.0
        dispatcher.on_session.append(self._begin_session)
        dispatcher.on_refusal.append(self._refused)

    def _begin_session(self, hello: HelloReply | None) -> None:
        self._full_due = True
        self._full_number = 0
        self._full_after = 0.0

    def _refused(self, number: int, error: Error) -> None:
        """A daemon that does not know the instance does not know its blocks either, whatever message it refused."""
        if error.code in _LOST and number >= self._full_number:
            self._full_due = True

    def end_request(self, request_id: str, prefill_speed: float, prompt: Prompt, not_loaded: str = "") -> None:
        if self._dispatcher.usable() is None:
            return
        end = EndRequest(
            **self._sender,
            sequence=self._sequence,
            request_id=request_id,
            prefill_tokens_per_second=prefill_speed,
            **asdict(prompt),
            not_loaded=not_loaded,
        )
        self._send(end)

    @property
    def has_unsent_records(self) -> bool:
        """True if the next pass sends records. False while a full state is due, which is sent at its own time."""
        return self._pool.has_records and not (self._full_due or self._pool.lost)

    def send_blocks(self) -> None:
        """Send what the pool did since the last pass, or a full state. Ends a scheduler pass."""
        if self._dispatcher.usable() is None:
            return
        if not (self._full_due or self._pool.lost):
            if (taken := self._pool.drain_records()).records:
                self._send_records(taken, full=False)
        elif (began := time.monotonic()) >= self._full_after:
            self._send_full()
            now = time.monotonic()
            self._full_after = now + _REST * (now - began)

    def _send_full(self) -> None:
        first, *others = self._pool.drain_full_state()
        self._full_due = False
        self._counters["full_states"] += 1
        self._full_number = self._send_records(first, full=True) or 0
        for part in others:
            self._send_records(part, full=False)

    def _send_records(self, taken: Records, full: bool) -> int | None:
        payload = ExactRecords(records=taken.records, marks=taken.marks, full=full)
        return self._send(ReportBlockAllocations(**self._sender, sequence=self._sequence, payload=payload))

    def _send(self, notice: ReportBlockAllocations | EndRequest) -> int | None:
        """A notice that cannot be sent is lost, and leaves a gap in the sequence. The next connection may be to another
        daemon, which cannot see the gap: a full state is sent first.
        """
        self._sequence += 1
        number = self._dispatcher.send(notice)
        self._counters["notices" if number is not None else "unsent"] += 1
        self._full_due = self._full_due or number is None
        return number
