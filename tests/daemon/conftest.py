"""Daemons that several files of this folder use: one whose copies are slow and can be paused, one whose L1 is a file."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.daemon import Daemon, pin_l1
from support.slow_copies import AT_ONCE, COPY_DELAY_US


@pytest.fixture(scope="module")
def slow_module_daemon(device: str, gpu: str, gpu_flags: dict[str, Any]) -> Iterator[Daemon]:
    gpu_flags = {**gpu_flags, "gpus": gpu} if gpu else {}
    daemon = Daemon(
        l1_size="16MiB", pauses=True, copy_delay_us=COPY_DELAY_US[device], copy_threads=AT_ONCE, **gpu_flags
    ).start()
    if gpu:
        pin_l1(daemon)  # until then one copy at a time
    yield daemon
    daemon.close()


@pytest.fixture
def slow(slow_module_daemon: Daemon) -> Iterator[Daemon]:
    """A daemon whose copies can be interrupted; after every test it runs and holds nothing."""
    if not slow_module_daemon.running():
        slow_module_daemon.start()
    yield slow_module_daemon
    slow_module_daemon.clear_and_check()


@pytest.fixture
def path() -> Iterator[Path]:
    """Path on tmpfs where no file is yet."""
    folder = Path(tempfile.mkdtemp(prefix="kvs-", dir="/dev/shm"))
    yield folder / "l1"
    shutil.rmtree(folder)


@pytest.fixture
def kept(make_daemon: Callable[..., Daemon], path: Path) -> Daemon:
    """A daemon whose L1 is that file."""
    return make_daemon(l1_file=path)
