"""Each connection to the status pages had a thread for as long as its client liked: 1,500 half-sent requests made 1,510 threads."""

from __future__ import annotations

import contextlib
import http.client
import json
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.daemon import Daemon, fetch, wait_until
from support.server import running_server
from support.worker import Worker

from kvserver._native import CpuDevice, HostRegion
from kvserver.config.settings import MiB
from kvserver.copy import Devices
from kvserver.web import connections as connections_module
from kvserver.web import pages as pages_module
from kvserver.web.pages import StatusPages

MOST_THREADS = 100  # of the whole daemon
HALF = b"POST /cache/clear HTTP/1.1\r\nHost: localhost\r\nX-Slow: "
BODY = (
    b"POST /kv/match HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 4000000\r\n\r\n"
)


@pytest.fixture(scope="module", autouse=True)
def _descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def threads(daemon: Daemon) -> int:
    lines = Path(f"/proc/{daemon.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Threads:"))


def connected(daemon: Daemon, at_end: contextlib.ExitStack, count: int, sends: bytes = b"") -> list[socket.socket]:
    made = []
    for _ in range(count):
        connection = at_end.enter_context(socket.create_connection(("127.0.0.1", daemon.http_port), timeout=10))
        with contextlib.suppress(OSError):  # it may be ended already
            connection.sendall(sends)
        made.append(connection)
    return made


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(65536) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def refused(daemon: Daemon, reason: str) -> int:
    found: int = daemon.status()["http"]["refused"].get(reason, 0)
    return found


def test_half_sent_requests_take_a_bounded_number_of_threads_and_the_pages_answer(
    daemon: Daemon, worker: Worker
) -> None:
    with contextlib.ExitStack() as at_end:
        hung = connected(daemon, at_end, 1500, HALF)
        assert threads(daemon) < MOST_THREADS
        for path in ("/livez", "/readyz", "/metrics", "/status"):
            assert daemon.http(path)[0] == 200, path
        assert threads(daemon) < MOST_THREADS
        assert sum(map(is_open, hung)) < MOST_THREADS
        assert refused(daemon, "crowded") > 1000
    wait_until(lambda: daemon.status()["http"]["connections"] <= 1, what="every connection ended")
    assert daemon.http("/cache/clear", "POST")[0] == 200
    worker.round_trip()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[StatusPages]:
    """The pages of a server in this process, with deadlines of a second."""
    for module in (connections_module, pages_module):
        monkeypatch.setattr(module, "REQUEST_SECONDS", 1.0)
        monkeypatch.setattr(module, "ANSWER_SECONDS", 1.0)
    with running_server(Devices(CpuDevice(HostRegion(MiB), 4096, 1))) as running:
        yield running.pages


@pytest.mark.parametrize(
    ("begins", "drips"),
    [(HALF, b"x"), (BODY + b"{", b""), (BODY + b"{", b" ")],
    ids=["head", "body that stops", "body"],
)
def test_a_request_that_is_dripped_is_given_up_after_a_time_for_all_of_it(
    impatient: StatusPages, begins: bytes, drips: bytes
) -> None:
    with socket.create_connection(("127.0.0.1", impatient.port), timeout=10) as slow:
        slow.sendall(begins)
        began = time.monotonic()

        def dripped() -> bool:
            with contextlib.suppress(OSError):
                slow.send(drips)
            time.sleep(0.05)
            return not is_open(slow)

        wait_until(dripped, 20, "the connection ended although bytes arrived all the time")
        assert time.monotonic() - began > 0.9
    wait_until(lambda: impatient.status().connections == 0)
    assert impatient.status().refused == {"slow": 1}, "counted once"


def test_limits_of_requests_and_answers_leave_a_slow_network_4_seconds() -> None:
    assert connections_module.REQUEST_SECONDS > 4
    assert connections_module.ANSWER_SECONDS > 4


def test_longest_idle_connection_is_closed_first_and_requests_are_answered(daemon: Daemon) -> None:
    """Connections that are kept idle cannot shut out others, nor each other's requests."""
    with contextlib.ExitStack() as at_end:
        kept = [http.client.HTTPConnection("127.0.0.1", daemon.http_port, timeout=10) for _ in range(MOST_THREADS)]
        for connection in kept:
            at_end.callback(connection.close)
            connection.request("GET", "/livez")
            answer = connection.getresponse()
            assert (answer.status, answer.read()) == (200, b"alive\n")
        kept[-1].request("GET", "/livez")
        assert kept[-1].getresponse().status == 200
        assert kept[0].sock is not None
        assert not is_open(kept[0].sock)
        assert threads(daemon) < MOST_THREADS


def test_an_answer_that_is_never_read_is_given_up(impatient: StatusPages) -> None:
    """Its thread would wait for room in the socket."""
    many = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000
    livez = f"http://127.0.0.1:{impatient.port}/livez"
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.settimeout(1)
        deaf.connect(("127.0.0.1", impatient.port))
        with contextlib.suppress(TimeoutError):
            deaf.sendall(many)
        assert fetch(livez)[0] == 200
        wait_until(lambda: impatient.status().refused == {"unread": 1}, 60, "the answer was given up")
    assert fetch(livez)[0] == 200


def test_when_every_thread_answers_a_probe_still_gets_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages wait for a loop that hangs. A loop that hangs needs a function that hangs in it, so this runs in our own process."""
    monkeypatch.setattr(pages_module, "LOOP_DEADLINE_SECONDS", 30.0)
    with (
        running_server(Devices(CpuDevice(HostRegion(MiB), 4096, 1))) as running,
        contextlib.ExitStack() as at_end,
        running.loop_stopped(),
    ):
        pages = running.pages
        url = f"http://127.0.0.1:{pages.port}"
        asking = [threading.Thread(target=fetch, args=(f"{url}/status", "GET", 60.0)) for _ in range(64)]
        for thread in asking:
            thread.start()
            at_end.callback(thread.join)
        wait_until(lambda: pages.status().answering == 64)
        code, body = fetch(f"{url}/status")
        assert (code, json.loads(body)["error"]) == (503, "busy")
        for _ in range(3):
            assert fetch(f"{url}/livez") == (200, "alive\n")
        assert pages.status().refused == {"busy": 1}, "no client that is being answered is thrown out"


def test_a_head_without_end_is_refused(daemon: Daemon) -> None:
    for sent in (
        b"GET /" + b"x" * 70_000,
        b"GET / HTTP/1.1\r\n" + b"X-A: " + b"y" * 60_000 + b"\r\nX-B: " + b"z" * 60_000,
    ):
        with contextlib.ExitStack() as at_end:
            (connection,) = connected(daemon, at_end, 1, sent)
            wait_until(lambda connection=connection: not is_open(connection), 4)
    assert daemon.http("/livez")[0] == 200
