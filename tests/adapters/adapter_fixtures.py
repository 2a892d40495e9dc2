"""Fixtures of the adapter's tests: a model's folder and engines without a model."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("KVSERVER_TAILS", "off")  # these tests are about chunks; those of single blocks pass tails="on"

from late_gpu import LateGpu
from model_folder import write_model
from modelless import Adjust, Engine, configure
from support.daemon import Daemon, wait_until
from tap import Tap
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvserver.adapters.common.speed import PrefillSpeed
from kvserver.adapters.vllm import KVServerConnector


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make_engine(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    """Start an engine on a daemon, or on an endpoint. At the end it is closed; it swallowed no exception unless it may.

    Without a model a prompt takes next to no time, and no storage would be worth reading: unless it `measures_speed`, the
    engine's clock of prefill stands still, and the daemon, which knows no speed, reads all that it has.
    """
    engines: list[Engine] = []
    forgiven: list[Engine] = []

    def make(
        daemon: Daemon | str,
        folder: Path | None = None,
        *,
        may_fail: bool = False,
        register: bool = True,
        measures_speed: bool = False,
        runner: int = 1,
        gpu: LateGpu | None = None,
        **options: Any,
    ) -> Engine:
        endpoint = daemon if isinstance(daemon, str) else daemon.endpoint
        clock = time.monotonic if measures_speed else lambda: 0.0
        monkeypatch.setattr("kvserver.adapters.vllm.reporting.PrefillSpeed", partial(PrefillSpeed, clock))
        engines.append(Engine(*configure(folder or model_folder, endpoint, **options), register, runner, gpu))
        if may_fail:
            forgiven.append(engines[-1])
        wait_until(lambda: engines[-1].knows_its_daemon, 20, "the daemon answers, however busy the machine is")
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
    assert all(engine.errors() == {} for engine in engines if engine not in forgiven)


@pytest.fixture
def make_forgetful_engine(make_engine: Callable[..., Engine]) -> Callable[..., Engine]:
    """As make_engine, but a reset of its prefix cache leaves its weights as they are: it only drops the engine's own blocks."""

    def make(*args: Any, extra: dict[str, Any] | None = None, **options: Any) -> Engine:
        return make_engine(*args, extra={"kvserver.on_prefix_reset": "keep", **(extra or {})}, **options)

    return make


@pytest.fixture
def make_tap() -> Iterator[Callable[[Daemon], Tap]]:
    """Read what engines send to a daemon: they get the tap's endpoint. It ends with the test."""
    taps: list[Tap] = []

    def make(daemon: Daemon) -> Tap:
        taps.append(Tap(daemon))
        return taps[-1]

    yield make
    for tap in taps:
        tap.close()


@pytest.fixture
def make_halves(model_folder: Path) -> Callable[..., tuple[KVServerConnector, KVServerConnector]]:
    """The two halves of an engine that vLLM itself would not build here."""

    def make(daemon: Daemon, adjust: Adjust) -> tuple[KVServerConnector, KVServerConnector]:
        config, caches = configure(model_folder, daemon.endpoint, adjust=adjust)
        scheduler = KVServerConnector(config, KVConnectorRole.SCHEDULER, caches)
        return scheduler, KVServerConnector(config, KVConnectorRole.WORKER, caches)

    return make
