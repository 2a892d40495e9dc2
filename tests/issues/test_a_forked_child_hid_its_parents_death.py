"""A child that an engine's process forks without exec inherits the worker's lifeline, whose end then never arrived when the engine
died: its memory stayed mapped, its id was refused to the next incarnation. The child closes its copy, and the daemon watches the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.daemon import Daemon, wait_until

TESTS = Path(__file__).parents[1]
ENGINE = """
import ctypes, os, sys, time
from support.worker import Worker

worker = Worker(sys.argv[1], instance_id="engine")
fork = {"python": os.fork, "c": ctypes.CDLL(None).fork}[sys.argv[2]]
child = fork()
if child == 0:
    time.sleep(120)
    os._exit(0)
print(child, os.fstat(worker.attachment.fileno()).st_ino, flush=True)
time.sleep(120)
"""


@pytest.fixture(params=["python", "c"])
def engine(request, make_daemon) -> Iterator[tuple[Daemon, subprocess.Popen[str], int, int]]:
    """(its daemon, the process of its worker, the child that this has forked, the inode of its lifeline)."""
    daemon = make_daemon()
    process = subprocess.Popen(
        [sys.executable, "-c", ENGINE, daemon.endpoint, request.param], cwd=TESTS, stdout=subprocess.PIPE, text=True
    )
    child = 0
    try:
        assert process.stdout is not None
        child, inode = map(int, process.stdout.readline().split())
        yield daemon, process, child, inode
    finally:
        process.kill()
        if child:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        process.communicate()


def sockets(pid: int) -> set[str]:
    found = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.add(os.readlink(fd))
    return found


def test_the_daemon_notices_the_death_while_the_child_runs(engine):
    daemon, process, child, _ = engine
    assert [i["instance_id"] for i in daemon.status()["instances"]] == ["engine"]
    process.kill()
    process.wait()
    wait_until(lambda: not daemon.status()["instances"], 2, "the engine has ended")
    os.kill(child, 0)  # it runs
    daemon.wait_for_clean_accounting()


@pytest.mark.parametrize("engine", ["python"], indirect=True)
def test_a_child_has_no_lifeline(engine):
    """Where the daemon cannot see the process, in another pid namespace, the end of the connection is all it gets."""
    _, process, child, inode = engine
    assert f"socket:[{inode}]" in sockets(process.pid)
    wait_until(lambda: f"socket:[{inode}]" not in sockets(child), 5, "the child has closed it")
