"""A daemon whose stdout went to a full disk ended with 1 at its ready line, and with 0 where the reader of its stdout had ended. One whose
log went to a full disk ended with 1 at SIGTERM, as a unit that has failed, or at its start if it had warned by then. A refused start ended with 1, not 2.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest
from support.daemon import Daemon, fetch, wait_until
from support.ports import reserved_port

WARNED = {"KVSERVER_L1_SIZ": "1GiB"}  # it warns before it is ready


def opened(name: str) -> int:
    if name != "unread":
        return os.open(name, os.O_WRONLY)
    read, write = os.pipe()
    os.close(read)
    return write


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    reservation, port = reserved_port()
    made = Daemon(http_port=port)
    yield made
    made.close()
    reservation.close()


def started(daemon: Daemon, stdout: str, stderr: str, **env: str) -> subprocess.Popen[str]:
    out, err = opened(stdout), opened(stderr)
    process = subprocess.Popen(daemon.command(), stdout=out, stderr=err, text=True, env=os.environ | env)
    os.close(out)
    os.close(err)
    return process


def answers(daemon: Daemon) -> bool:
    """True once its loop does, which begins behind the ready line."""
    try:
        return fetch(f"http://127.0.0.1:{daemon.flags['http_port']}/status")[0] == 200
    except OSError:
        return False


@pytest.mark.parametrize(
    ("stdout", "stderr"), [("/dev/full", "unread"), ("unread", "/dev/null"), ("/dev/null", "/dev/full")]
)
def test_a_daemon_that_can_print_nothing_serves_and_ends_with_0(daemon: Daemon, stdout: str, stderr: str) -> None:
    process = started(daemon, stdout, stderr, **WARNED)
    try:
        wait_until(lambda: process.poll() is not None or answers(daemon), 60, "it answers, or has ended")
        assert process.poll() is None
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def test_a_refused_start_that_cannot_state_why_ends_with_2(daemon: Daemon) -> None:
    daemon.flags["chunk_tokens"] = 0
    assert started(daemon, "/dev/null", "/dev/full").wait(60) == 2
