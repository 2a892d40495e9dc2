"""A child that an engine's process forks without exec inherits the worker's lifeline, whose end then never arrived when the engine
died: its memory stayed mapped, its id was refused to the next incarnation. The child closes its copy, and the daemon watches the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.daemon import Daemon, wait_until
from support.engine_process import EngineProcess


@pytest.fixture(params=["python", "c"])
def engine(request, make_daemon) -> Iterator[tuple[Daemon, EngineProcess, int, int]]:
    """(its daemon, the process of its worker, the child that this has forked, the inode of its lifeline)."""
    daemon = make_daemon()
    with EngineProcess(daemon.endpoint, instance_id="engine") as process:
        child, inode = process.ask("fork", request.param)
        yield daemon, process, child, inode
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


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
    wait_until(lambda: not daemon.status()["instances"], 2, "the engine has ended")
    os.kill(child, 0)  # it runs
    daemon.wait_for_clean_accounting()


@pytest.mark.parametrize("engine", ["python"], indirect=True)
def test_a_child_has_no_lifeline(engine):
    """Where the daemon cannot see the process, in another pid namespace, the end of the connection is all it gets."""
    _, process, child, inode = engine
    assert f"socket:[{inode}]" in sockets(process.pid)
    wait_until(lambda: f"socket:[{inode}]" not in sockets(child), 5, "the child has closed it")
