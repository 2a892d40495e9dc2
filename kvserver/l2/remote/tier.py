"""A tier in a store that other daemons share: the contract of `l2.base` over the client of a store.

The loop's thread calls every method. drain() applies what lanes find out.

Owns: what the loop knows of its tickets, and what each result means for existence, breaker and status. Refuses to know: the
store's protocol (`valkey`, `s3`), what a request does there (`work`), threads and deadlines (`lanes`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvserver._native import RECORD_FORMAT, HostRegion
from kvserver.config import TierUrl
from kvserver.l2.base import ObjectMemory, ObjectName, State, TierCounts, TierEnd, TierOutcome
from kvserver.l2.failures import ObjectFailures
from kvserver.l2.remote.breaker import StoreBreaker
from kvserver.l2.remote.existence import Existence
from kvserver.l2.remote.generations import Generations
from kvserver.l2.remote.ids import HighestIds
from kvserver.l2.remote.lanes import BUNDLE_BYTES, Lanes, RunJobs, alone
from kvserver.l2.remote.names import Names, scope_of
from kvserver.l2.remote.read_only import reading
from kvserver.l2.remote.store import ConnectStore
from kvserver.l2.remote.work import Result, StoreObject, StoreWork, TierJob, failure, overdue
from kvserver.protocol import KEY_BYTES
from kvserver.protocol.status import TierStatus

_CORRUPT_TO_CLOSE = 8  # in a row
_UNREAD = {TierOutcome.UNAVAILABLE, TierOutcome.TIMEOUT, TierOutcome.CORRUPT}
_LEAST_CONTROL_SECONDS = 5.0  # for clears and for what the tier does by itself
_MOST_TOUCHED = 4096  # objects between two ticks

_WRITES = {"put", "drop", "touch", "clear"}  # jobs
_PROOFS = {"touch", "clear"}  # whose end as done shows that the store takes writes

_CLOSED = Result(TierOutcome.UNAVAILABLE, what="the tier is closed")


@dataclass(slots=True)
class _Ticket:
    kind: str
    shown: bool  # its end is the caller's; else it is a job of the tier's own
    namespace: bytes = b""
    name: ObjectName | None = None  # of a put or get
    void: bool = False  # a clear or drop of its object began meanwhile


class RemoteTier:
    """StorageTier over lanes: threads, each with a connection and a buffer as large as the largest command it has met."""

    shared = True

    def __init__(
        self,
        url: TierUrl,
        prefix: str,
        region: HostRegion,
        page_bytes: int,
        connect: ConnectStore,
        lanes: int,
        bundle_bytes: int = BUNDLE_BYTES,
        folder: str = "",
    ) -> None:
        """`folder`: where the highest ids of generations are kept; "": in memory."""
        self.name, self.kind, self.url = url.name, url.kind, url.shown
        self._read_only, self._required = url.read_only, url.required
        self._control_ns = int(max(_LEAST_CONTROL_SECONDS, url.timeout_seconds) * 1e9)
        names = Names(prefix, RECORD_FORMAT)
        self._generations = Generations(names, HighestIds(folder, f"ids-{url.name}"))
        self._work = StoreWork(names, self._generations, region, page_bytes, url.read_only)
        self._existence = Existence()
        self._failures = ObjectFailures()
        self._breaker = StoreBreaker()  # of reads
        self._writes = StoreBreaker()
        self._counts = TierCounts()
        self._touched: dict[ObjectName, None] = {}  # in the order of use
        self._tickets: dict[int, _Ticket] = {}
        self._numbers = itertools.count(1)
        self._corrupt_in_a_row = 0
        self._failed_command = 0
        self._opening = True
        self._learns = False  # generations are being found out
        self._closed = ""
        self._last_failure = self._last_refusal = ""  # of reads, of writes
        connect = reading(connect) if url.read_only else connect
        self._lanes = Lanes[Result](f"l2-{self.name}", lanes, connect, overdue, failure, bundle_bytes, url.seconds_for)
        self._ping()

    # ---- what it is -------------------------------------------------------------------------------

    @property
    def completion_fd(self) -> int:
        return self._lanes.completion_fd

    @property
    def state(self) -> State:
        if self._closed:
            return "closed"
        if self._opening:
            return "opening"
        if not self._breaker.passes:
            return "unavailable"
        return "ready" if self._takes_writes else "read_only"

    @property
    def _takes_writes(self) -> bool:
        return self._writes.passes and not self._read_only

    @property
    def failure(self) -> str:
        if self._closed or not self._breaker.passes:
            return self._closed or self._last_failure
        return "" if self._read_only or self._writes.passes else f"it takes no writes: {self._last_refusal}"

    def status(self) -> TierStatus:
        return TierStatus(
            name=self.name,
            kind=self.kind,
            url=self.url,
            state=self.state,
            failure=self.failure,
            required=self._required,
            objects=len(self._existence),
            breaker=self._breaker.state,
            breaks=self._breaker.breaks,
            **vars(self._counts),
        )

    # ---- requests -----------------------------------------------------------------------------------

    def holds(self, namespace: bytes, group: int, keys: bytes) -> int:
        if self._refusal():
            return 0
        now_ns = time.monotonic_ns()
        found = self._existence.bitmap(namespace, group, keys, now_ns)
        return self._failures.shown(found, namespace, group, keys, now_ns)

    def probe(
        self, namespace: bytes, group: int, keys: bytes, chain: bool, deadline_ns: int, again: bool = False
    ) -> int:
        now_ns = time.monotonic_ns()
        names = _names_of(namespace, group, keys)
        known = [self._existence.find(name, now_ns) for name in names]
        if again:
            known = [present or None for present in known]
        if chain and False in known:
            del names[known.index(False) :]
        unknown = [name for name, present in zip(names, known, strict=False) if present is None]
        ticket = _Ticket("probe", True, namespace)
        if not unknown and not self._refusal():
            return self._end_at_once(ticket, Result(TierOutcome.DONE))
        run = alone(lambda job, lane: self._work.probe(job, lane, unknown, chain))
        return self._begin(ticket, run, deadline_ns)

    def put(self, name: ObjectName, memory: ObjectMemory, parent: bytes, deadline_ns: int) -> int:
        ticket = _Ticket("put", True, name.namespace, name)
        present, replaces = self._existence.find(name, time.monotonic_ns()), name in self._failures
        if not self._takes_writes and not self._refusal():
            return self._end_at_once(
                ticket, Result(TierOutcome.UNAVAILABLE, what=self.failure or "the tier is read only")
            )
        if present and not replaces and not self._refusal():
            return self._end_at_once(ticket, Result(TierOutcome.DONE))
        return self._begin(
            ticket,
            self._work.put,
            deadline_ns,
            reads=False,
            item=StoreObject(name, memory, absent=present is False, replaces=replaces),
            bundle=("put", name.namespace),
            bytes=memory.bytes,
        )

    def get(self, name: ObjectName, memory: ObjectMemory, deadline_ns: int) -> int:
        ticket = _Ticket("get", True, name.namespace, name)
        return self._begin(
            ticket,
            self._work.get,
            deadline_ns,
            item=StoreObject(name, memory),
            bundle=("get", name.namespace),
            bytes=memory.bytes,
        )

    def touch(self, namespace: bytes, group: int, keys: bytes) -> None:
        now_ns = time.monotonic_ns()
        for name in reversed(_names_of(namespace, group, keys)):
            if self._existence.find(name, now_ns) and (name in self._touched or len(self._touched) < _MOST_TOUCHED):
                self._touched.pop(name, None)
                self._touched[name] = None

    def drop(self, namespace: bytes, group: int, keys: bytes) -> None:
        names = _names_of(namespace, group, keys)
        for name in names:
            self._existence.forget(name)
            self._failures.forget(name)
            self._touched.pop(name, None)
        dropped = set(names)
        self._void(lambda ticket: ticket.name in dropped)
        if names and self._takes_writes and not self._refusal():
            self._begin_own("drop", alone(lambda job, lane: self._work.delete(lane, names)))

    def clear(self, prefix: bytes) -> int:
        scope = scope_of(prefix)
        # First, so that no put of before takes the new generation, which a lane may write at any time after the next line.
        self._void(lambda ticket: ticket.kind != "clear" and ticket.shown and ticket.namespace.startswith(scope))
        self._generations.clear(scope)
        self._existence.forget_namespaces(scope)
        self._touched = {name: None for name in self._touched if not name.namespace.startswith(scope)}
        deadline_ns = time.monotonic_ns() + self._control_ns
        # Of a tier that is closed or cut off, too: after a restart it would serve what was cleared.
        run = alone(lambda job, lane: self._work.clear(lane, scope))
        return self._submit(_Ticket("clear", True, scope), run, deadline_ns)

    def generation(self, namespace: bytes) -> int | None:
        return self._generations.seen(namespace)

    def learn_generations(self, namespaces: Sequence[bytes]) -> None:
        if namespaces and not self._learns and not self._refusal():
            self._learns = True
            self._begin_own("learn", alone(lambda job, lane: self._work.learn(lane, namespaces)))

    def cancel(self, ticket: int) -> None:
        self._lanes.end(ticket, Result(TierOutcome.CANCELLED))

    def tick(self, now_ns: int) -> None:
        if self._breaker.begins_probe(now_ns) or (
            self._breaker.passes and not self._read_only and self._writes.begins_probe(now_ns)
        ):
            self._lanes.reconnect()
            self._ping()
        if self._touched and not self._refusal():
            names, self._touched = list(self._touched) * self._takes_writes, {}
            if names:
                self._begin_own("touch", alone(lambda job, lane: self._work.refresh(lane, names)))

    def drain(self) -> Sequence[TierEnd]:
        ends: list[TierEnd] = []
        done = self._lanes.drain()
        for namespace in self._generations.changed():
            self._existence.forget_namespaces(namespace)
        for job, result in done:
            ticket = self._tickets.pop(job.number)
            result = self._apply(ticket, job, result)
            if ticket.shown:
                ends.append(TierEnd(job.number, result.outcome, result.bytes, _nanos(job), result.what))
        return ends

    def close(self, deadline_ns: int) -> None:
        self._closed = self._closed or "the tier is closed"
        self._lanes.close(deadline_ns, _CLOSED)

    # ---- jobs -----------------------------------------------------------------------------------------

    def _refusal(self) -> str:
        """Reason why no request is sent; empty if one is."""
        if self._closed or self._breaker.passes:
            return self._closed
        return "it is opening" if self._opening else f"its breaker is open: {self._last_failure}"

    def _begin(
        self, ticket: _Ticket, run: RunJobs[Result], deadline_ns: int, reads: bool = True, **options: Any
    ) -> int:
        if refusal := self._refusal():
            return self._end_at_once(ticket, Result(TierOutcome.UNAVAILABLE, what=refusal))
        return self._submit(ticket, run, deadline_ns, reads, **options)

    def _submit(
        self, ticket: _Ticket, run: RunJobs[Result], deadline_ns: int, reads: bool = True, **options: Any
    ) -> int:
        """`options`: fields of a Job."""
        job = TierJob(next(self._numbers), run, reads, deadline_ns, **options)
        self._tickets[job.number] = ticket
        if not self._lanes.submit(job):
            self._lanes.end_at_once(job, Result(TierOutcome.UNAVAILABLE, what="its queue is full or ended"))
        return job.number

    def _begin_own(self, kind: str, run: RunJobs[Result]) -> None:
        self._begin(_Ticket(kind, False), run, time.monotonic_ns() + self._control_ns)

    def _ping(self) -> None:
        """Find out whether the store is there; beside clears the only request that passes a breaker that is not closed."""
        deadline_ns = time.monotonic_ns() + self._control_ns
        self._submit(_Ticket("ping", False), alone(lambda job, lane: self._work.ping(lane)), deadline_ns)

    def _end_at_once(self, ticket: _Ticket, result: Result) -> int:
        job = TierJob(next(self._numbers), alone(_never), True, 0)
        self._tickets[job.number] = ticket
        self._lanes.end_at_once(job, result)
        return job.number

    def _void(self, concerns: Callable[[_Ticket], bool]) -> None:
        """Void these tickets: their results count no more, whether or not they have ended."""
        for number, ticket in self._tickets.items():
            if concerns(ticket):
                ticket.void = True
                self.cancel(number)

    # ---- results --------------------------------------------------------------------------------------

    def _apply(self, ticket: _Ticket, job: TierJob, result: Result) -> Result:
        if ticket.kind == "get" and not ticket.void:
            self._remember(ticket, job, result)
        if ticket.kind == "learn":
            self._learns = False
        if ticket.kind == "ping":
            self._opening = False
            self._judge_ping(result)
        elif result.failed:
            if not 0 < job.command == self._failed_command:  # what shares a command fails once
                self._failed_command = job.command
                self._fail(ticket.kind in _WRITES, result)
        elif result.answered:
            if ticket.kind in _WRITES:
                if result.bytes or ticket.kind in _PROOFS:  # else the store had it, or may have removed nothing
                    self._writes.succeeded()
            else:
                self._breaker.succeeded()
                self._failures.answered()
        if ticket.void:
            result = Result(TierOutcome.CANCELLED)
        self._existence.note_all(result.exists, job.ended_ns)
        if ticket.kind in ("put", "get"):
            _count(self._counts, ticket.kind, result)
            self._watch_corruption(result.outcome)
        return result

    def _judge_ping(self, result: Result) -> None:
        if not result.answered:
            self._fail(False, result)
        else:
            self._breaker.succeeded()
        if not self._read_only:
            if result.refused or not result.answered:
                self._last_refusal = result.refused or result.what
                self._writes.failed(time.monotonic_ns())
            else:
                self._writes.succeeded()

    def _fail(self, writes: bool, result: Result) -> None:
        """Reads and writes are judged apart; a store that did not answer a write may not answer a read either."""
        now_ns = time.monotonic_ns()
        if writes:
            self._last_refusal = result.what
            if self._writes.failed(now_ns):
                self._lanes.reconnect()
        if not writes or not result.answered:
            self._last_failure = result.what
            if self._breaker.failed(now_ns):
                self._lanes.reconnect()
                self._failures.blame_tier()
                why = f"its breaker is open: {result.what}"
                self._lanes.end_all(Result(TierOutcome.UNAVAILABLE, what=why))

    def _remember(self, ticket: _Ticket, job: TierJob, result: Result) -> None:
        """An object that cannot be read is not promised for a while. A put of it is written, and proves nothing."""
        assert ticket.name is not None
        if result.outcome is TierOutcome.DONE:
            self._failures.forget(ticket.name)
        elif job.began_ns and result.outcome in _UNREAD:
            self._failures.note(ticket.name, job.ended_ns)

    def _watch_corruption(self, outcome: TierOutcome) -> None:
        if outcome is TierOutcome.CORRUPT:
            self._corrupt_in_a_row += 1
            if self._corrupt_in_a_row == _CORRUPT_TO_CLOSE:
                self._closed = f"{_CORRUPT_TO_CLOSE} objects in a row failed their checks"
                self._lanes.end_all(Result(TierOutcome.UNAVAILABLE, what=self._closed))
        elif outcome is TierOutcome.DONE:
            self._corrupt_in_a_row = 0


def _count(counts: TierCounts, kind: str, result: Result) -> None:
    """Add the end of a put or get."""
    outcome, of_get = result.outcome, kind == "get"
    failed = outcome is TierOutcome.UNAVAILABLE and result.failed
    counts.misses += outcome is TierOutcome.MISSING
    counts.corrupt += outcome is TierOutcome.CORRUPT
    counts.full += outcome is TierOutcome.FULL
    counts.add_failure(outcome is TierOutcome.TIMEOUT, failed, of_get)
    if outcome is TierOutcome.DONE and of_get:
        counts.hits += 1
        counts.read_bytes += result.bytes
    elif outcome is TierOutcome.DONE and result.bytes:
        counts.written_objects += 1
        counts.written_bytes += result.bytes


def _nanos(job: TierJob) -> int:
    """The job's share of the time of its command."""
    return int((job.ended_ns - job.began_ns) * job.share) if job.began_ns else 0


def _never(job: TierJob, lane: object) -> Result:
    raise AssertionError("a job that was ended at once runs")


def _names_of(namespace: bytes, group: int, keys: bytes) -> list[ObjectName]:
    return [ObjectName(namespace, group, keys[first : first + KEY_BYTES]) for first in range(0, len(keys), KEY_BYTES)]
