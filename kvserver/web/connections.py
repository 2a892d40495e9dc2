"""The listening socket of the status pages: bounds the number of connections, and the time that each may use.

Every connection has a thread, and there are at most MOST_CONNECTIONS. A new connection beyond that ends the one that has
waited longest for its client (to send the rest of a request, or the next request). If all are busy with answers, SPARE more
connections serve probes and scrapers. A deadline covers a whole request or answer, not each byte: a client that sends or
reads a byte now and then does not keep its thread.

Owns: the sockets, their threads and deadlines, the counts of refusals. Refuses to know: HTTP beyond a 503.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from http.server import ThreadingHTTPServer
from typing import Any

from kvserver.config.descriptors import RESERVE, SHORT, has_free_descriptors
from kvserver.protocol.status import PagesStatus

log = logging.getLogger(__name__)

MOST_CONNECTIONS = 64
SPARE = 4
WHY_SPARE = {"busy": "all connections are in use; retry later", "descriptors": SHORT}
REQUEST_SECONDS = 8.0  # to send a request, head and body
ANSWER_SECONDS = 15.0  # to make an answer and to read it
IDLE_SECONDS = 75.0  # until the next request: longer than the usual scrape interval
_LOOK_SECONDS = 0.25  # between two checks of the deadlines
_ROOM_SECONDS = 0.25  # for the thread of an ended connection to end
_BACKLOG = 512  # connections that the kernel queues


class Phase(Enum):
    SENDING = "slow"  # the values: the reason that a missed deadline is counted under
    ANSWERING = "unread"
    IDLE = ""


@dataclass(eq=False, slots=True)
class Visit:
    """One connection. Changed under the lock of its Connections."""

    socket: socket.socket
    since: float
    deadline: float
    spare: str  # why only the open pages answer; "" if all do: a key of WHY_SPARE
    phase: Phase = Phase.SENDING
    ended: bool = False  # shut down by the daemon: its thread is about to end


class Connections(ThreadingHTTPServer):
    """REQUIRES: a handler reports its Visit's phases with enter()."""

    daemon_threads = True
    request_queue_size = _BACKLOG

    def __init__(self, address: tuple[str, int], handler: Any) -> None:
        self._visits: dict[socket.socket, Visit] = {}
        self._changed = threading.Condition()
        self._refused: Counter[str] = Counter()
        super().__init__(address, handler)

    # ---- for handlers, in their threads ---------------------------------------------------------

    def visit(self, connection: socket.socket) -> Visit:
        with self._changed:
            return self._visits[connection]

    def enter(self, visit: Visit, phase: Phase, seconds: float) -> bool:
        """Start a phase with a deadline in `seconds`. False if the connection was ended: the request must not be carried out."""
        with self._changed:
            visit.phase, visit.since = phase, time.monotonic()
            visit.deadline = visit.since + seconds
            return not visit.ended

    def refused(self, reason: str) -> None:
        """Count a refusal, and log the first of its reason as a warning."""
        with self._changed:
            self._refused[reason] += 1
            first = self._refused[reason] == 1
        log.log(
            logging.WARNING if first else logging.DEBUG, "status pages: a request or connection was refused: %s", reason
        )

    # ---- status ---------------------------------------------------------------------------------

    def status(self) -> PagesStatus:
        with self._changed:
            answering = sum(visit.phase is Phase.ANSWERING for visit in self._visits.values())
            return PagesStatus(connections=len(self._visits), answering=answering, refused=dict(self._refused))

    # ---- in the thread that accepts -------------------------------------------------------------

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                time.sleep(_LOOK_SECONDS)  # the connection stays in the queue, and would wake this thread again at once
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        reason, most = ("busy", MOST_CONNECTIONS) if has_free_descriptors(RESERVE) else ("descriptors", 0)
        if self._admit(request, reason, most):
            super().process_request(request, client_address)
        else:
            self._turn_away(request, reason)

    def _admit(self, connection: socket.socket, reason: str, most: int) -> bool:
        """`most`: beyond them there are spare ones, for `reason`."""
        now = time.monotonic()
        with self._changed:
            if len(self._visits) >= max(1, most) and (oldest := self._longest_waiting()) is not None:
                before = len(self._visits)
                self._end(oldest, "crowded" if oldest.phase is Phase.SENDING else "")
                self._changed.wait_for(lambda: len(self._visits) < before, _ROOM_SECONDS)
            taken = len(self._visits)
            if taken >= most + SPARE:
                return False
            # Counted from here, not from the thread's start: the count bounds the threads.
            self._visits[connection] = Visit(connection, now, now + REQUEST_SECONDS, reason * (taken >= most))
            return True

    def _longest_waiting(self) -> Visit | None:
        waiting = [visit for visit in self._visits.values() if visit.phase is not Phase.ANSWERING and not visit.ended]
        return min(waiting, key=lambda visit: visit.since, default=None)

    def _turn_away(self, connection: socket.socket, reason: str) -> None:
        body = json.dumps({"error": reason, "message": WHY_SPARE[reason]}).encode()
        head = (
            "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.send(head.encode() + body)
        self.refused(reason)
        self.shutdown_request(connection)

    def service_actions(self) -> None:
        """Called every poll of serve_forever, and after every connection."""
        now = time.monotonic()
        with self._changed:
            for visit in self._visits.values():
                if now > visit.deadline and not visit.ended:
                    self._end(visit, visit.phase.value)

    def _end(self, visit: Visit, reason: str) -> None:
        """Its thread sees a closed connection wherever it reads or writes. REQUIRES: the lock."""
        visit.ended = True
        if reason:
            self.refused(reason)
        with contextlib.suppress(OSError):
            visit.socket.shutdown(socket.SHUT_RDWR)

    # ---- at the end of each ---------------------------------------------------------------------

    def shutdown_request(self, request: Any) -> None:
        """Called by the connection's thread, or by the accepting thread if the connection has none."""
        super().shutdown_request(request)
        with self._changed:
            if self._visits.pop(request, None) is not None:
                self._changed.notify_all()

    def serve(self) -> None:
        self.serve_forever(_LOOK_SECONDS)
