"""Fixtures that several folders use: a running daemon and workers that are closed at the end."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.daemon import GPUS, Daemon
from support.leftovers import close_leftovers
from support.worker import Worker

pytest_plugins = ["support.skips"]

# Files with few tests that take long: they begin first, or one lane would end long after the others.
LONG = (
    "model/test_random_walk.py",
    "vllm/test_vllm_groups.py",
    "vllm/test_vllm_outputs.py",
    "vllm/test_vllm_failures.py",
    "vllm/test_vllm_windows.py",
    "unit/l2/test_remote_faults.py",
    "daemon/test_packages.py",
    "native/test_gpu_benchmark.py",
    "unit/l2/test_remote.py",
    "daemon/test_guides.py",
    "unit/l2/test_mooncake.py",
    "daemon/test_page.py",
    "issues/test_turns_grew_with_the_cache.py",
)

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # a shell's job in the background, whose children would ignore it, too
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = Path(__file__).parent
    places = {tests / name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path, len(LONG)))


@pytest.fixture(autouse=True)
def leftovers() -> Iterator[None]:
    """Whatever a failed test did not come to close."""
    yield
    close_leftovers()


@pytest.fixture(scope="module")
def device(request: pytest.FixtureRequest) -> str:
    """Where engines' memory lies: "cpu", or "gpu", a simulated one, for the modules that are `on_each_device`."""
    place: str = getattr(request, "param", "cpu")
    return place


@pytest.fixture(scope="module")
def gpu(device: str) -> str:
    """The UUID of the GPU whose memory workers have; empty for the CPU."""
    return GPUS[0] if device == "gpu" else ""


@pytest.fixture(scope="module")
def gpu_flags(gpu: str) -> dict[str, Any]:
    """What a daemon needs to serve it."""
    return {"simulated_gpus": len(GPUS)} if gpu else {}


@pytest.fixture
def make_daemon(gpu_flags: dict[str, Any]) -> Iterator[Callable[..., Daemon]]:
    """Start a daemon with these flags; it ends with the test."""
    daemons: list[Daemon] = []

    def make(start: bool = True, **flags: Any) -> Daemon:
        daemons.append(Daemon(**{**gpu_flags, **flags}))
        return daemons[-1].start() if start else daemons[-1]

    yield make
    try:
        for daemon in daemons:
            daemon.check_gpus()
    finally:
        for daemon in daemons:
            daemon.close()


@pytest.fixture
def make_worker(gpu: str) -> Iterator[Callable[..., Worker]]:
    """Connect a worker to a daemon; it hangs up with the test."""
    workers: list[Worker] = []

    def make(daemon: Daemon, **options: Any) -> Worker:
        workers.append(Worker(daemon.endpoint, **{"gpu": gpu, **options}))
        return workers[-1]

    yield make
    for worker in workers:
        worker.close()


@pytest.fixture(scope="module")
def module_daemon(gpu_flags: dict[str, Any]) -> Iterator[Daemon]:
    daemon = Daemon(l1_size="16MiB", **gpu_flags).start()
    yield daemon
    daemon.close()


@pytest.fixture
def daemon(module_daemon: Daemon) -> Iterator[Daemon]:
    """One daemon for a module. After every test it must run and hold nothing for any peer, and it is cleared."""
    if not module_daemon.running():
        module_daemon.start()  # an earlier test has failed for it
    yield module_daemon
    module_daemon.clear_and_check()


@pytest.fixture
def worker(daemon: Daemon, make_worker: Callable[..., Worker]) -> Worker:
    """One connected worker of a world of one."""
    return make_worker(daemon)
