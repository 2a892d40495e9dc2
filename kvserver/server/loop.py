"""The event loop: one thread that owns all state.

One turn: end the tickets that completed, answer a bounded number of requests, serve the `.fd`
connections, run calls from other threads, keep time. Nothing in a turn blocks.

Owns: the poll, the ROUTER socket, frames of requests. Refuses to know: what requests mean (`handlers`), how replies are
sent (`replies`), and what else there is to do in a turn (`upkeep`).
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import queue
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec
import zmq
from msgspec import Raw

from kvserver.engines import Lifelines
from kvserver.events import Bus
from kvserver.protocol import (
    MOST_MESSAGE_BYTES,
    REQUEST_ID_BYTES,
    WAIT_SECONDS,
    Error,
    ErrorCode,
    Histogram,
    KVServerError,
    Status,
    StatusReply,
    decode_request,
)
from kvserver.protocol.status import DaemonStatus
from kvserver.server.handlers import Handlers
from kvserver.server.replies import Call, Replies
from kvserver.server.upkeep import Upkeep
from kvserver.service_manager import report_alive
from kvserver.telemetry import LOOP

log = logging.getLogger(__name__)

REQUESTS_PER_TURN = 64  # before completions are looked at again
_IDLE_POLL_MS = 1000
_LAG_WINDOW_SECONDS = 10.0  # /status shows the longest turn of the last one to two windows
_MOST_YOUNG = 2000  # objects made since the last collection of garbage, which looks at all of them, for 0.1 us each
_NO_REQUEST_ID = bytes(REQUEST_ID_BYTES)
T = TypeVar("T")


class Server:
    """The event loop. REQUIRES: `router` is bound; any thread may call start() and stop(), the loop's thread runs the rest."""

    def __init__(
        self,
        router: zmq.Socket[bytes],
        handlers: Handlers,
        upkeep: Upkeep,
        lifelines: Lifelines,
        bus: Bus,
        make_status: Callable[[Server], DaemonStatus],
        stops_when_lost: bool = False,
        keep_bound: Callable[[], str] = str,
    ) -> None:
        """`make_status`: called in the loop's thread. `stops_when_lost`: run() returns when a device is lost.

        `keep_bound`: called there once a second; returns why engines cannot connect, or "".
        """
        self._handlers = handlers
        self._upkeep = upkeep
        self._lifelines = lifelines
        self._bus = bus
        self._make_status = make_status
        self._stops_when_lost = stops_when_lost
        self._keep_bound = keep_bound
        self._unreachable = ""  # why engines cannot connect
        self._router = router
        self._replies = Replies(router, bus)
        self.rpc = self._replies.rpc
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._wake).atexit = False  # a signal may wake a loop that has ended
        self._stopping = False
        self.started = time.monotonic()
        self.turns = Histogram(WAIT_SECONDS)
        self._last_tick = 0.0
        self._last_turn = time.monotonic()
        self._lag = [0.0, 0.0]  # longest turn of the last lag window and of the present one
        self._lag_window_began = time.monotonic()

    # ---- from any thread ----------------------------------------------------------------------

    def stop(self) -> None:
        self._stopping = True
        self.wake()

    def wake(self) -> None:
        os.eventfd_write(self._wake, 1)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` in the loop thread, unless the future is cancelled before its turn."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._calls.put(run)
        self.wake()
        return future

    @property
    def seconds_since_turn(self) -> float:
        """Seconds since the loop's last turn; large only if it hangs (it turns once a second when idle)."""
        return time.monotonic() - self._last_turn

    @property
    def failure(self) -> str:
        """Reason why this daemon should get no traffic; empty while all is well."""
        if lost := self._upkeep.lost_device:
            return f"the device is lost: {lost}"
        return self._unreachable or self._upkeep.lost_tier or self._bus.failure

    @property
    def lag_seconds(self) -> float:
        return max(self._lag)

    # ---- the loop -----------------------------------------------------------------------------

    def run(self) -> None:
        """Run turns until stop()."""
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        watched: set[int] = set()
        more = False
        while not self._stopping:
            wanted = {self._lifelines.listener_fd, *self._lifelines.connection_fds(), *self._upkeep.completion_fds}
            for fd in watched ^ wanted:
                if fd in watched:
                    poller.unregister(fd)
                else:
                    poller.register(fd, zmq.POLLIN)
            watched = wanted
            waited_since = time.monotonic()
            wait_ms = min(_IDLE_POLL_MS, math.ceil(self._upkeep.seconds_left() * 1000))
            ready = dict(poller.poll(0 if more else wait_ms))
            turn_began = time.monotonic()
            # Completions first: a lookup that follows a store's end must find its chunks.
            self._upkeep.complete_tickets()
            if self._stops_when_lost and self._upkeep.lost_device:
                self._stopping = True
            more = self._serve_requests()
            if self._lifelines.listener_fd in ready:
                self._guarded(self._lifelines.accept)
            for fd in watched & ready.keys():
                self._guarded(self._read_lifeline, fd)
            if self._wake in ready:
                self._run_calls()
            more |= bool(self._guarded(self._upkeep.step))
            self._guarded(self._upkeep.audit_if_quiet, turn_began - waited_since, not ready)
            self._keep_time(turn_began)

    def _guarded(self, part: Callable[..., T], *arguments: Any) -> T | None:
        """A part of a turn that answers no message. A fault in it is logged and counted; the loop goes on."""
        try:
            return part(*arguments)
        except Exception:
            self.rpc.errors[ErrorCode.INTERNAL.value, LOOP] += 1
            log.exception("internal error in the loop, in %s", part.__name__)
            return None

    def _serve_requests(self) -> bool:
        """Answer the messages that have arrived, up to a bound; True if there may be more."""
        for _ in range(REQUESTS_PER_TURN):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            self._serve(frames)
        return True

    def _serve(self, frames: list[bytes]) -> None:
        """Serve one message: whatever happens becomes its one reply."""
        has_id = len(frames) >= 2 and len(frames[1]) == REQUEST_ID_BYTES
        call = Call(self._replies, frames[0], frames[1] if has_id else _NO_REQUEST_ID, time.monotonic())
        try:
            if len(frames) != 3 or not has_id:
                sizes = [len(frame) for frame in frames[1:9]]
                raise KVServerError(
                    ErrorCode.BAD_FRAMES,
                    f"got {len(frames) - 1} frames of sizes {sizes}; expected 2: an {REQUEST_ID_BYTES}-byte request id "
                    "and a msgpack message",
                )
            if len(frames[2]) > MOST_MESSAGE_BYTES:
                raise KVServerError(
                    ErrorCode.TOO_LARGE,
                    f"the message has {len(frames[2])} bytes, the limit is {MOST_MESSAGE_BYTES}; split it",
                )
            request = decode_request(frames[2])
            call.type_name = type(request).__name__
            if isinstance(request, Status):
                call.respond(StatusReply(status=Raw(msgspec.msgpack.encode(self.snapshot()))))
            else:
                self._handlers.handle(request, call.respond)
        except KVServerError as error:
            call.respond(Error(code=error.code.value, message=error.message))
        except Exception as error:
            log.exception("internal error while answering %s", call.type_name)
            if not call.answered:
                call.respond(Error(code=ErrorCode.INTERNAL.value, message=f"{type(error).__name__}: {error}"))

    def _read_lifeline(self, fd: int) -> None:
        if fd not in self._lifelines.connection_fds():
            return  # closed earlier in this turn
        ended = self._lifelines.read(fd)
        if ended is not None:
            self._upkeep.lifeline_ended(ended)

    def _run_calls(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        with contextlib.suppress(queue.Empty):
            while True:
                self._calls.get_nowait()()

    def _keep_time(self, turn_began: float) -> None:
        ticks = time.monotonic() - self._last_tick >= 1.0
        if ticks:
            self._last_tick = time.monotonic()
            self._guarded(self._upkeep.tick)
            self._guarded(self._look_at_paths)
            self._guarded(report_alive, self.failure)  # from here, so that a service manager ends a loop that hangs
        if ticks or gc.get_count()[0] > _MOST_YOUNG:
            gc.collect(0)  # only what was made since; the collector proper is off (see daemon)
        self._last_turn = now = time.monotonic()
        if now - self._lag_window_began > _LAG_WINDOW_SECONDS:
            self._lag_window_began = now
            self._lag = [self._lag[1], 0.0]
        self._lag[1] = max(self._lag[1], now - turn_began)
        self.turns.observe(now - turn_began)

    def _look_at_paths(self) -> None:
        unreachable = self._keep_bound()
        if unreachable and unreachable != self._unreachable:
            log.error("%s", unreachable)
        self._unreachable = unreachable

    def snapshot(self) -> DaemonStatus:
        """`/status`, but for what the pages know. From the loop's thread."""
        return self._make_status(self)
