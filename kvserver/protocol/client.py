"""Client side of the protocol, for adapters, the command line and tests.

- `Channel` never waits (for threads of an engine).
- `Client` waits up to a deadline (for all others); a `WatchedClient` notices the end of its connection.
- `Attachment` is the `.fd` connection.

Owns: client sockets and request numbers. Refuses to know: vLLM, and the server's internals. Needs msgspec and pyzmq only.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import select
import socket
import struct
import time
import weakref
from collections.abc import Iterator
from typing import TypeVar

import msgspec
import zmq

from kvserver.protocol.codec import decode_attach_reply, decode_reply, encode
from kvserver.protocol.endpoint import NotPermitted, barrier, connect, why_refused
from kvserver.protocol.errors import ErrorCode
from kvserver.protocol.fine_wait import wait_readable
from kvserver.protocol.messages import (
    PROTOCOL_VERSION,
    Attach,
    Attached,
    Detached,
    Error,
    Hello,
    HelloReply,
    Reply,
    Request,
)

R = TypeVar("R")
_RECONNECT_MILLIS = 50  # from one attempt to the next, always: an idle engine finds the next daemon at once


class RequestFailed(Exception):
    """Request that the server answered with an error."""

    def __init__(self, error: Error) -> None:
        super().__init__(f"{error.code}: {error.message}")
        self.code = error.code
        self.message = error.message


class Channel:
    """A DEALER socket whose every call returns at once. One thread uses it.

    The channel has its own context, no linger and IMMEDIATE: no message queues for an absent server, and the channel never delays
    the end of the process. A channel that is dropped without close() is closed when it is collected, the socket first: a context
    waits for its open sockets without end.
    """

    def __init__(self, endpoint: str, high_water_mark: int = 256) -> None:
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.SNDHWM, high_water_mark)
        self._socket.setsockopt(zmq.RCVHWM, high_water_mark * 4)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MILLIS)
        self._socket.connect(endpoint)
        self._numbers = itertools.count(1)
        self._closed = weakref.finalize(self, _close, self._socket, self._context)
        self._closed.atexit = False

    def send(self, request: Request) -> int | None:
        """The request's number; None if nothing was sent, because no server is connected or the queue is full."""
        number = next(self._numbers)
        try:
            self._socket.send_multipart([number.to_bytes(8, "little"), encode(request)], zmq.NOBLOCK)
        except zmq.Again:
            return None
        return number

    def receive(self) -> Iterator[tuple[int, Reply]]:
        """The replies that have arrived, each as (number, reply)."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) == 2:
                yield int.from_bytes(frames[0], "little"), decode_reply(frames[1])

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds`, also parts of a millisecond, for a reply. True if one has arrived."""
        deadline = time.monotonic() + seconds
        while not int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            if (left := deadline - time.monotonic()) <= 0:
                return False
            wait_readable(int(self._socket.FD), left)
        return True

    def wait_or(self, wake: int | zmq.Socket[bytes], seconds: float | None = None) -> None:
        """Wait until a reply has arrived or `wake`, a descriptor or socket, is readable; at most `seconds`, if given."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(wake, zmq.POLLIN)
        poller.poll(None if seconds is None else int(seconds * 1000))

    def wait_writable(self, seconds: float) -> bool:
        """Wait at most `seconds` for a connection to the server. True if there is one."""
        return bool(self._socket.poll(max(0, int(seconds * 1000)), zmq.POLLOUT))

    def disconnections(self) -> zmq.Socket[bytes]:
        """A socket with a message for each connection that the server has ended, from now on. Closed with the channel."""
        return self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    def close(self) -> None:
        self._closed()


def _close(dealer: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]]) -> None:
    dealer.close(0)
    context.destroy(0)


def has_listener(endpoint: str) -> bool:
    """True if a process, even a hung one, listens at the endpoint. A dead process's socket file refuses connections.

    True for endpoints that are no Unix socket: there a connection attempt of one second would prove nothing.
    """
    if not endpoint.startswith("ipc://"):
        return True
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        try:
            probe.connect(endpoint.removeprefix("ipc://"))
        except OSError as error:
            return error.errno not in (errno.ECONNREFUSED, errno.ENOENT)
    return True


class Client:
    """Request and reply with a deadline. One thread uses it."""

    def __init__(self, endpoint: str, timeout: float = 5.0) -> None:
        self.endpoint = endpoint
        self.timeout = timeout
        self.channel = Channel(endpoint)

    def ask(self, request: Request, expect: type[R], timeout: float | None = None) -> R:
        """RequestFailed if the server answers with an error; TimeoutError if it does not answer in time; NotPermitted if it is not for
        this user.
        """
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        while (number := self.channel.send(request)) is None:
            if not self.channel.wait_writable(deadline - time.monotonic()):
                if why := barrier(self.endpoint):
                    raise NotPermitted(why)
                raise TimeoutError(f"no kvserver at {self.endpoint}")
        while (left := deadline - time.monotonic()) > 0:
            self._wait(min(left + 0.001, 1.0))
            for answered, reply in self.channel.receive():
                if answered != number:
                    continue
                if isinstance(reply, Error):
                    raise RequestFailed(reply)
                if not isinstance(reply, expect):
                    raise TypeError(f"{type(request).__name__} was answered with {type(reply).__name__}")
                return reply
        raise TimeoutError(f"kvserver at {self.endpoint} did not answer {type(request).__name__} in time")

    def _wait(self, seconds: float) -> None:
        self.channel.wait(seconds)

    def hello(self, name: str = "client", instance_id: str = "", incarnation: str = "") -> HelloReply:
        """RequestFailed(VERSION_MISMATCH) if the server does not speak this protocol version: a client speaks no older one.

        If `instance_id` and `incarnation` name an engine, the reply also states whether the engine is registered.
        """
        try:
            return self.ask(Hello(PROTOCOL_VERSION, name, instance_id, incarnation), HelloReply)
        except RequestFailed as refusal:
            if refusal.code != ErrorCode.VERSION_MISMATCH:
                raise
            text = f"{refusal.message}; upgrade the daemon first, then its engines"
            raise RequestFailed(Error(refusal.code, text)) from None

    def close(self) -> None:
        self.channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class WatchedClient(Client):
    """Client that notices the end of its connection, though nothing is sent: the server ended, or died.

    ask() raises ConnectionResetError then: the request is lost, while the socket connects to the next server by itself.
    """

    def __init__(self, endpoint: str, timeout: float = 5.0) -> None:
        super().__init__(endpoint, timeout)
        self._disconnections = self.channel.disconnections()

    def _wait(self, seconds: float) -> None:
        self.channel.wait_or(self._disconnections, seconds)
        if not self.alive():
            raise ConnectionResetError(f"kvserver at {self.endpoint} ended the connection")

    def fileno(self) -> int:
        """Becomes readable when alive() may have changed; call alive() each time."""
        return int(self._disconnections.FD)

    def alive(self) -> bool:
        """False after the server ended this connection or died; once. Never waits."""
        try:
            self._disconnections.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return True
        return False


class Attachment:
    """A worker's `.fd` connection. It hands over descriptors, and its end shows that the server ended or died.

    Only this process keeps the connection. A process that is forked without exec closes its copy, which would hide the death of
    this process from the server.
    """

    def __init__(self, fd_path: str, token: str, fds: list[int], timeout: float = 5.0) -> None:
        """OSError or TimeoutError if no server answers; RequestFailed if the server refuses; NotPermitted if it refuses this user."""
        self.detached = False  # the server sent Detached: it no longer uses the worker's memory
        self._announces_detached = False
        self._server: int | None = None  # a pidfd of the server, if its process is visible
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            self._socket.settimeout(timeout)
            connect(self._socket, fd_path)
            self._server = _open_peer(self._socket)
            refused = why_refused(self._socket)
            reply = decode_attach_reply(self._exchange(fd_path, encode(Attach(token=token)), fds, refused))
            if isinstance(reply, Error):
                raise RequestFailed(reply)
            assert isinstance(reply, Attached)
            self.number = reply.attachment
            self._announces_detached = reply.says_detached
            self._socket.setblocking(False)
            _attachments.add(self)
        except BaseException:
            self.close()
            raise

    def _exchange(self, fd_path: str, raw: bytes, fds: list[int], refused: str) -> bytes:
        """The server's answer. `refused`: why the server hangs up, if it does."""
        try:
            socket.send_fds(self._socket, [raw], fds)
            if answer := self._socket.recv(4096):
                return answer
        except ConnectionError:
            if not refused:
                raise
        raise NotPermitted(refused) if refused else ConnectionResetError(f"{fd_path} was closed by the server")

    def fileno(self) -> int:
        return self._socket.fileno()

    def alive(self) -> bool:
        """False after the server ended this connection or died. Never waits."""
        try:
            raw = self._socket.recv(4096)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if raw:
            with contextlib.suppress(msgspec.MsgspecError):  # a message of a later server, unknown to this version
                self.detached |= isinstance(decode_attach_reply(raw), Detached)
        return bool(raw) and not self.detached

    def wait_for_death(self) -> None:
        """Wait until the server, which ended this connection, can no longer write to the worker's memory.

        Returns at once if the server sent Detached or its process is not visible; else waits, without limit, for the
        process to die. A server that never sends Detached no longer writes when it ends the connection.
        """
        if self._server is None or self.detached or not self._announces_detached:
            return
        poller = select.poll()
        poller.register(self._server, select.POLLIN)
        poller.poll()

    def close(self) -> None:
        self._socket.close()
        if self._server is not None:
            os.close(self._server)
            self._server = None


def _open_peer(connection: socket.socket) -> int | None:
    """A descriptor that becomes readable when the listening process is dead; None if the process is not visible."""
    size = struct.calcsize("3i")
    pid, _uid, _gid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    try:
        return os.pidfd_open(pid)
    except OSError:  # pid 0: the process is in another pid namespace
        return None


_attachments: weakref.WeakSet[Attachment] = weakref.WeakSet()


def _close_in_child() -> None:
    for attachment in list(_attachments):
        attachment.close()


os.register_at_fork(after_in_child=_close_in_child)
