"""MLA: all ranks hold the same latent, so it is stored once and loaded by every rank.

vLLM's MLA for plain CPUs prefills as if nothing preceded; it decodes upon cached KV. So the prompt here is
what the daemon has and one token, which is decoded: the same computation, on loaded KV, as the second step of the
cold run. On CPUs with AMX vLLM has another MLA, for bfloat16 only, which takes any hit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiny_models
import torch
from engines import TIMEOUTS, Engine, Engines, Prompt, engine_group
from support.daemon import Daemon
from test_vllm_outputs import zero_l1

Start = Callable[..., Daemon]
Make = Callable[..., Prompt]
LENGTH = 512
AMX = torch.cpu._is_amx_tile_supported()
DTYPE, BLOCK = ("bfloat16", 32) if AMX else ("float32", 16)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    model = tiny_models.deepseek(tmp_path_factory.mktemp("deepseek"))
    with engine_group(model, tmp_path_factory.mktemp("mla")) as group:
        yield group


@pytest.fixture(params=[pytest.param(1, marks=pytest.mark.long, id="one rank"), pytest.param(2, id="two ranks")])
def engine(request: pytest.FixtureRequest, engines: Engines) -> Engine:
    return start(engines, request.param)


def start(engines: Engines, ranks: int) -> Engine:
    options: dict[str, Any] = {"dtype": DTYPE, "block_size": BLOCK, "num_gpu_blocks_override": 400, "extra": TIMEOUTS}
    if ranks > 1:
        options |= {"tensor_parallel_size": ranks, "environ": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}
    return engines.get(f"{ranks} ranks", **options)


def forget(engine: Engine) -> None:
    """Empty the engine's own prefix cache, which plain CPUs do not have for MLA."""
    if AMX:
        engine.forget()


def instance_of(daemon: Daemon, ranks: int) -> dict[str, Any]:
    (found,) = [i for i in daemon.status()["instances"] if i["world_size"] == ranks]
    assert isinstance(found, dict)
    return found


def test_tokens_after_a_load_are_those_of_the_cold_run(engine: Engine, start_daemon: Start, prompt: Make) -> None:
    start_daemon()
    for seed in (400, 401, 402):
        text = prompt(seed, LENGTH)
        cold = engine.generate([text], max_tokens=17)[0]
        engine.wait_for_stores()
        forget(engine)
        warm = engine.generate([text + cold["tokens"][:1]])[0]
        assert (warm["cached_tokens"], warm["tokens"]) == (LENGTH, cold["tokens"][1:])


def test_zeroed_bytes_give_other_tokens(engine: Engine, start_daemon: Start, prompt: Make) -> None:
    daemon = start_daemon()
    text = prompt(410, LENGTH)
    cold = engine.generate([text], max_tokens=17)[0]
    engine.wait_for_stores()
    assert zero_l1(daemon) > 1_000_000
    forget(engine)
    warm = engine.generate([text + cold["tokens"][:1]])[0]
    assert warm["cached_tokens"] == LENGTH
    assert warm["tokens"] != cold["tokens"][1:], "the comparison would notice wrong KV"


def test_two_ranks_store_one_copy_and_both_load_it(engines: Engines, start_daemon: Start, prompt: Make) -> None:
    engine = start(engines, 2)
    daemon = start_daemon()
    text = prompt(420, LENGTH)
    cold = engine.generate([text], max_tokens=17)[0]
    engine.wait_for_stores()
    block_bytes = instance_of(daemon, 2)["workers"][0]["block_bytes"]
    once = LENGTH // BLOCK * block_bytes
    assert daemon.status()["totals"]["stored_bytes"] == once
    forget(engine)
    warm = engine.generate([text + cold["tokens"][:1]])[0]
    assert (warm["cached_tokens"], warm["tokens"]) == (LENGTH, cold["tokens"][1:])
    assert daemon.status()["totals"]["loaded_bytes"] == 2 * once


def test_a_hit_that_leaves_a_prefill_is_taken_where_the_engine_can_prefill_upon_it(
    engine: Engine, start_daemon: Start, prompt: Make
) -> None:
    """One that cannot would compute it as if nothing preceded, and has no prefix cache of its own either. Where it can, its own
    cache gives it as many tokens, since the prompt ends inside the next block."""
    start_daemon()
    text = prompt(430, LENGTH + 20)
    cold = engine.generate([text])[0]
    engine.wait_for_stores()
    own = engine.generate([text])[0]
    forget(engine)
    again = engine.generate([text])[0]
    hit, control = (LENGTH, own) if AMX else (0, cold)
    assert own["cached_tokens"] == again["cached_tokens"] == hit
    assert again["tokens"] == control["tokens"]
