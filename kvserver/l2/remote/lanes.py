"""Threads of a tier whose store is remote: lanes, which call the client, and a clock, which ends what is overdue.

A job is QUEUED, then AWAY: with the client, which sees only the lane's own buffer. For moments it is INSIDE, copying to or from
L1. Last it is ENDED. The clock and the loop end a job that is QUEUED or AWAY at once, even if its lane hangs. A job that is
INSIDE ends when it leaves. So a client that hangs keeps its lane and that lane's buffer, never memory of L1.

Small jobs of one bundle share a command: a lane takes as many as are queued behind each other, up to the bytes of a bundle. Each
has its own deadline and its own end.

The first lane runs readers only, the others readers first: a get never waits for a put. One lock guards all state; no thread
keeps it while it copies or waits for a store.

Owns: the queue, the phases of each job and its one end. Refuses to know: what a job does, and what its result means.
"""

from __future__ import annotations

import contextlib
import enum
import heapq
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

from kvserver.l2.remote.buffer import LaneBuffer
from kvserver.l2.remote.store import ConnectStore, StoreClient, StoreClosed

log = logging.getLogger(__name__)

MOST_QUEUED = 1024  # of readers, and of the others
BUNDLE_BYTES = 1 << 20  # of jobs that share a command; the last one may go beyond
R = TypeVar("R")


class JobPhase(enum.Enum):
    QUEUED = enum.auto()
    AWAY = enum.auto()
    INSIDE = enum.auto()
    ENDED = enum.auto()


class JobEnded(Exception):
    """Job that has been ended meanwhile."""


@dataclass(eq=False, slots=True)
class Job(Generic[R]):
    number: int
    run: RunJobs[R]
    reads: bool
    deadline_ns: int
    item: Any = None  # what `run` needs to know of it
    bundle: Hashable = None  # jobs with the same one are run together by `run` of the first; None: it is run alone
    bytes: int = 0
    command: int = 0  # the number of the command that it is part of, and
    share: float = 1.0  # how much of that is its
    began_ns: int = 0  # when a lane began with it; 0: none did
    ended_ns: int = 0
    phase: JobPhase = JobPhase.QUEUED
    verdict: R | None = None  # how it ends as soon as it leaves L1


class Lane:
    """State of one thread: a client, made by its first job, and a buffer.

    `inside(job)`: the context in which the job touches L1. If the job has ended, it ends the lane's work, before or behind it.
    """

    def __init__(
        self, connect: ConnectStore, inside: Callable[[Job[Any]], AbstractContextManager[None]], covers: int
    ) -> None:
        self.buffer = LaneBuffer(covers)
        self.inside = inside
        self.connections = 0  # the number of Lanes.reconnect() calls before its client was made
        self._connect = connect
        self._client: StoreClient | None = None

    @property
    def client(self) -> StoreClient:
        """StoreError if there is no connection."""
        if self._client is None:
            self._client = self._connect(self.buffer)
        return self._client

    def client_for(self, size: int) -> StoreClient:
        """The client, whose time-outs suffice for a command of so many bytes: another one if they did not."""
        if size > self.buffer.covers:
            self.buffer.covers = max(size, 2 * self.buffer.covers)
            self.disconnect()
        return self.client

    def check(self, job: Job[Any]) -> None:
        """End the lane's work if the job has ended."""
        if job.phase is JobPhase.ENDED:
            raise JobEnded

    def disconnect(self) -> None:
        """The next job makes another client."""
        client, self._client = self._client, None
        if client is not None:
            client.close()


# Of a job that has ended meanwhile there need be no result.
RunJobs: TypeAlias = Callable[[Sequence[Job[R]], Lane], dict[Job[R], R]]


def alone(run: Callable[[Job[R], Lane], R]) -> RunJobs[R]:
    """Wrap a function of one job for jobs of no bundle."""
    return lambda jobs, lane: {jobs[0]: run(jobs[0], lane)}


@dataclass(slots=True)
class _Open(Generic[R]):
    """The jobs that have not ended."""

    jobs: dict[int, Job[R]] = field(default_factory=dict)
    readers: deque[Job[R]] = field(default_factory=deque)
    others: deque[Job[R]] = field(default_factory=deque)
    deadlines: list[tuple[int, int]] = field(default_factory=list)  # a heap; of ended jobs, too


class Lanes(Generic[R]):
    """Lanes of one tier. REQUIRES: submit, end, drain and close are called by one thread; numbers are used once."""

    def __init__(
        self,
        name: str,
        count: int,
        connect: ConnectStore,
        overdue: Callable[[bool], R],
        failed: Callable[[Exception], R],
        bundle_bytes: int = BUNDLE_BYTES,
        seconds_for: Callable[[int], float] = lambda size: 0.0,
    ) -> None:
        """`seconds_for`: that a command of so many bytes which writes may take from its begin on, whatever its deadline was.
        `overdue`: the result of a job whose time is over; its argument: whether the store, not the queue, is to blame.
        `failed`: the result of a job that raised."""
        assert count >= 2, "one lane is for readers only"
        self.completion_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._overdue, self._failed = overdue, failed
        self._bundle_bytes = bundle_bytes
        self._seconds_for = seconds_for
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # a job was queued, or the end has begun
        self._time = threading.Condition(self._lock)  # an earlier deadline
        self._left = threading.Condition(self._lock)  # a job left L1
        self._open = _Open[R]()
        self._running: dict[Lane, list[Job[R]]] = {}
        self._commands = itertools.count(1)
        self._done: list[tuple[Job[R], R]] = []
        self._closing = False
        self._connections = 0
        self._lanes = [Lane(connect, self._inside, 2 * bundle_bytes) for _ in range(count)]
        self._threads = [
            threading.Thread(target=self._serve, args=(lane, number > 0), name=f"{name}-{number}", daemon=True)
            for number, lane in enumerate(self._lanes)
        ]
        self._threads.append(threading.Thread(target=self._watch_clock, name=f"{name}-clock", daemon=True))
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job[R]) -> bool:
        """Queue a job. False: the queue is full."""
        with self._lock:
            queue = self._open.readers if job.reads else self._open.others
            if len(queue) >= MOST_QUEUED or self._closing:
                return False
            queue.append(job)
            self._open.jobs[job.number] = job
            heapq.heappush(self._open.deadlines, (job.deadline_ns, job.number))
            self._work.notify(1 if job.reads else 2)  # of two that wait one is for all kinds
            if self._open.deadlines[0][1] == job.number:
                self._time.notify()
            return True

    def end(self, number: int, result: R) -> None:
        """End a job with this result: at once, or when it leaves L1. One that has ended stays as it is."""
        with self._lock:
            if (job := self._open.jobs.get(number)) is not None:
                self._end_outside(job, result)

    def end_at_once(self, job: Job[R], result: R) -> None:
        """End a job that was never submitted."""
        with self._lock:
            self._open.jobs[job.number] = job
            self._end(job, result)

    def end_all(self, result: R) -> None:
        with self._lock:
            for job in list(self._open.jobs.values()):
                self._end_outside(job, result)

    def reconnect(self) -> None:
        """Give each lane another client for its next job. The present ones may be connected to what was the primary."""
        with self._lock:
            self._connections += 1

    def drain(self) -> list[tuple[Job[R], R]]:
        """The jobs that ended since the last call."""
        with self._lock:
            if not self._closing:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self.completion_fd)
            done, self._done = self._done, []
        return done

    def close(self, deadline_ns: int, result: R) -> None:
        """End every job and thread. A thread that hangs in its client stays, with its own buffer. A second call does nothing."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._work.notify_all()
            self._time.notify()
        self.end_all(result)
        with self._lock:
            # Copies end by themselves, in milliseconds; L1 may be unmapped after this.
            self._left.wait_for(lambda: not self._open.jobs)
        for thread in self._threads:
            thread.join(max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9))
        os.close(self.completion_fd)

    # ---- the lanes ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _inside(self, job: Job[R]) -> Iterator[None]:
        with self._lock:
            if job.phase is JobPhase.ENDED:
                raise JobEnded
            job.phase = JobPhase.INSIDE
        try:
            yield
        finally:
            with self._lock:
                job.phase = JobPhase.AWAY
                if job.verdict is not None:
                    self._end(job, job.verdict)
                ended = job.phase is JobPhase.ENDED
        if ended:
            raise JobEnded

    def _serve(self, lane: Lane, all_kinds: bool) -> None:
        with contextlib.suppress(Exception):  # which the first job meets again, and reports
            _ = lane.client  # before a job waits for it
        while jobs := self._next(lane, all_kinds):
            results: dict[Job[R], R] = {}
            if lane.connections != self._connections:
                lane.connections = self._connections
                _disconnect(lane)
            try:
                results = jobs[0].run(jobs, lane)
            except JobEnded:
                pass
            except StoreClosed as error:
                _disconnect(lane)
                results = dict.fromkeys(jobs, self._failed(error))
            except Exception as error:
                results = dict.fromkeys(jobs, self._failed(error))
            with self._lock:
                del self._running[lane]
                for job in jobs:
                    if job in results:
                        self._end(job, results[job])
                    assert job.phase is JobPhase.ENDED, "a job without a result"
        _disconnect(lane)
        lane.buffer.free()

    def _next(self, lane: Lane, all_kinds: bool) -> list[Job[R]]:
        """The jobs of the next command, AWAY; none: the lane ends."""
        with self._lock:
            while not self._closing:
                for queue in (self._open.readers, self._open.others) if all_kinds else (self._open.readers,):
                    if jobs := _take_bundle(queue, self._bundle_bytes):
                        command, size, now_ns = (
                            next(self._commands),
                            sum(job.bytes for job in jobs),
                            time.monotonic_ns(),
                        )
                        for job in jobs:
                            job.phase, job.began_ns, job.command = JobPhase.AWAY, now_ns, command
                            job.share = job.bytes / size if size else 1.0
                        self._give_time(jobs, size, now_ns)
                        self._running[lane] = jobs
                        return jobs
                self._work.wait()
        return []

    def _give_time(self, jobs: Sequence[Job[R]], size: int, now_ns: int) -> None:
        """Extend the deadlines of a command that writes, whatever it waited before. A get stays due: its request waits. REQUIRES: the lock."""
        if size and not jobs[0].reads:
            deadline_ns = now_ns + int(self._seconds_for(size) * 1e9)
            for job in jobs:
                if job.deadline_ns < deadline_ns:
                    job.deadline_ns = deadline_ns
                    heapq.heappush(self._open.deadlines, (deadline_ns, job.number))

    # ---- ends; the lock is taken ------------------------------------------------------------------

    def _end_outside(self, job: Job[R], result: R) -> None:
        if job.phase is JobPhase.INSIDE:
            job.verdict = result
        else:
            self._end(job, result)

    def _end(self, job: Job[R], result: R) -> None:
        if job.phase is JobPhase.ENDED:
            return
        job.phase, job.ended_ns = JobPhase.ENDED, time.monotonic_ns()
        del self._open.jobs[job.number]
        self._done.append((job, result))
        self._left.notify_all()
        if len(self._done) == 1 and not self._closing:
            os.eventfd_write(self.completion_fd, 1)

    # ---- the clock ------------------------------------------------------------------------------

    def _watch_clock(self) -> None:
        deadlines = self._open.deadlines
        with self._lock:
            while not self._closing:
                now_ns = time.monotonic_ns()
                while deadlines and deadlines[0][0] <= now_ns:
                    due_ns, number = heapq.heappop(deadlines)
                    job = self._open.jobs.get(number)
                    if job is not None and job.deadline_ns <= due_ns:  # else it was given more time
                        self._end_outside(job, self._overdue(job.began_ns > 0 or self._all_hang()))
                self._time.wait((deadlines[0][0] - now_ns) / 1e9 if deadlines else None)

    def _all_hang(self) -> bool:
        """Every lane is with a job whose time was over before."""
        return len(self._running) == len(self._lanes) and all(
            job.phase is JobPhase.ENDED for jobs in self._running.values() for job in jobs
        )


def _take_bundle(queue: deque[Job[R]], most_bytes: int) -> list[Job[R]]:
    """The first job that is still queued, and those behind it that share its command."""
    jobs: list[Job[R]] = []
    size = 0
    while queue and size < most_bytes:
        if queue[0].phase is JobPhase.ENDED:
            queue.popleft()
            continue
        if jobs and (jobs[0].bundle is None or queue[0].bundle != jobs[0].bundle):
            break
        jobs.append(queue.popleft())
        size += jobs[-1].bytes
    return jobs


def _disconnect(lane: Lane) -> None:
    try:
        lane.disconnect()
    except Exception as error:
        log.warning("a connection of a tier did not close: %s", type(error).__name__)
