"""Gate before a listening ZMQ socket: libzmq accepts one connection, whenever enough descriptors are free.

libzmq accepts in its own thread as soon as a client connects. Where no descriptor is free it ends the process (ipc), or tries again
without a pause (tcp). It has no bound on connections. So the gate takes the listening descriptor out of the epoll set of that thread.
While a client waits, the gate looks for free descriptors and arms the descriptor once, by EPOLLONESHOT. libzmq then accepts one
connection, and its monitor reports that. A client that finds the gate shut stays in the kernel's queue.

The kernel shows what is in an epoll set (/proc/self/fdinfo). Where it does not, connections are accepted without a bound, and a
warning states that.

Owns: the socket's monitor, a thread that sleeps while no client connects. Refuses to know: messages, who connects.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import platform
import re
import select
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvserver.config.descriptors import FOR_ENGINES, HINT, has_free_descriptors

log = logging.getLogger(__name__)

_PLUG_SECONDS = 0.5  # for libzmq's thread to begin to listen
_LOOK_SECONDS = 0.25  # between two looks for free descriptors, while a client waits
_EPOLL_CTL_MOD = 3
_EVENT = struct.Struct("=IQ" if platform.machine() == "x86_64" else "@IQ")  # struct epoll_event
_EVENTS = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_ACCEPT_FAILED

Report = dict[str, Any]  # of a monitor: event, value, endpoint


class ListenGate:
    """REQUIRES: made before the socket is bound, once; start() after; close() before the socket is unbound or closed.

    `on_failed` gets the reports of connections that libzmq did not accept, in the gate's thread.
    """

    def __init__(self, socket: zmq.Socket[bytes], on_failed: Callable[[Report], None] = lambda report: None) -> None:
        self._reports = socket.get_monitor_socket(_EVENTS)
        self._on_failed = on_failed
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None
        self._listener = self._epoll = -1
        self._data = 0  # libzmq's, in the epoll set

    def start(self) -> None:
        """From now on each connection is looked at. Before, libzmq accepts by itself."""
        bound = parse_monitor_message(self._reports.recv_multipart(zmq.NOBLOCK))
        self._listener = int(bound["value"])
        deadline = time.monotonic() + _PLUG_SECONDS
        while not self._find_entry() and time.monotonic() < deadline:
            time.sleep(0.001)
        if self._epoll < 0:
            log.warning(
                "connections to %s are not bounded by free descriptors: libzmq %s is not found to wait for descriptor %d",
                bound["endpoint"].decode(errors="replace"), zmq.zmq_version(), self._listener,
            )  # fmt: skip
        else:
            self._arm(0)
        run = self._run if self._epoll >= 0 else self._run_unbounded
        self._thread = threading.Thread(target=run, name="listen-gate", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self._thread is not None:
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            self._thread = None
        self._reports.close(0)
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1

    # ---- the epoll set --------------------------------------------------------------------------

    def _find_entry(self) -> bool:
        """Find the epoll set in which libzmq waits for the listening descriptor, and what libzmq has written there."""
        entry = re.compile(rf"^tfd:\s+{self._listener}\s+events:\s+(\w+)\s+data:\s+(\w+)", re.MULTILINE)
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}") != "anon_inode:[eventpoll]":
                    continue
                with open(f"/proc/self/fdinfo/{name}") as info:
                    found = entry.search(info.read())
                if found is not None and int(found[1], 16) & select.EPOLLIN:
                    self._epoll, self._data = int(name), int(found[2], 16)
                    return True
        return False

    def _arm(self, events: int) -> None:
        """Let libzmq accept the next connection, or, with 0, none."""
        event = _EVENT.pack(events and events | select.EPOLLONESHOT, self._data)
        if _libc().epoll_ctl(self._epoll, _EPOLL_CTL_MOD, self._listener, event):
            raise OSError(ctypes.get_errno(), "epoll_ctl")

    # ---- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        waiting, short = select.poll(), False
        waiting.register(self._wake, select.POLLIN)
        waiting.register(self._listener, select.POLLIN)
        reported = zmq.Poller()
        reported.register(self._wake, zmq.POLLIN)
        reported.register(self._reports, zmq.POLLIN)
        while self._wake not in dict(waiting.poll()):
            if not has_free_descriptors(FOR_ENGINES):
                if not short:
                    log.warning("engines wait to connect: fewer than %d descriptors are free; %s", FOR_ENGINES, HINT)
                short = True
                time.sleep(_LOOK_SECONDS)
                continue
            short = False
            self._arm(select.EPOLLIN)
            if self._wake in dict(reported.poll()):
                return
            self._read_report()

    def _run_unbounded(self) -> None:
        reported = zmq.Poller()
        reported.register(self._wake, zmq.POLLIN)
        reported.register(self._reports, zmq.POLLIN)
        while self._wake not in dict(reported.poll()):
            self._read_report()

    def _read_report(self) -> None:
        report = parse_monitor_message(self._reports.recv_multipart(zmq.NOBLOCK))
        if report["event"] == zmq.EVENT_ACCEPT_FAILED:
            if int(report["value"]) == errno.EMFILE:
                log.warning("refused a connection: no descriptor was free; %s", HINT)
            self._on_failed(report)


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)
