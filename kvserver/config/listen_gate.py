"""Gate before the listeners of a ZMQ socket: libzmq accepts one connection at a time, and only while descriptors are free.

libzmq accepts in a thread of its own as soon as a client connects. Without a free descriptor it ends the process (ipc), or tries again
without a pause (tcp). It has no bound on connections. So the gate disarms each listener in the epoll set of that thread. While a client
waits, the gate looks for free descriptors, and arms the listener for one event (EPOLLONESHOT). libzmq then accepts one connection, and
its monitor reports that. A client before a shut gate stays in the kernel's queue.

The kernel shows what an epoll set contains (/proc/self/fdinfo). Where it does not show a listener, libzmq accepts there by itself, and
a warning is logged.

Owns: the monitor of the socket, and a thread that sleeps while no client connects. Refuses to know: messages, who may connect.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import logging
import os
import platform
import re
import select
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvserver.config.descriptors import FOR_ENGINES, HINT, has_free_descriptors

log = logging.getLogger(__name__)

_PLUG_SECONDS = 1.0  # for libzmq's thread to begin to listen
_LOOK_SECONDS = 0.25  # between two looks for free descriptors, while a client waits
_LIBC = ctypes.CDLL(None, use_errno=True)
_EPOLL_CTL_MOD = 3
_EVENT = struct.Struct("=IQ" if platform.machine() == "x86_64" else "@IQ")  # struct epoll_event

Report = Mapping[str, Any]  # of the monitor: event, value, endpoint


class _Entry(NamedTuple):
    epoll: int
    data: int  # libzmq's own, which a change must repeat


class ListenGate:
    """Gate of one ZMQ socket. REQUIRES: made before the socket is bound; closed before the socket is. Listeners bound in between are gated.

    `on_failed`: called in the gate's thread with the report of a connection that libzmq did not accept.
    """

    def __init__(self, socket: zmq.Socket[bytes], on_failed: Callable[[Report], None] = lambda report: None) -> None:
        self._reports = socket.get_monitor_socket(zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_ACCEPT_FAILED)
        self._on_failed = on_failed
        self._entries: dict[int, _Entry] = {}  # by the descriptor of a listener
        self._short = False  # of descriptors, and logged
        self._closing = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="listen-gate", daemon=True)
        self._thread.start()

    @property
    def gated(self) -> int:
        """Listeners that accept through the gate: those of the socket, a few milliseconds after each is bound."""
        return len(self._entries)

    def close(self) -> None:
        """Accept no more connections. Idempotent."""
        if self._closing >= 0:
            os.eventfd_write(self._closing, 1)
            self._thread.join()
            self._reports.close(0)
            os.close(self._closing)
            self._closing = -1

    # ---- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        while (ready := self._wait(list(self._entries))) is not None:
            try:
                self._serve(ready)
            except Exception:  # a thread that ends would leave all listeners disarmed
                log.exception("internal error before the listeners of a socket")
                time.sleep(_LOOK_SECONDS)

    def _serve(self, ready: dict[Any, int]) -> None:
        if self._reports in ready:
            self._read_report()
            return
        if not has_free_descriptors(FOR_ENGINES):
            if not self._short:
                log.warning("clients wait to connect: fewer than %d descriptors are free; %s", FOR_ENGINES, HINT)
            self._short = True
            time.sleep(_LOOK_SECONDS)
            return
        self._short = False
        listener = next(iter(ready))
        self._arm(listener, select.EPOLLIN)
        while listener in self._entries and self._wait([]) is not None and not self._read_report():
            pass

    def _wait(self, listeners: list[int]) -> dict[Any, int] | None:
        """Wait for reports and clients. None: the gate closes."""
        poller = zmq.Poller()
        for each in (self._closing, self._reports, *listeners):
            poller.register(each, zmq.POLLIN)
        ready = dict(poller.poll())
        return ready if self._closing not in ready else None

    def _read_report(self) -> bool:
        """True if the report is the end of an accept: libzmq has a connection, or failed to get one."""
        report = parse_monitor_message(self._reports.recv_multipart(zmq.NOBLOCK))
        if report["event"] == zmq.EVENT_LISTENING:
            self._gate(report)
            return False
        if report["event"] == zmq.EVENT_ACCEPT_FAILED:
            self._on_failed(report)
        return True

    # ---- the epoll set --------------------------------------------------------------------------

    def _gate(self, report: Report) -> None:
        listener, deadline = int(report["value"]), time.monotonic() + _PLUG_SECONDS
        while (entry := _entry_of(listener)) is None and time.monotonic() < deadline:
            time.sleep(0.001)
        if entry is not None:
            self._entries[listener] = entry
            self._arm(listener, 0)
            return
        text = "connections to %s are not bounded by free descriptors: libzmq %s is not seen to wait for them"
        log.warning(text, report["endpoint"].decode(errors="replace"), zmq.zmq_version())

    def _arm(self, listener: int, events: int) -> None:
        """Let libzmq accept one connection; with 0 none."""
        epoll, data = self._entries[listener]
        if _LIBC.epoll_ctl(epoll, _EPOLL_CTL_MOD, listener, _EVENT.pack(events | select.EPOLLONESHOT, data)):
            del self._entries[listener]
            log.error("listener %d accepts no more connections: %s", listener, os.strerror(ctypes.get_errno()))


def _entry_of(listener: int) -> _Entry | None:
    """The listener's place in an epoll set that waits for its clients."""
    entry = re.compile(rf"^tfd:\s+{listener}\s+events:\s+(\w+)\s+data:\s+(\w+)", re.MULTILINE)
    for path in glob.glob("/proc/self/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(path) != "anon_inode:[eventpoll]":
                continue
            number = int(os.path.basename(path))
            with open(f"/proc/self/fdinfo/{number}") as info:
                found = entry.search(info.read())
            if found is not None and int(found[1], 16) & select.EPOLLIN:
                return _Entry(number, int(found[2], 16))
    return None
