"""To start an engine takes a processor 12 s, of which 8 import vLLM, so the tests of a file share engines (tests/README.md has them all).

The daemon's endpoint is one for all; each test starts its own daemon on it, with the flags it needs,
and the engines find it again by themselves: that too is tested by every test.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tiny_models
from engines import TIMEOUTS, Engine, Engines, Prompt, engine_group
from support.daemon import Daemon

os.environ.setdefault("KVSERVER_TAILS", "off")  # these tests are about chunks; those of single blocks pass tails="on"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engines(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with engine_group(model, tmp_path_factory.mktemp("engines")) as group:
        yield group


@pytest.fixture
def first(engines: Engines) -> Engine:
    """In float32, so that neither batches nor the split of prefill change a token."""
    return engines.get("first", dtype="float32", extra=TIMEOUTS, measures_speed=False)


@pytest.fixture
def second(engines: Engines) -> Engine:
    """A second process of the same model, with chunked prefill in small steps."""
    return engines.get("second", dtype="float32", extra=TIMEOUTS, measures_speed=False, max_num_batched_tokens=256)


@pytest.fixture
def well_afterwards(engines: Engines) -> Iterator[None]:
    """After a test no engine has swallowed an exception of ours or lost a block, and each still answers."""
    yield
    for engine in engines.live():
        engine.wait_for_stores()
        engine.forget()
        counters = engine.counters()
        assert (counters["errors"], counters["blocks_in_use"]) == ({}, 0), f"{engine.log}: {counters}"


@pytest.fixture
def start_daemon(engines: Engines) -> Iterator[Callable[..., Daemon]]:
    """Start a daemon on the shared endpoint and wait until every live engine has registered with it."""
    started: list[Daemon] = []

    def start(wait: bool = True, **flags: object) -> Daemon:
        daemon = Daemon(**({"endpoint": engines.endpoint, "l1_size": "256MiB", "chunk_tokens": 256} | flags))
        started.append(daemon)
        daemon.start()
        if wait:
            engines.wait_registered(daemon)
        return daemon

    yield start
    for daemon in started:
        daemon.close()


@pytest.fixture
def l1_file() -> Iterator[Path]:
    """Path on tmpfs where no file is yet."""
    folder = Path(tempfile.mkdtemp(prefix="kvs-", dir="/dev/shm"))
    yield folder / "l1"
    shutil.rmtree(folder)


@pytest.fixture
def prompt() -> Callable[..., Prompt]:
    """`prompt(seed, length)`: random token ids."""

    return tiny_models.prompt
