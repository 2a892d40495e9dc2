"""A daemon whose log is a pipe that its reader left full, as a log collector that hangs does, stopped in the middle of its loop. Engines got no
answer, and SIGTERM had no effect.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator

import pytest
from support.daemon import Daemon, fetch, wait_until
from support.ports import reserved_port
from support.worker import Worker


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    reservation, port = reserved_port()
    made = Daemon(http_port=port, log_format="json")
    yield made
    made.close()
    reservation.close()


def answers(daemon: Daemon) -> bool:
    try:
        return fetch(f"http://127.0.0.1:{daemon.flags['http_port']}/status")[0] == 200
    except OSError:
        return False


def test_records_that_the_log_does_not_take_are_dropped_and_counted(daemon: Daemon) -> None:
    read, write = os.pipe()
    os.set_blocking(read, False)
    process = subprocess.Popen(daemon.command(), stdout=subprocess.DEVNULL, stderr=write)
    os.close(write)
    try:
        wait_until(lambda: answers(daemon), 60)
        for _ in range(400):  # two records each, of more than 100 bytes; a pipe has 64 KiB
            Worker(daemon.endpoint, instance_id="engine" * 40).close()
        assert answers(daemon)
        lines = everything(read).split(b"\n")
        with Worker(daemon.endpoint) as worker:
            worker.round_trip()
        process.terminate()
        assert process.wait(60) == 0
        notices = [line for line in [*lines, *everything(read).split(b"\n")] if b"were dropped" in line]
        assert json.loads(notices[0])["message"].endswith("records of the log were dropped: it took no more")
        assert int(json.loads(notices[0])["message"].split()[0]) > 100
    finally:
        process.kill()
        process.wait()
        os.close(read)


def everything(read: int) -> bytes:
    """What the pipe has now."""
    parts = []
    try:
        while part := os.read(read, 1 << 20):
            parts.append(part)
    except BlockingIOError:
        pass
    return b"".join(parts)
