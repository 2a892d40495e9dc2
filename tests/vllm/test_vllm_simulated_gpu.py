"""A real engine whose KV cache the daemon takes for GPU memory: its streams, staging and kernels, simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from engines import TIMEOUTS, Engine, Engines, Prompt, engine_group
from support.daemon import Daemon

TRANSFER = {"kv_connector": "SimulatedGpuConnector", "kv_connector_module_path": "simulated_gpu"}


@pytest.fixture(scope="module")
def group(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with engine_group(model, tmp_path_factory.mktemp("engines")) as group:
        yield group


def started(group: Engines, way: str = "staged") -> Daemon:
    return Daemon(endpoint=group.endpoint, l1_size="64MiB", chunk_tokens=256, simulated_gpus=1, gpu_way=way).start()


@pytest.fixture
def way() -> str:
    return "staged"


@pytest.fixture
def daemon(group: Engines, way: str) -> Iterator[Daemon]:
    with closing(started(group, way)) as daemon:
        yield daemon


@pytest.fixture
def engine(group: Engines) -> Engine:
    """It is its own reader, after it forgot. Its pool is so large that no store is cancelled for the blocks that it keeps."""
    return group.get("gpu", extra=TIMEOUTS, transfer=TRANSFER, num_gpu_blocks_override=1200)


def outputs(engine: Engine, prompts: list[Prompt]) -> list[dict[str, Any]]:
    """Tokens computed upon what the engine's own cache has of each prompt, then upon what the daemon has: they must be equal."""
    for text in prompts:
        engine.generate([text])
    control = [engine.generate([text])[0] for text in prompts]
    engine.wait_for_stores()
    engine.forget()
    warm = [engine.generate([text])[0] for text in prompts]
    assert warm == control
    return warm


def errors(daemon: Daemon) -> list[tuple[str, str]]:
    """Type of the request and code of each kind of error that the daemon replied, but for what begins a session."""
    found = [
        (each.labels["type"], each.labels["reason"])
        for each in daemon.samples("kvserver_rpc_errors_total")
        if each.value
    ]
    return [each for each in found if each[1] != "report_gap"]


@pytest.mark.parametrize("way", ["staged", "dma"])
def test_outputs_through_each_way_equal_those_of_the_own_cache(
    engine: Engine, group: Engines, daemon: Daemon, prompt: Callable[..., Prompt], way: str
) -> None:
    group.wait_registered(daemon)
    first = {"staged": 900, "dma": 920}[way]
    found = outputs(engine, [prompt(first + n, 256 * n + 10 + n) for n in (1, 2, 4)])
    assert [o["cached_tokens"] for o in found] == [256, 512, 1024]
    status = daemon.status()
    (gpu,) = status["gpus"]
    assert {w["device"] for i in status["instances"] for w in i["workers"]} == {gpu["device"]}
    assert gpu["store"][f"{way}_bytes"] == status["totals"]["stored_bytes"]
    assert gpu["load"][f"{way}_bytes"] == status["totals"]["loaded_bytes"] > 0
    assert errors(daemon) == []
    assert status["totals"]["failed_loads"] == 0


def test_a_daemon_that_is_killed_and_started_again_serves_it_anew(
    engine: Engine, group: Engines, daemon: Daemon, prompt: Callable[..., Prompt]
) -> None:
    group.wait_registered(daemon)
    daemon.kill()
    assert len(engine.generate([prompt(950, 800)])[0]["tokens"]) == 16, "without cache"
    with closing(started(group)) as fresh:
        group.wait_registered(fresh)
        (found,) = outputs(engine, [prompt(951, 800)])
        assert found["cached_tokens"] == 768
        totals = fresh.status()["totals"]
        assert totals["loaded_bytes"] > totals["failed_loads"] == 0
