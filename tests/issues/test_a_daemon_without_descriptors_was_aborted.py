"""A daemon that had no descriptor left for a connecting engine was ended by libzmq (SIGABRT), with all that it had cached. A worker whose
descriptors did not fit into the daemon's got the error of one that had sent too many."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.daemon import Daemon, wait_until
from support.worker import Worker, make_keys

from kvserver.protocol.client import RequestFailed

MakeWorker = Callable[..., Worker]


@contextlib.contextmanager
def few_left(daemon: Daemon, left: int) -> Iterator[None]:
    """The daemon may open so many descriptors more."""
    limits = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
    used = len(os.listdir(f"/proc/{daemon.pid}/fd"))
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (used + left, limits[1]))
    yield
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, limits)


def connect_all(at_end: contextlib.ExitStack, path: str, count: int) -> None:
    """The kernel queues a part of them, and refuses the others at once."""
    for _ in range(count):
        connection = at_end.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
        connection.connect_ex(path)


def test_200_connections_to_a_daemon_with_10_descriptors_wait_and_engines_go_on(
    make_daemon: Callable[..., Daemon], make_worker: MakeWorker
) -> None:
    daemon = make_daemon()
    worker = make_worker(daemon)
    with contextlib.ExitStack() as at_end:
        with few_left(daemon, 10):
            connect_all(at_end, daemon.endpoint.removeprefix("ipc://"), 200)
            for _ in range(20):
                worker.round_trip()
            wait_until(lambda: "clients wait to connect: fewer than 16 descriptors are free" in daemon.log)
        make_worker(daemon).round_trip()
    assert daemon.running
    worker.round_trip()


def test_connections_beyond_the_limit_leave_the_daemon_its_last_descriptors(
    make_daemon: Callable[..., Daemon], make_worker: MakeWorker
) -> None:
    daemon = make_daemon()
    worker = make_worker(daemon)
    path = daemon.endpoint.removeprefix("ipc://")
    with contextlib.ExitStack() as at_end, few_left(daemon, 60):
        most, _ = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
        for _ in range(10):
            connect_all(at_end, path, 20)
            worker.round_trip()
        wait_until(lambda: len(os.listdir(f"/proc/{daemon.pid}/fd")) == most - 15)
        worker.round_trip()
        assert "clients wait to connect" in daemon.log
    make_worker(daemon).round_trip()


def test_200_readers_of_kv_events_wait_while_few_descriptors_are_left(
    make_daemon: Callable[..., Daemon], make_worker: MakeWorker
) -> None:
    with tempfile.TemporaryDirectory(prefix="kvs-") as folder:
        paths = [f"{folder}/events", f"{folder}/replay"]
        daemon = make_daemon(kv_events_endpoint=f"ipc://{paths[0]}", kv_events_replay_endpoint=f"ipc://{paths[1]}")
        worker = make_worker(daemon)
        worker.send(worker.description(hash_form="bytes"))
        wait_until(lambda: daemon.metric("kvserver_kv_events_bound"), what="the stream's sockets")
        used = len(os.listdir(f"/proc/{daemon.pid}/fd"))
        with contextlib.ExitStack() as at_end, few_left(daemon, 10):
            for path in paths:
                connect_all(at_end, path, 100)
            worker.round_trip()
            wait_until(lambda: daemon.log.count("clients wait to connect") == 2)
            assert len(os.listdir(f"/proc/{daemon.pid}/fd")) <= used + 1
        worker.round_trip()


def test_two_engines_go_on_while_a_third_is_refused_with_the_limit_to_raise(
    make_daemon: Callable[..., Daemon], make_worker: MakeWorker
) -> None:
    daemon = make_daemon()
    engines = [make_worker(daemon) for _ in range(2)]
    third = make_worker(daemon, connect_now=False)
    with few_left(daemon, 24):
        with pytest.raises(RequestFailed, match=r"^no_descriptors: .*LimitNOFILE"):
            third.attach()
        for engine in engines:
            engine.round_trip()
    third.connect().round_trip()


def test_a_worker_whose_descriptors_do_not_fit_gets_an_error_of_its_own(
    make_daemon: Callable[..., Daemon], make_worker: MakeWorker
) -> None:
    daemon = make_daemon()
    worker = make_worker(daemon, connect_now=False)
    sent = [os.memfd_create("test-sent") for _ in range(60)]
    used = len(os.listdir(f"/proc/{daemon.pid}/fd"))
    try:
        with few_left(daemon, 40), pytest.raises(RequestFailed, match=r"^no_descriptors: "):
            worker.attach(sent)
    finally:
        for fd in sent:
            os.close(fd)
    wait_until(lambda: len(os.listdir(f"/proc/{daemon.pid}/fd")) <= used + 1, what="all but the ZMQ connection closed")
    worker.connect().store(make_keys(1), worker.blocks_for(1))


def test_pages_answer_503_with_the_reason_while_few_descriptors_are_left(make_daemon: Callable[..., Daemon]) -> None:
    daemon = make_daemon()
    with few_left(daemon, 24):
        code, body = daemon.http("/status")
        assert (code, json.loads(body)["error"]) == (503, "descriptors")
        assert daemon.http("/livez")[0] == daemon.http("/readyz")[0] == 200, (
            "an orchestrator ends a daemon that answers 503"
        )
    assert daemon.http("/livez")[0] == 200
    assert daemon.status()["http"]["refused"]["descriptors"] == 1


def test_a_limit_too_low_for_a_daemon_is_refused_with_the_number_needed(tmp_path: Path) -> None:
    program = str(Path(sys.executable).with_name("kvserver"))
    command = [program, "serve", "--endpoint", f"ipc://{tmp_path}/kv.sock", "--http-port", "0", "--l1-size", "64MiB"]
    low = ["sh", "-c", 'ulimit -n 48; exec "$@"', "sh", *command]
    ended = subprocess.run(low, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2, ended.stderr
    assert "the daemon may open 48 files and needs at least 128" in ended.stderr
