"""A Qwen3-Next with a draft model: states behind accepted drafts, as vLLM's own kernels move them, read by another engine.

vLLM accepts drafts at random here (its synthetic rejection), since a tiny model agrees with no draft of another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import tiny_models
from engines import TIMEOUTS, Engine, Engines, Prompt, engine_group
from support.daemon import Daemon
from test_vllm_outputs import same, zero_l1

pytestmark = pytest.mark.long
Start = Callable[..., Daemon]
Make = Callable[..., Prompt]
CHUNK = 384  # a block of vLLM, as large as a state


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    model = tiny_models.qwen3_next(tmp_path_factory.mktemp("model"))
    with engine_group(model, tmp_path_factory.mktemp("drafts")) as group:
        yield group


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    return {
        "method": "draft_model",
        "model": str(tiny_models.llama(tmp_path_factory.mktemp("draft"), seed=3, layers=1)),
        "num_speculative_tokens": 2,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [0.8, 0.5],
    }


def started(engines: Engines, drafts: dict[str, object], name: str) -> Engine:
    states = {"mamba_cache_mode": "align", "block_size": None, "num_gpu_blocks_override": 60}
    return engines.get(
        name, extra=TIMEOUTS, runner="v2", speculative_config=drafts, max_num_batched_tokens=2048, **states
    )


def test_states_of_a_prompt_and_behind_accepted_drafts_are_those_of_the_writers_own_cache(
    engines: Engines, drafts: dict[str, object], start_daemon: Start, prompt: Make
) -> None:
    writer, reader = started(engines, drafts, "writer"), started(engines, drafts, "reader")
    daemon = start_daemon()
    asked, more = prompt(1, CHUNK - 20), prompt(2, 30)
    text = asked + writer.generate([asked], max_tokens=50)[0]["tokens"] + more
    metrics = writer.metrics()
    proposed, accepted = (metrics[f"vllm:spec_decode_num_{kind}_tokens"] for kind in ("draft", "accepted"))
    assert 0 < accepted < proposed
    longer = [*text, *prompt(3, CHUNK)]
    for each, hit in ((text, CHUNK), (longer, 2 * CHUNK)):
        if each is longer:
            writer.generate([longer], max_tokens=1)
        writer.wait_for_stores()
        control = writer.generate([each], max_tokens=1)[0]
        warm = reader.generate([each], max_tokens=1)[0]
        assert (control["cached_tokens"], warm["cached_tokens"]) == (hit, hit)
        assert same(warm, control)
    reader.forget()
    assert zero_l1(daemon) > 0
    assert not same(reader.generate([longer], max_tokens=1)[0], control), "the control: wrong bytes would be seen"
    assert (writer.counters()["errors"], reader.counters()["errors"]) == ({}, {})
