"""No test covered who may connect to the sockets beside the endpoint, nor how many: a daemon without either check passed every test."""

from __future__ import annotations

import errno
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.daemon import Daemon, wait_until
from support.worker import Worker, make_keys

from kvserver.engines.lifeline import MAX_CONNECTIONS
from kvserver.protocol import Attach, Error, decode_attach_reply, encode
from kvserver.protocol.client import Attachment

OTHER_UID = 65534
# Connects as another user; prints what became of it. What it needs is imported before it has no right to read it.
STRANGER = """
import os, socket, sys
path, kind, raw, uid = sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3]), int(sys.argv[4])
os.setgroups([])
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
connection = socket.socket(socket.AF_UNIX, kind)
connection.settimeout(10)
try:
    connection.connect(path)
    connection.send(raw)
    print("got", connection.recv(4096).hex())
except OSError as error:
    print("errno", error.errno)
"""

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


def as_another_user(path: Path, raw: bytes, kind: int = socket.SOCK_SEQPACKET, uid: int = OTHER_UID) -> str:
    """What this user gets who connects to `path` and sends `raw`."""
    command = [sys.executable, "-c", STRANGER, str(path), str(kind), raw.hex(), str(uid)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2 * MAX_CONNECTIONS:
        pytest.skip(f"only {hard} descriptors for each process")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def connect(daemon: Daemon) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(10)
    path = str(daemon.sockets[1])
    wait_until(lambda: connection.connect_ex(path) not in (errno.EAGAIN, errno.EINTR), what="room in the backlog")
    return connection


# ---- who ------------------------------------------------------------------------------------------


@needs_root
def test_another_user_cannot_reach_the_sockets(make_daemon: Callable[..., Daemon]) -> None:
    """The folder is shut. Where an operator opened it, the sockets still are."""
    daemon = make_daemon()
    ipc, fd_path = daemon.sockets
    for mode in (0o700, 0o755, 0o777):
        daemon.folder.chmod(mode)
        assert as_another_user(fd_path, encode(Attach(token="guessed"))) == f"errno {errno.EACCES}"
        assert as_another_user(ipc, b"\xff", socket.SOCK_STREAM) == f"errno {errno.EACCES}"
    for path in daemon.sockets:
        assert path.stat().st_mode & 0o777 == 0o600


@needs_root
def test_another_user_who_reaches_the_fd_socket_is_hung_up_on_even_with_the_token(
    make_daemon: Callable[..., Daemon], make_worker: Callable[..., Worker]
) -> None:
    """Where the operator made the socket writable for all: the kernel reports whose process it is."""
    daemon = make_daemon()
    worker = make_worker(daemon)
    daemon.folder.chmod(0o755)
    daemon.sockets[1].chmod(0o666)
    raw = encode(Attach(token=worker.hello.token))
    found = as_another_user(daemon.sockets[1], raw)
    assert found in ("got", f"errno {errno.EPIPE}", f"errno {errno.ECONNRESET}"), (
        found
    )  # nothing, whichever end is first
    wait_until(lambda: f"refused a connection of uid {OTHER_UID}" in daemon.log)
    assert daemon.accounting()["attachments"] == 1, "the worker's own"
    answer = bytes.fromhex(as_another_user(daemon.sockets[1], raw, uid=0).removeprefix("got "))
    assert not isinstance(decode_attach_reply(answer), Error), "the same from our own user is fine"
    worker.round_trip()


# ---- how many -------------------------------------------------------------------------------------


def test_one_connection_too_many_is_hung_up_on_and_the_others_live(
    make_daemon: Callable[..., Daemon], make_worker: Callable[..., Worker], many_descriptors: None
) -> None:
    daemon = make_daemon()
    worker = make_worker(daemon)
    with ExitStack() as at_end:
        taken = [at_end.enter_context(connect(daemon)) for _ in range(MAX_CONNECTIONS - 1)]
        wait_until(lambda: daemon.accounting()["attachments"] == MAX_CONNECTIONS)
        for _ in range(3):
            with connect(daemon) as one_more:
                assert one_more.recv(16) == b""
        with pytest.raises(OSError):  # noqa: PT011  # closed before or after it is written to
            Attachment(str(daemon.sockets[1]), worker.hello.token, [])
        assert daemon.accounting()["attachments"] == MAX_CONNECTIONS
        worker.round_trip()
        for connection in (taken[0], taken[-1]):
            connection.setblocking(False)
            with pytest.raises(BlockingIOError):
                connection.recv(16)
        taken[5].close()
        wait_until(lambda: daemon.accounting()["attachments"] == MAX_CONNECTIONS - 1)
        Attachment(str(daemon.sockets[1]), worker.hello.token, []).close()
    wait_until(lambda: daemon.accounting()["attachments"] == 1)
    assert worker.store(make_keys(1), worker.blocks_for(1))
    make_worker(daemon).round_trip()


@needs_root
def test_another_user_who_reaches_the_endpoint_is_hung_up_on(
    make_daemon: Callable[..., Daemon], make_worker: Callable[..., Worker]
) -> None:
    """Else it could clear the cache, and look up what is in it."""
    daemon = make_daemon()
    daemon.folder.chmod(0o755)
    daemon.sockets[0].chmod(0o666)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
    found = as_another_user(daemon.sockets[0], greeting, socket.SOCK_STREAM)
    assert found in ("got", f"errno {errno.EPIPE}", f"errno {errno.ECONNRESET}"), found
    assert as_another_user(daemon.sockets[0], greeting, socket.SOCK_STREAM, uid=0).startswith("got ff"), (
        "ZMQ answers us"
    )
    make_worker(daemon).round_trip()
