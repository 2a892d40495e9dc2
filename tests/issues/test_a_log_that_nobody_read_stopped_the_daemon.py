"""A daemon whose log is a pipe or a terminal that its reader left full, as a log collector that hangs does, stopped in the middle of its loop.
Engines got no answer, and SIGTERM had no effect. One whose stdout was such a pipe waited at its ready line.
"""

from __future__ import annotations

import json
import logging
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.daemon import Daemon, fetch, wait_until
from support.ports import reserved_port
from support.worker import Worker

from kvserver.config.logs import MOST_LINES, JsonLines, LogHandler


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    reservation, port = reserved_port()
    made = Daemon(http_port=port)
    yield made
    made.close()
    reservation.close()


def is_ready(daemon: Daemon) -> bool:
    try:
        return fetch(f"http://127.0.0.1:{daemon.flags['http_port']}/readyz")[0] == 200
    except OSError:
        return False


@contextmanager
def serving(daemon: Daemon, read: int, write: int, **streams: int) -> Iterator[None]:
    """Run the daemon from its readiness to its end by SIGTERM. Nobody reads what it writes; closes both descriptors."""
    process = subprocess.Popen(daemon.command(), **streams)
    os.close(write)
    try:
        wait_until(lambda: is_ready(daemon), 60)
        yield
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(read)


@pytest.mark.parametrize("opened", [os.pipe, pty.openpty])
def test_a_daemon_whose_log_nobody_reads_serves_and_ends(daemon: Daemon, opened) -> None:
    read, write = opened()
    with serving(daemon, read, write, stdout=subprocess.DEVNULL, stderr=write):
        for _ in range(400):  # two records each, of more than 100 bytes; a pipe has 64 KiB
            Worker(daemon.endpoint, instance_id="engine" * 40).close()
        wait_until(lambda: is_ready(daemon), 60)


def test_a_daemon_whose_ready_line_nobody_reads_serves_and_ends(daemon: Daemon) -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    try:
        while True:
            os.write(write, b"x")
    except BlockingIOError:
        os.set_blocking(write, True)
    with serving(daemon, read, write, stdout=write, stderr=subprocess.DEVNULL), Worker(daemon.endpoint) as worker:
        worker.round_trip()


def test_lines_that_the_log_does_not_take_are_dropped_and_counted_once() -> None:
    read, write = os.pipe()
    with open(write, "w") as stream, open(read, "rb") as reader:
        handler, total = LogHandler(stream), MOST_LINES + 2000  # a pipe has 64 KiB
        handler.setFormatter(JsonLines())
        for number in range(total):
            handler.handle(record(f"{number} " + "x" * (20_000 if number == 7 else 200)))
        seen, dropped = list[int](), 0
        while len(seen) + dropped < total:
            first, rest = json.loads(reader.readline())["message"].split(" ", 1)
            if rest.startswith("records"):
                dropped += int(first)
            else:
                seen.append(int(first))
        assert seen == list(range(len(seen))), "the lines that waited are there, in order"
        assert len(seen) >= MOST_LINES
        assert dropped > 0
        handler.flush()


SIGNALS = """
import logging, signal, sys
from kvserver.config.logs import LogHandler

handler = LogHandler(open("/dev/null", "w"))
record = logging.LogRecord("a", logging.INFO, "", 0, "text", (), None)
signal.signal(signal.SIGALRM, lambda *_: handler.handle(record))
signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
for _ in range(200_000):
    handler.handle(record)
signal.setitimer(signal.ITIMER_REAL, 0)
"""


def test_a_signal_that_logs_in_the_midst_of_a_record_does_not_wait_for_it() -> None:
    subprocess.run([sys.executable, "-c", SIGNALS], check=True, timeout=120)


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("a", logging.INFO, "", 0, text, (), None)
