"""These tests need a GPU: a real one, or KVSERVER_SIMULATED_GPU=1. KVSERVER_REQUIRE_GPU=1 makes its absence a failure."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from support.daemon import Daemon, wait_until
from support.engine_process import EngineProcess
from support.gpu_memory import SIMULATED, daemon_flags, found

HERE = os.path.dirname(__file__)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    uuid, why_not = found()
    for item in items:
        if not uuid and str(item.path).startswith(HERE):
            item.add_marker(pytest.mark.skip(reason=why_not))


def pytest_sessionstart() -> None:
    if os.environ.get("KVSERVER_REQUIRE_GPU") == "1":
        assert not SIMULATED, "KVSERVER_REQUIRE_GPU=1 requires a real GPU"
        assert found()[0], found()[1]


@pytest.fixture(scope="module")
def gpu_daemon() -> Iterator[Daemon]:
    """One daemon for a module, with room for what its engines store."""
    daemon = Daemon(l1_size="96MiB" if SIMULATED else "5GiB", **daemon_flags()).start()
    yield daemon
    daemon.close()


@pytest.fixture
def make_engine() -> Iterator[Callable[..., EngineProcess]]:
    """Start an engine process that registers with a daemon; it ends with the test."""
    engines: list[EngineProcess] = []

    def make(daemon: Daemon) -> EngineProcess:
        engines.append(EngineProcess(daemon.endpoint, in_torch=True))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def engine(gpu_daemon: Daemon) -> Iterator[EngineProcess]:
    """One that no test kills."""
    with EngineProcess(gpu_daemon.endpoint, in_torch=True) as found:
        yield found


@pytest.fixture
def daemon(gpu_daemon: Daemon) -> Iterator[Daemon]:
    """After every test the daemon runs, has no engine's resources, and is cleared."""
    yield gpu_daemon
    assert gpu_daemon.running(), gpu_daemon.log[-4000:]
    gpu_daemon.http("/cache/clear", "POST")
    wait_until(lambda: gpu_daemon.accounting()["tickets"] == 0)
