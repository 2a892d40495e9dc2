"""A daemon that is replaced under an engine at work."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import pytest
from modelless import Engine
from support.daemon import Daemon, wait_until


def connected(caplog: pytest.LogCaptureFixture, daemon: Daemon, half: str) -> int:
    """How many engines' halves of this name use the daemon. REQUIRES: INFO of vllm.kvserver is captured."""
    return sum(f"{half}: connected" in line and daemon.boot_id in line for line in caplog.text.splitlines())


def restart(daemon: Daemon, caplog: pytest.LogCaptureFixture, meanwhile: Callable[[], None] = lambda: None) -> None:
    """The next daemon is empty. Returns when its engines' workers know it; their scheduler halves may not yet.

    `meanwhile` is called while there is none.
    """
    caplog.set_level(logging.INFO, "vllm.kvserver")
    instances = len(daemon.status()["instances"])
    daemon.kill()
    meanwhile()
    daemon.start()
    wait_until(lambda: connected(caplog, daemon, "worker 0") == instances, 20, "the workers know the new daemon")


def step_until_known(daemon: Daemon, engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """Steps, slowly, until the engine's scheduler half knows this daemon. REQUIRES: the engine has work until then."""

    def stepped() -> int:
        assert engine.scheduler.requests, "all was over before the engine knew"
        engine.step()
        time.sleep(0.02)
        return connected(caplog, daemon, "scheduler")

    wait_until(stepped, 20, "the scheduler half knows the new daemon")


def replace_daemon(daemon: Daemon, engine: Engine, caplog: pytest.LogCaptureFixture, steps: int = 20) -> None:
    """Restart it, until the engine knows the next one; so many steps while there is none. REQUIRES: the engine has work."""

    def step_on() -> None:
        for _ in range(steps):
            engine.step()

    restart(daemon, caplog, step_on)
    step_until_known(daemon, engine, caplog)
