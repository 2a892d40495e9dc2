"""The Unix socket beside the endpoint: workers send file descriptors over it, and its end means death.

Each worker has one connection. It sends `Attach` with its descriptors and gets `Attached` with a number for RegisterWorker. Then
both sides only watch: end of file means that the peer died, across pid namespaces. A process that the peer forked may keep the
connection, so the death of the peer's process counts as well, where it is visible.

The server closes a connection only when no copy of its worker is left, and sends `Detached` first: the worker's memory is not
touched any more. An end without `Detached` is the server's death. A GPU may work for a process a little longer than the process
has its sockets.

Owns: the listening socket, the connections, and descriptors until they are claimed. Refuses to know: what the descriptors are
for.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import struct
import time
from collections import Counter
from dataclasses import dataclass

from kvserver.config import SocketFile
from kvserver.config.descriptors import FOR_ENGINES, RESERVE, SHORT, has_free_descriptors
from kvserver.protocol import (
    CONNECTION_REFUSED,
    Attached,
    ConfigError,
    Detached,
    Error,
    ErrorCode,
    KVServerError,
    decode_attach,
    encode,
)

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 1024
MAX_FDS = 251  # the kernel passes at most 253 in one message
SILENT_SECONDS = 10.0  # for a connection to register a worker
_MAX_ATTACH_BYTES = 4096
_MOST_STRANGERS = 100  # users in the log


@dataclass(slots=True)
class Lifeline:
    """A connection. `fds` are open until claimed; `registration` is set once a worker has registered with it."""

    number: int
    connection: socket.socket
    pid: int
    uid: int
    fds: list[int]
    deadline: float  # of the monotonic clock, for its registration
    process: int | None = None  # a pidfd, where the peer's process can be seen
    attached: bool = False
    registration: int | None = None

    def claim(self) -> list[int]:
        """The descriptors; the caller closes them from now on."""
        fds, self.fds = self.fds, []
        return fds


def _open_process(pid: int) -> int | None:
    """A descriptor that is readable once the process is dead. None where it cannot be seen, or for want of descriptors."""
    try:
        return os.pidfd_open(pid)  # 0: it is of another pid namespace
    except OSError:
        return None


def _is_dead(process: int) -> bool:
    poller = select.poll()
    poller.register(process, select.POLLIN)
    return bool(poller.poll(0))


class Lifelines:
    """All connections of the `.fd` socket. Non-blocking; driven by the server loop."""

    def __init__(self, file: SocketFile, token: str) -> None:
        """ConfigError if the file is another process's, or cannot be made."""
        self.path = file.path
        self.token = token
        self._file = file
        self._lifelines: dict[int, Lifeline] = {}
        self._by_fd: dict[int, Lifeline] = {}
        self._next = 0
        self._strangers: set[int] = set()  # users that were refused, and logged
        self.refused: Counter[str] = Counter()  # connections, by the Error that ended them or CONNECTION_REFUSED
        self._listener = self._listen()
        self._spare = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)

    @property
    def listener_fd(self) -> int:
        return self._listener.fileno()

    def keep_bound(self) -> str:
        """Listen again if the socket is no longer at its path; returns why workers cannot connect there, or "". Call it once a second."""
        if self._file.is_ours:
            return ""
        try:
            listener, old = self._listen(), self._listener
        except ConfigError as error:
            return f"workers cannot connect: {error}"
        self._listener = listener
        old.close()
        log.warning("%s was removed or replaced, and is bound again", self.path)
        return ""

    def _listen(self) -> socket.socket:
        try:
            return self._file.listen()
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot bind: {error}") from None

    def connection_fds(self) -> list[int]:
        return list(self._by_fd)

    def __len__(self) -> int:
        return len(self._lifelines)

    def accept(self) -> int | None:
        """Accept one new connection; returns its descriptor to poll."""
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return None
        except OSError as error:
            log.warning("refused a connection on %s: %s", self.path, error)
            self.refused[CONNECTION_REFUSED] += 1
            self._refuse_with_spare()
            return None
        if not has_free_descriptors(FOR_ENGINES):
            log.warning("refused a connection on %s: %s", self.path, SHORT)
            self.refused[CONNECTION_REFUSED] += 1
            connection.close()
            return None
        connection.setblocking(False)
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, _gid = struct.unpack("3i", credentials)
        is_stranger = uid not in (os.getuid(), 0)
        if is_stranger or len(self._lifelines) >= MAX_CONNECTIONS:
            self._log_refusal(uid, pid, is_stranger)
            self.refused[CONNECTION_REFUSED] += 1
            connection.close()
            return None
        self._next += 1
        deadline = time.monotonic() + SILENT_SECONDS
        lifeline = Lifeline(self._next, connection, pid, uid, [], deadline, _open_process(pid))
        self._lifelines[self._next] = lifeline
        self._by_fd[connection.fileno()] = lifeline
        if lifeline.process is not None:
            self._by_fd[lifeline.process] = lifeline
        return connection.fileno()

    def _log_refusal(self, uid: int, pid: int, is_stranger: bool) -> None:
        """Log the refusal of a connection; a stranger's once, for its engine connects again and again."""
        if not is_stranger:
            log.warning(
                "refused a connection of uid %d, pid %d on %s: %d are open", uid, pid, self.path, MAX_CONNECTIONS
            )
        elif uid not in self._strangers and len(self._strangers) < _MOST_STRANGERS:
            self._strangers.add(uid)
            text = "refused a connection of uid %d, pid %d on %s: this daemon is of uid %d; run engine and daemon as one user"
            log.warning(f"{text} (further ones of this uid are only counted)", uid, pid, self.path, os.getuid())

    def _refuse_with_spare(self) -> None:
        """Out of descriptors: a connection that stays in the queue would wake the loop without end."""
        os.close(self._spare)
        with contextlib.suppress(OSError):
            self._listener.accept()[0].close()
        self._spare = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)

    def read(self, fd: int) -> Lifeline | None:
        """Handle input on a connection, or its process's end. Returns the lifeline if it has ended, after closing it."""
        lifeline = self._by_fd[fd]
        if fd == lifeline.process:
            if not _is_dead(fd):  # the number was another descriptor's when it was polled
                return None
            self.close(lifeline)
            return lifeline
        try:
            raw, fds, flags, _ = socket.recv_fds(lifeline.connection, _MAX_ATTACH_BYTES, MAX_FDS)
        except BlockingIOError:
            return None
        except OSError:
            raw, fds, flags = b"", [], 0
        if raw and not lifeline.attached:
            lifeline.fds = list(fds)
            try:
                self._attach(lifeline, raw, flags)
                if self._send(lifeline, encode(Attached(attachment=lifeline.number, says_detached=True))):
                    return None
            except KVServerError as error:
                self.refused[error.code.value] += 1
                self._send(lifeline, encode(Error(code=error.code.value, message=error.message)))
        else:
            for extra in fds:
                os.close(extra)
            if raw:  # nothing more is expected: ignored, since a close would mean to the worker that copies have ended
                return None
        self.close(lifeline)
        return lifeline

    def _attach(self, lifeline: Lifeline, raw: bytes, flags: int) -> None:
        """KVServerError unless it may attach."""
        cut = flags & socket.MSG_CTRUNC
        if flags & socket.MSG_TRUNC or (cut and len(lifeline.fds) >= MAX_FDS):
            raise KVServerError(ErrorCode.TOO_LARGE, f"Attach takes at most {MAX_FDS} descriptors")
        if cut or not has_free_descriptors(RESERVE):  # the kernel cuts what this process has no descriptors for
            raise KVServerError(ErrorCode.NO_DESCRIPTORS, SHORT)
        if decode_attach(raw).token != self.token:
            raise KVServerError(ErrorCode.BAD_TOKEN, "the token is not the one of HelloReply; send Hello again")
        lifeline.attached = True

    @staticmethod
    def _send(lifeline: Lifeline, raw: bytes) -> bool:
        try:
            lifeline.connection.send(raw)
        except OSError as error:
            log.debug("cannot answer on connection %d of the .fd socket: %s", lifeline.number, error)
            return False
        return True

    def unused(self, number: int) -> Lifeline:
        """KVServerError(UNKNOWN_ATTACHMENT) unless it is attached, alive and not yet claimed."""
        lifeline = self._lifelines.get(number)
        if lifeline is None or not lifeline.attached or lifeline.registration is not None:
            raise KVServerError(
                ErrorCode.UNKNOWN_ATTACHMENT, f"attachment {number} is unknown, ended or used; Attach again"
            )
        return lifeline

    def detach(self, lifeline: Lifeline) -> None:
        """Send Detached, then close. REQUIRES: nothing of the worker is mapped. Idempotent."""
        if lifeline.number in self._lifelines:
            self._send(lifeline, encode(Detached()))
            self.close(lifeline)

    def close_silent(self) -> None:
        """Close the connections that have no worker at their deadline; they have no copies to wait for."""
        now = time.monotonic()
        for lifeline in list(self._lifelines.values()):
            if lifeline.registration is None and now > lifeline.deadline:
                log.info("connection of pid %d ended: it registered no worker in %.0f s", lifeline.pid, SILENT_SECONDS)
                self.close(lifeline)

    def close(self, lifeline: Lifeline) -> None:
        """Close the connection and the descriptors that were not claimed. Idempotent."""
        if self._lifelines.pop(lifeline.number, None) is None:
            return
        del self._by_fd[lifeline.connection.fileno()]
        lifeline.connection.close()
        if lifeline.process is not None:
            del self._by_fd[lifeline.process]
            os.close(lifeline.process)
        for fd in lifeline.claim():
            os.close(fd)

    def shut(self) -> None:
        """REQUIRES: nothing is mapped."""
        for lifeline in list(self._lifelines.values()):
            self.detach(lifeline)
        self._listener.close()
        os.close(self._spare)
        self._file.remove()
