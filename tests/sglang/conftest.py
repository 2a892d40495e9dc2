"""The fixtures of tests with real SGLang engines. A start takes a processor 20 s, so the tests of a file share engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tiny_models
from sglang_engines import Engine, Prompt
from support.daemon import Daemon, wait_until


class Engines:
    """Every engine by name, started when first needed, all against one endpoint."""

    def __init__(self, model: Path, folder: Path, endpoint: str) -> None:
        self.model, self.endpoint, self._folder = model, endpoint, folder
        self._engines: dict[str, Engine] = {}

    def get(self, name: str, *, endpoint: str | None = "shared", **options: object) -> Engine:
        """The options count only when this starts the engine."""
        engine = self._engines.get(name)
        if engine is None or engine.process.poll() is not None:
            model = Path(str(options.pop("model", self.model)))
            target = self.endpoint if endpoint == "shared" else endpoint
            engine = Engine(model, target, self._folder / f"{name}.log", **options)  # type: ignore[arg-type]
            self._engines[name] = engine
        return engine

    def end(self, name: str) -> None:
        if (engine := self._engines.pop(name, None)) is not None:
            engine.kill()

    def close(self) -> None:
        for engine in self._engines.values():
            engine.kill()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.llama(tmp_path_factory.mktemp("model"), dtype="float32")


@pytest.fixture(scope="module")
def engines(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    holder = Daemon()  # only for its folder: a short path for the endpoint
    group = Engines(model, tmp_path_factory.mktemp("engines"), holder.endpoint)
    yield group
    group.close()
    holder.close()


@pytest.fixture
def start_daemon(engines: Engines) -> Iterator[Callable[..., Daemon]]:
    """`start_daemon(engine, ...)`: start a daemon on the shared endpoint and wait until these engines have registered with it."""
    started: list[Daemon] = []

    def start(*wait_for: Engine, **flags: object) -> Daemon:
        daemon = Daemon(**({"endpoint": engines.endpoint, "l1_size": "256MiB", "chunk_tokens": 256} | flags))
        started.append(daemon)
        daemon.start()
        for engine in wait_for:
            engine.wait_ready()
        wait_until(
            lambda: sum(bool(i["namespace"]) for i in daemon.status()["instances"]) >= len(wait_for),
            30,
            f"{len(wait_for)} instances registered",
        )
        return daemon

    yield start
    for daemon in started:
        daemon.close()


@pytest.fixture
def prompt() -> Callable[..., Prompt]:
    """`prompt(seed, length)`: random token ids."""

    return tiny_models.prompt
