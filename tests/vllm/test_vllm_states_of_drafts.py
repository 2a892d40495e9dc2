"""A Qwen3-Next with a draft model, and with a layer of its own that drafts (MTP): states behind accepted drafts, as vLLM's own kernels move them, read by another engine.

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
AT_RANDOM = {
    "num_speculative_tokens": 2,
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_rates": [0.8, 0.5],
}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    model = tiny_models.qwen3_next_with_mtp(tmp_path_factory.mktemp("model"))
    with engine_group(model, tmp_path_factory.mktemp("drafts")) as group:
        yield group


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    return {
        "method": "draft_model",
        "model": str(tiny_models.llama(tmp_path_factory.mktemp("draft"), seed=3, layers=1)),
        **AT_RANDOM,
    }


def started(engines: Engines, drafts: dict[str, object], name: str) -> Engine:
    states = {"mamba_cache_mode": "align", "block_size": None, "num_gpu_blocks_override": 60}
    return engines.get(
        name, extra=TIMEOUTS, runner="v2", speculative_config=drafts, max_num_batched_tokens=2048, **states
    )


def accepts_some(engine: Engine) -> bool:
    """And rejects some."""
    metrics = engine.metrics()
    return 0 < metrics["vllm:spec_decode_num_accepted_tokens"] < metrics["vllm:spec_decode_num_draft_tokens"]


def test_states_of_a_prompt_and_behind_accepted_drafts_are_those_of_the_writers_own_cache(
    engines: Engines, drafts: dict[str, object], start_daemon: Start, prompt: Make
) -> None:
    writer, reader = started(engines, drafts, "writer"), started(engines, drafts, "reader")
    daemon = start_daemon()
    asked, more = prompt(1, CHUNK - 20), prompt(2, 30)
    text = asked + writer.generate([asked], max_tokens=50)[0]["tokens"] + more
    assert accepts_some(writer)
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


def test_an_engine_goes_on_from_a_state_behind_drafts_of_an_mtp_layer_as_the_writer_did(
    engines: Engines, start_daemon: Start, prompt: Make
) -> None:
    """vLLM keeps no such state in its own cache, so what the writer computed next, while it decoded, is compared."""
    mtp = {"method": "mtp", "model": str(engines.model), **AT_RANDOM}
    writer, reader = started(engines, mtp, "mtp writer"), started(engines, mtp, "mtp reader")
    daemon = start_daemon()

    def differs_by(text: Prompt, decoded: list[list[float]]) -> float:
        """The greatest difference of a log probability, among the likeliest tokens behind the text."""
        warm = reader.generate([text], max_tokens=1)[0]
        assert warm["cached_tokens"] == CHUNK
        before = dict(map(tuple, decoded))
        return max(abs(logprob - before.get(token, 0.0)) for token, logprob in warm["logprobs"][0])

    for seed in range(3):
        asked = prompt(10 + seed, CHUNK - 20)
        answer = writer.generate([asked], max_tokens=50)[0]
        writer.wait_for_stores()
        text, behind = asked + answer["tokens"][:21], answer["logprobs"][21]
        assert differs_by(text, behind) < 0.01
    assert accepts_some(writer)
    assert zero_l1(daemon) > 0
    assert differs_by(text, behind) > 0.02, "the control: wrong bytes would be seen"
    assert (writer.counters()["errors"], reader.counters()["errors"]) == ({}, {})
