"""The ZMQ address that engines connect to, its `.fd` path and the lock that makes one daemon its only owner.

Owns: the lock, the ROUTER socket and who may connect to it. Refuses to know: messages (`loop`), the `.fd` socket (`lifeline`).
"""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import logging
import os
import socket
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

import zmq

from kvserver.config import SocketFile
from kvserver.config.listen_gate import ListenGate, Report
from kvserver.protocol import MOST_MESSAGE_BYTES, ConfigError, stranger_at

log = logging.getLogger(__name__)

# Of a connection that failed for another reason than its user.
_FAILED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED, errno.EPROTO, errno.EINVAL}


class Endpoint:
    """The daemon's ZMQ address. REQUIRES: bind() at most once, then close().

    Its sockets belong to the thread that makes the endpoint, then to the loop's.
    """

    def __init__(self, url: str) -> None:
        """Lock it. ConfigError if the URL cannot be served, or another daemon serves it."""
        self.url = url
        self.fd_file = SocketFile(_fd_path(url), socket.SOCK_SEQPACKET)
        self._file = SocketFile(url.removeprefix("ipc://")) if url.startswith("ipc://") else None
        self._lock_path = self.fd_file.path.removesuffix(".fd") + ".lock"
        self._lock = _lock(url, self._lock_path)
        self._context = zmq.Context(io_threads=1)
        self.router = self._context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.LINGER, 0)
        self.router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.router.setsockopt(zmq.MAXMSGSIZE, 16 * MOST_MESSAGE_BYTES)  # a larger one ends its connection
        self.router.setsockopt(zmq.RCVHWM, 10_000)
        self.router.setsockopt(zmq.SNDHWM, 10_000)
        _refuse_other_users(self.router)
        self._gate = ListenGate(self.router, _Strangers().log)

    def bind(self) -> None:
        """ConfigError if the address is another process's, or cannot be bound. A dead daemon's socket file is replaced."""
        try:
            if self._file is not None:
                self._file.bind(self.router)
            else:
                self.router.bind(self.url)
        except (OSError, zmq.ZMQError) as error:
            raise ConfigError(f"--endpoint {self.url}: cannot bind: {error.strerror}") from None

    def keep_bound(self) -> str:
        """Bind again what is no longer at its path; returns why engines cannot connect there, or "". Call it once a second.

        Engines that are connected stay so: what accepted them is not closed.
        """
        try:
            if not _is_at(self._lock_path, self._lock):
                lock, old = _lock(self.url, self._lock_path), self._lock
                self._lock = lock
                old.close()
            if self._file is not None and not self._file.is_ours:
                self.bind()
                log.warning("%s was removed or replaced, and is bound again", self.url)
        except ConfigError as error:
            return f"engines cannot connect: {error}"
        return ""

    def close(self, linger_ms: int = 0) -> None:
        """`linger_ms`: for replies on their way to engines. The lock is released last: another daemon may serve the URL then."""
        self._gate.close()
        self._context.destroy(linger_ms)
        for file in (self._file, self.fd_file):
            if file is not None:
                file.remove()
        self._lock.close()


class _Strangers:
    """The peers that ZMQ refuses at an ipc endpoint by their credentials."""

    def __init__(self) -> None:
        self._logged = False

    def log(self, report: Report) -> None:
        """Once: an engine connects again and again, and ZMQ does not state whose it is."""
        if int(report["value"]) not in _FAILED and not self._logged:
            self._logged = True
            log.warning(
                "refused a connection of another user on %s: this daemon is of uid %d; run engine and daemon as one user "
                "(further ones are not logged)",
                report["endpoint"].decode(errors="replace"),
                os.getuid(),
            )


def _fd_path(url: str) -> str:
    """ConfigError if the URL cannot be served."""
    parts = urlsplit(url)
    if parts.scheme == "ipc":
        own = url.removeprefix("ipc://")
        if not own.startswith("/") or own.endswith("/") or Path(own).is_dir():  # engines have folders of their own
            raise ConfigError(
                f"--endpoint {url!r}: name a file that may become a socket, as ipc:///run/kvserver/kv.sock"
            )
        path = f"{own}.fd"
    elif parts.scheme == "tcp":
        _refuse_open_network(url, parts.hostname)
        folder = os.environ.get("XDG_RUNTIME_DIR", f"/tmp/kvserver-{os.getuid()}")
        path = f"{folder}/kvserver-{_port(url)}.fd"
    else:
        raise ConfigError(f"--endpoint {url!r}: give ipc:///path or tcp://127.0.0.1:port")
    if len(path.encode()) > 100:
        raise ConfigError(f"--endpoint {url!r}: the path is too long for a Unix socket (107 bytes with suffixes)")
    return path


def _lock(url: str, path: str) -> IO[str]:
    """The locked file. ConfigError if it cannot be made, or another daemon has it."""
    try:
        Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if stranger := stranger_at(url):  # before a file is opened there
            raise ConfigError(f"--endpoint {url!r}: {stranger}")
        lock = open(path, "w")  # noqa: SIM115
    except OSError as error:
        raise ConfigError(f"--endpoint {url!r}: {error.filename}: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"another kvserver already serves {url}; stop it or give --endpoint") from None
    return lock


def _is_at(path: str, file: IO[str]) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except OSError:
        return False


def _port(url: str) -> int:
    try:
        port = urlsplit(url).port
    except ValueError:
        port = None
    if not port:
        raise ConfigError(f"--endpoint {url!r}: give a port, as tcp://127.0.0.1:5557")
    return port


def _refuse_open_network(url: str, host: str | None) -> None:
    try:
        loopback = ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback:
        raise ConfigError(
            f"--endpoint {url!r}: tcp is for loopback addresses only; KV would cross the network unencrypted"
        )


def _refuse_other_users(router: zmq.Socket[bytes]) -> None:
    """Refuse other users at an ipc endpoint whose file became writable for them, as lifelines do. REQUIRES: the socket is not bound yet."""
    try:
        for uid in {os.getuid(), 0}:
            router.setsockopt(zmq.IPC_FILTER_UID, uid)
    except zmq.ZMQError as error:
        log.debug("libzmq %s does not look at the user of a peer: %s", zmq.zmq_version(), error)
