"""Two ranks of a model of several KV cache groups: each stores and loads its own half of every object."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import tiny_models
from engines import TIMEOUTS, Engine, Engines, Prompt, engine_group
from support.daemon import Daemon
from test_vllm_outputs import differs_when_zeroed

Start = Callable[..., Daemon]
Make = Callable[..., Prompt]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    model = tiny_models.gpt_oss(tmp_path_factory.mktemp("model"))
    with engine_group(model, tmp_path_factory.mktemp("groups")) as group:
        yield group


@pytest.fixture
def pair(engines: Engines) -> Engine:
    """Its prefill is chunked: blocks that a window left are freed between steps."""
    return engines.get(
        "pair",
        dtype="float32",
        block_size=None,
        max_num_batched_tokens=512,
        extra=TIMEOUTS,
        tensor_parallel_size=2,
        environ={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    )


def test_both_ranks_load_what_each_group_needs(pair: Engine, start_daemon: Start, prompt: Make) -> None:
    daemon = start_daemon()
    for seed, length in enumerate((800, 1290), start=700):
        text, hit = prompt(seed, length), (length - 1) // 256 * 256
        cold = pair.generate([text])[0]
        pair.wait_for_stores()
        pair.forget()
        before = daemon.status()["totals"]["loaded_bytes"]
        warm = pair.generate([text])[0]
        assert (warm["cached_tokens"], warm["tokens"]) == (hit, cold["tokens"])
        block_bytes = 262_144  # of both ranks; one block of the window is needed
        assert daemon.status()["totals"]["loaded_bytes"] - before == (hit // 128 + 1) * block_bytes
        pair.wait_for_stores()
        pair.forget()
    totals = daemon.status()["totals"]
    assert (totals["errors"], totals["failed_stores"], totals["failed_loads"]) == (0, 0, 0)


def test_zeroed_bytes_give_other_tokens(pair: Engine, start_daemon: Start, prompt: Make) -> None:
    assert differs_when_zeroed(start_daemon(), pair, pair, prompt(710, 600), 512)
