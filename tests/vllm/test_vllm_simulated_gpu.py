"""Real engines whose KV cache the daemon takes for GPU memory: its streams, staging and kernels, simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from engines import Engine, Engines, Prompt, engine_group
from support.daemon import Daemon, wait_until

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
def pair(group: Engines) -> tuple[Engine, Engine]:
    writer, reader = (group.get(name, transfer=TRANSFER, multiprocess=True) for name in ("writer", "reader"))
    return writer, reader


@pytest.mark.parametrize("way", ["staged", "dma"])
def test_outputs_through_each_way_equal_those_of_the_own_cache(
    pair: tuple[Engine, Engine], group: Engines, daemon: Daemon, prompt: Callable[..., Prompt], way: str
) -> None:
    writer, reader = pair
    group.wait_registered(daemon)
    first = {"staged": 900, "dma": 920}[way]
    prompts = [prompt(first + n, 256 * n + 10 + n) for n in (1, 2, 4)]
    for text in prompts:
        writer.generate([text])
    control = [writer.generate([text])[0] for text in prompts]
    wait_until(lambda: daemon.status()["totals"]["stored_bytes"] > 0 and not daemon.status()["books"]["tickets"])
    warm = [reader.generate([text])[0] for text in prompts]
    assert [o["cached_tokens"] for o in control] == [o["cached_tokens"] for o in warm] == [256, 512, 1024]
    for one, other in zip(warm, control, strict=True):
        assert (one["tokens"], one["logprobs"]) == (other["tokens"], other["logprobs"])
    status = daemon.status()
    (gpu,) = status["gpus"]
    assert {w["device"] for i in status["instances"] for w in i["workers"]} == {gpu["device"]}
    assert gpu["store"][f"{way}_bytes"] == status["totals"]["stored_bytes"]
    assert gpu["load"][f"{way}_bytes"] == status["totals"]["loaded_bytes"] > 0
    assert status["totals"]["errors"] == status["totals"]["failed_loads"] == 0


def test_a_daemon_that_is_killed_and_started_again_serves_them_anew(
    pair: tuple[Engine, Engine], group: Engines, daemon: Daemon, prompt: Callable[..., Prompt]
) -> None:
    writer, reader = pair
    group.wait_registered(daemon)
    daemon.kill()
    assert len(writer.generate([prompt(950, 800)])[0]["tokens"]) == 16, "without cache"
    with closing(started(group)) as fresh:
        group.wait_registered(fresh)
        text = prompt(951, 800)
        writer.generate([text])
        control = writer.generate([text])[0]
        wait_until(lambda: fresh.status()["totals"]["stored_bytes"] > 0 and not fresh.status()["books"]["tickets"])
        warm = reader.generate([text])[0]
        assert warm["cached_tokens"] == control["cached_tokens"] == 768
        assert (warm["tokens"], warm["logprobs"]) == (control["tokens"], control["logprobs"])
        assert fresh.status()["totals"]["failed_loads"] == 0
