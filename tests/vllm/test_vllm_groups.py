"""KV cache groups: layers that keep KV in different ways, so that a hit needs other blocks of each group.

gpt-oss has windows shorter than a chunk beside full attention, in blocks of equal size; Gemma 4 blocks of two sizes;
Llama 4 looks back to the start of its local chunk; Qwen3-Next has the states of gated delta nets, each right only at the one
length at which it was saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from engines import TIMEOUTS, Engine, Engines, Prompt, engine_group
from support.daemon import Daemon, wait_until
from test_vllm_outputs import differs_when_zeroed, same

Start = Callable[..., Daemon]
Make = Callable[..., Prompt]

pytestmark = pytest.mark.usefixtures("well_afterwards")


@dataclass(frozen=True)
class Kind:
    """A model, and what is true of its hits."""

    build: Callable[[Path], Path]
    groups: int  # of vLLM
    chunk: int  # tokens
    loaded_bytes: Callable[[int], int]  # for a hit of so many tokens
    blocks: int  # few enough that four requests of `asked` and `answered` tokens do not fit
    options: dict[str, Any] = field(default_factory=dict)
    exactly: dict[str, Any] = field(default_factory=dict)  # of an engine whose steps do not change each other's tokens
    asked: int = 500
    answered: int = 400  # the end of a chunk is among these

    def hit(self, length: int) -> int:
        """The most that a request of so many tokens can be given: its last token is computed."""
        return (length - 1) // self.chunk * self.chunk


BLOCK = 262_144  # bytes, of gpt-oss and Gemma 4, in every group
KINDS = {
    "gpt-oss": Kind(tiny_models.gpt_oss, 2, 256, lambda hit: (hit // 128 + 1) * BLOCK, 36),
    "gemma 4": Kind(tiny_models.gemma4, 6, 256, lambda hit: (hit // 128 + 5) * BLOCK, 64),
    "llama 4": Kind(
        tiny_models.llama4,
        4,
        256,
        lambda hit: (hit // 128 + 3 * (hit % 512 // 128)) * BLOCK // 2,
        52,
        {"max_model_len": 1408},  # of which one request must fit
    ),
    "qwen3-next": Kind(
        tiny_models.qwen3_next,
        4,
        384,
        lambda hit: hit // 384 * 196_608 + 3 * 135_680,
        29,
        # On runner V2: issues/vllm/test_a_registration_moved_memory_whose_address_was_known.py
        {"dtype": "bfloat16", "mamba_cache_mode": "align"},
        {"dtype": "float32", "max_model_len": 1408, "num_gpu_blocks_override": 28},  # blocks of 256 tokens
        asked=700,
        answered=120,
    ),
}


@pytest.fixture(
    scope="module", params=["gpt-oss", "gemma 4", "qwen3-next", pytest.param("llama 4", marks=pytest.mark.long)]
)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def engines(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    with engine_group(kind.build(tmp_path_factory.mktemp("model")), tmp_path_factory.mktemp("groups")) as group:
        yield group


def started(engines: Engines, kind: Kind, name: str, **options: Any) -> Engine:
    few = {"num_gpu_blocks_override": kind.blocks, "block_size": None, "dtype": "float32"}
    return engines.get(name, extra=TIMEOUTS, **few | kind.options | options)


@pytest.fixture
def first(engines: Engines, kind: Kind) -> Engine:
    """Most prompts are one step, which completes several chunks."""
    return started(engines, kind, "first", max_num_batched_tokens=2048)


@pytest.fixture
def second(engines: Engines, kind: Kind) -> Engine:
    """A second process, with chunked prefill: its windows move on, and its states are replaced, between steps."""
    return started(engines, kind, "second", max_num_batched_tokens=512)


@pytest.fixture
def exact(kind: Kind, engines: Engines, first: Engine) -> Engine:
    """Its tokens depend neither on what else is in a step nor on whether a token was decoded or is prefilled again.

    In bf16 they do: of four requests, preempted without any connector, about one differs from the same request alone, where
    up to five tokens are within bf16's rounding. That would hide a wrong state, or accuse a right one.
    """
    if not kind.exactly:
        return first
    return started(engines, kind, "exact", max_num_batched_tokens=2048, exact_states=True, **kind.exactly)


def loaded(daemon: Daemon) -> int:
    return int(daemon.status()["totals"]["loaded_bytes"])


def test_zeroed_bytes_of_any_group_change_the_tokens(kind: Kind, first: Engine, prompt: Make) -> None:
    """No daemon: if a group that was not loaded, or wrongly, changed no token, the tests below would not see it."""
    text = prompt(590, kind.chunk + 20)
    cold = first.generate([text])[0]
    for group in range(kind.groups):
        first.forget()
        first.generate([text], 1)
        assert first.ask("zero_group", group=group)["zeroed"] > 0
        found = first.generate([text])[0]
        assert found["cached_tokens"] == kind.chunk
        assert found["tokens"] != cold["tokens"], f"group {group}"


@pytest.mark.parametrize("chunked", ["writer", "reader"])
def test_a_fresh_engine_hits_to_the_end_and_its_outputs_equal_those_of_the_own_cache(
    kind: Kind, first: Engine, second: Engine, start_daemon: Start, prompt: Make, chunked: str
) -> None:
    """The writer's own cache then has hits of the same lengths. Of each group only what its hit needs is loaded."""
    daemon = start_daemon()
    writer, reader = (second, first) if chunked == "writer" else (first, second)
    for seed, length in enumerate((270, 800, 1290), start=600 + 10 * (chunked == "writer")):
        text, hit = prompt(seed, length), kind.hit(length)
        cold = writer.generate([text])[0]
        control = writer.generate([text])[0]
        writer.wait_for_stores()
        before = loaded(daemon)
        warm = reader.generate([text])[0]
        assert (control["cached_tokens"], warm["cached_tokens"]) == (hit, hit)
        assert same(warm, control)
        assert warm["tokens"] == cold["tokens"]
        assert loaded(daemon) - before == (kind.loaded_bytes(hit) if hit else 0)
    totals = daemon.status()["totals"]
    assert (totals["errors"], totals["failed_stores"], totals["failed_loads"]) == (0, 0, 0)


def test_zeroed_bytes_give_other_tokens(first: Engine, second: Engine, start_daemon: Start, prompt: Make) -> None:
    """The negative control: the comparison of the other tests would notice wrong KV."""
    assert differs_when_zeroed(start_daemon(), first, second, prompt(620, 1000), 768)


def test_the_second_turn_of_a_conversation_hits_to_the_end_of_the_first_on_another_engine(
    first: Engine, second: Engine, start_daemon: Start, prompt: Make
) -> None:
    """The first turn's answer, which was decoded, is stored: 700 tokens were asked, 99 of 100 answers were computed upon."""
    start_daemon()
    asked, more = prompt(630, 700), prompt(631, 50)
    text = asked + first.generate([asked], max_tokens=100)[0]["tokens"] + more
    first.wait_for_stores()
    control = first.generate([text])[0]  # upon its own cache: what was decoded in bf16 differs from what is prefilled
    warm = second.generate([text])[0]
    assert (warm["cached_tokens"], warm["tokens"]) == (768, control["tokens"])


def test_the_third_of_three_fresh_engines_hits_to_the_end_of_their_system_prompt(
    kind: Kind, first: Engine, second: Engine, start_daemon: Start, prompt: Make
) -> None:
    """The first request ends far behind the system prompt, and stores no window and no state there; the second does."""
    system = prompt(640, 1000)
    texts = [system + prompt(641 + n, 300) for n in range(3)]
    alone = [first.generate([text])[0]["tokens"] for text in texts]  # no daemon: the reference
    first.forget()
    daemon = start_daemon()
    for engine, text in zip((first, second, first), texts, strict=True):
        engine.forget()
        before = loaded(daemon)
        warm = engine.generate([text])[0]
        assert warm["tokens"] == alone[texts.index(text)]
        engine.wait_for_stores()
    assert warm["cached_tokens"] == 768
    assert loaded(daemon) - before == kind.loaded_bytes(768)


def test_a_local_hit_and_a_load_complete_each_other(
    kind: Kind, first: Engine, second: Engine, start_daemon: Start, prompt: Make
) -> None:
    daemon = start_daemon()
    text = prompt(650, 1290)
    cold = first.generate([text])[0]
    first.wait_for_stores()
    second.generate([text[:800]])
    second.wait_for_stores()
    before = loaded(daemon)
    warm = second.generate([text])[0]
    assert (warm["cached_tokens"], warm["tokens"]) == (kind.hit(1290), cold["tokens"])
    assert 0 < loaded(daemon) - before < kind.loaded_bytes(kind.hit(1290)), "what it has itself is not loaded"
    shared = text[:800] + prompt(651, 20)
    assert second.generate([shared])[0]["tokens"] == first.generate([shared])[0]["tokens"], "shared blocks are intact"


@pytest.mark.parametrize(
    "kind",
    ["gpt-oss", "qwen3-next", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("gemma 4", "llama 4"))],
    indirect=True,
)
def test_preempted_requests_resume_from_the_daemon(
    kind: Kind, exact: Engine, start_daemon: Start, prompt: Make
) -> None:
    texts = [prompt(660 + n, kind.asked) for n in range(4)]
    computed = exact.generate(texts, max_tokens=kind.answered)  # no daemon: the reference
    exact.forget()
    daemon = start_daemon()
    before = exact.metrics()["vllm:num_preemptions"]
    found = exact.generate(texts, max_tokens=kind.answered)
    assert exact.metrics()["vllm:num_preemptions"] > before
    assert [one["tokens"] for one in found] == [other["tokens"] for other in computed]
    exact.wait_for_stores()
    totals = daemon.status()["totals"]
    assert totals["loaded_bytes"] > totals["failed_loads"] == 0


def test_a_load_that_ends_with_its_daemon_costs_only_the_hit(
    first: Engine, second: Engine, start_daemon: Start, prompt: Make
) -> None:
    daemon = start_daemon(pauses=True)
    text = prompt(670, 1290)
    cold = first.generate([text])[0]
    first.wait_for_stores()
    with daemon.paused_copies():
        second.send("generate", prompts=[text], max_tokens=16)
        daemon.wait_for_a_copy()
        daemon.kill()
    assert second.receive()["outputs"][0]["tokens"] == cold["tokens"]
    assert second.counters()["worker"]["load_failures"] > 0


def test_a_load_of_a_stopped_daemon_keeps_its_blocks_from_others(
    first: Engine, second: Engine, start_daemon: Start, prompt: Make
) -> None:
    text, others = prompt(680, 800), [prompt(681 + n, 500) for n in range(2)]
    alone = [first.generate([other])[0]["tokens"] for other in others]
    daemon = start_daemon(pauses=True)
    cold = first.generate([text])[0]
    first.wait_for_stores()
    with daemon.paused_copies():
        second.send("generate", prompts=[text], max_tokens=16)
        daemon.wait_for_a_copy()
        daemon.freeze()
    assert second.receive()["outputs"][0]["tokens"] == cold["tokens"]
    assert second.counters()["blocks_in_use"] > 0, "the server may still write these"
    assert [second.generate([other])[0]["tokens"] for other in others] == alone
    daemon.thaw()
    assert [second.generate([other])[0]["tokens"] for other in others] == alone
    wait_until(lambda: second.owns_no_block_after(others[0]), 30, "its blocks are free")
