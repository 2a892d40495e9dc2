"""Models of several KV cache groups, with every version of vLLM that README names: windows, and the states of Qwen3-Next.

Before 0.30 a failed load would be computed in place, upon wrong KV, so there they run without cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import tiny_models
from engines import Engines, Prompt, engine_group
from support.daemon import Daemon
from test_vllm_groups import KINDS, Kind, started
from test_vllm_outputs import same

SERVED = tuple(map(int, os.environ["KVSERVER_TEST_VLLM"].split(".")[:2])) >= (0, 30)
WINDOWS = Kind(partial(tiny_models.sliding, window=100, full_every=2), 2, 256, lambda hit: 0, 40)


@pytest.fixture(scope="module", params=["windows", *(["states"] if SERVED else [])])
def kind(request: pytest.FixtureRequest) -> Kind:
    return WINDOWS if request.param == "windows" else KINDS["qwen3-next"]


@pytest.fixture(scope="module")
def engines(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with engine_group(kind.build(tmp_path_factory.mktemp("model")), tmp_path_factory.mktemp("hybrid")) as group:
        yield group


def test_a_hybrid_model_hits_and_its_outputs_equal_those_of_its_own_cache(
    kind: Kind, engines: Engines, start_daemon: Callable[..., Daemon], prompt: Callable[..., Prompt]
) -> None:
    engine = started(engines, kind, "hybrid", max_num_batched_tokens=2048).wait_ready()
    daemon = start_daemon(wait=SERVED)
    for seed, length in enumerate((800, 1290)):
        text, hit = prompt(seed, length), kind.hit(length)
        cold = engine.generate([text])[0]
        control = engine.generate([text])[0]
        engine.wait_for_stores()
        engine.forget()
        warm = engine.generate([text])[0]
        assert (cold["cached_tokens"], warm["cached_tokens"]) == (0, hit if SERVED else 0)
        assert warm["tokens"] == cold["tokens"]
        if SERVED:
            assert control["cached_tokens"] == hit
            assert same(warm, control)
        engine.forget()
    totals, counters = daemon.status()["totals"], engine.counters()
    assert (totals["errors"], totals["failed_loads"], counters["errors"], counters["blocks_in_use"]) == (0, 0, {}, 0)
    assert bool(totals["loaded_bytes"]) == SERVED
    assert ("before vLLM 0.30" in engine.log.read_text()) == (not SERVED)
