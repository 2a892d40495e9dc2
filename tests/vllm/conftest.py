"""Engines are dear (10-20 s each), so the tests of this folder share them.

The daemon's endpoint is one for all; each test starts its own daemon on it, with the flags it needs,
and the engines find it again by themselves: that too is tested by every test.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tiny_models
from engines import Engine
from support.daemon import Daemon, wait_until

Prompt = list[int]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.llama(tmp_path_factory.mktemp("model"))


class Engines:
    """Every engine by name, started when first asked for, all against one endpoint."""

    def __init__(self, model: Path, folder: Path, endpoint: str) -> None:
        self.model = model
        self.endpoint = endpoint
        self._folder = folder
        self._engines: dict[str, Engine] = {}

    def get(self, name: str, **options: object) -> Engine:
        """The options count when it is first asked for."""
        engine = self._engines.get(name)
        if engine is None or engine.process.poll() is not None:
            engine = self.start(name, **options)
            self._engines[name] = engine
        return engine

    def start(self, name: str, *, endpoint: str | None = "shared", **options: object) -> Engine:
        """One more engine; the caller ends it."""
        model = Path(str(options.pop("model", self.model)))
        target = self.endpoint if endpoint == "shared" else endpoint
        return Engine(model, target, self._folder / f"{name}.log", **options)  # type: ignore[arg-type]

    def live(self) -> list[Engine]:
        return [engine for engine in self._engines.values() if engine.process.poll() is None]

    def running(self, name: str) -> Engine | None:
        engine = self._engines.get(name)
        return engine if engine is not None and engine.process.poll() is None else None

    def wait_registered(self, daemon: Daemon) -> None:
        """Until every engine of this group that lives stands in the daemon, with a namespace."""
        live = [engine.wait_ready() for engine in self.live()]
        wait_until(
            lambda: sum(bool(i["namespace"]) for i in daemon.status()["instances"]) >= len(live),
            30,
            f"{len(live)} instances registered",
        )
        for engine in live:
            if not engine.multiprocess:  # the other kind is not to be asked
                wait_until(lambda e=engine: e.counters()["connected"], 10, "the scheduler half connected")

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()


@pytest.fixture(scope="session")
def engines(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    holder = Daemon()  # only for its folder: a short path for the endpoint
    group = Engines(model, tmp_path_factory.mktemp("engines"), holder.endpoint)
    yield group
    group.close()
    holder.close()


TIMEOUTS = {"kvserver.load_timeout_ms": 1500, "kvserver.store_timeout_ms": 3000}


@pytest.fixture
def first(engines: Engines) -> Engine:
    """In float32, so that neither batches nor the split of prefill change a token."""
    return engines.get("first", dtype="float32", extra=TIMEOUTS)


@pytest.fixture
def second(engines: Engines) -> Engine:
    """A second process of the same model, with chunked prefill in small steps."""
    return engines.get("second", dtype="float32", extra=TIMEOUTS, max_num_batched_tokens=256)


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
def prompt() -> Callable[..., Prompt]:
    """`prompt(seed, length)`: random token ids."""

    def make(seed: int, length: int) -> Prompt:
        source = random.Random(seed)
        return [source.randrange(3, tiny_models.VOCAB) for _ in range(length)]

    return make
