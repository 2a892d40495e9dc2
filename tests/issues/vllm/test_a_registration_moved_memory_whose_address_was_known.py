"""vLLM's model runner V2 keeps the addresses of states from before it registers its KV cache, and the registration moved that
memory into shared memory: an engine of a model with states died in its first step, by SIGSEGV, or computed upon wrong states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import tiny_models
from engines import Engines, Prompt, engine_group
from support.daemon import Daemon
from test_vllm_groups import KINDS, started


@pytest.fixture
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with engine_group(tiny_models.qwen3_next(tmp_path_factory.mktemp("model")), tmp_path_factory.mktemp("v2")) as group:
        yield group


def test_an_engine_with_states_on_runner_v2_hits_and_has_equal_tokens(
    engines: Engines, start_daemon: Callable[..., Daemon], prompt: Callable[..., Prompt]
) -> None:
    kind = KINDS["qwen3-next"]
    engine = started(engines, kind, "states", runner="v2", max_num_batched_tokens=2048)
    start_daemon()
    text = prompt(690, 800)
    cold = engine.generate([text])[0]
    engine.wait_for_stores()
    engine.forget()
    warm = engine.generate([text])[0]
    assert (warm["cached_tokens"], warm["tokens"]) == (kind.hit(800), cold["tokens"])
