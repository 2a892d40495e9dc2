"""Models of several KV cache groups by vLLM's real scheduler: what is loaded is what each group attends to, byte for byte."""

from __future__ import annotations

import pytest
from hybrids import HYBRIDS, REPLAYS, Hybrid
from made_up_model import prompt
from modelless import Engine

from kvserver.adapters.common.specs import ids_of
from kvserver.adapters.vllm.acceptance import Acceptance
from kvserver.protocol import Error, ErrorCode, Retrieve, Store


@pytest.fixture(params=HYBRIDS)
def model(request) -> Hybrid:
    return HYBRIDS[request.param]


@pytest.fixture
def chunk(model) -> int:
    return model.chunk


@pytest.fixture
def tokens(chunk) -> list[int]:
    return prompt(1, 5 * chunk + 10)


@pytest.fixture
def make_hybrid(model, make_engine):
    """Start an engine of this model."""

    def make(daemon, **options) -> Engine:
        return make_engine(daemon, **{**model.options, **options})

    return make


def groups_of(copies) -> set[int]:
    return {copy.group for copy in copies}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_fresh_engine_goes_on_at_the_end_of_the_prompt(make_daemon, make_hybrid, model, ranks, chunk, tokens):
    daemon = make_daemon()
    cold = make_hybrid(daemon, world_size=ranks)
    cold.generate("cold", tokens)
    warm = make_hybrid(daemon, world_size=ranks)
    assert warm.generate("warm", tokens).external == 5 * chunk
    assert groups_of(cold.stores) == groups_of(warm.loads) == set(range(len(model.kinds)))


@pytest.mark.parametrize("max_tokens_per_step", [96, 4096])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_second_turn_goes_on_where_another_engines_first_one_ended(
    make_daemon, make_hybrid, chunk, tokens, asynchronous, max_tokens_per_step
):
    options = {"asynchronous": asynchronous, "max_tokens_per_step": max_tokens_per_step}
    daemon = make_daemon()
    first = make_hybrid(daemon, **options).generate("first turn", tokens, count=150)
    turn = [*first.prompt, *first.tokens]
    second = make_hybrid(daemon, **options).generate("second turn", [*turn, *prompt(2, 30)])
    assert second.external >= (len(turn) - 1) // chunk * chunk - chunk, "less a chunk and a block"


@pytest.mark.parametrize("name", ["deepseek-v4.1", "glm-5.3", "qwen4"])
def test_a_prompt_that_ends_with_a_chunk_goes_on_before_its_last_one(make_daemon, make_engine, name):
    """The last token is computed in any case, and a ring has no raw keys of the tokens before it."""
    model = HYBRIDS[name]
    daemon, tokens = make_daemon(), prompt(3, 5 * model.chunk)
    make_engine(daemon, **model.options).generate("cold", tokens)
    assert make_engine(daemon, **model.options).generate("warm", tokens).external == 4 * model.chunk


@pytest.mark.skipif(not REPLAYS, reason="vLLM before 0.32 replays nothing")
def test_a_step_that_replays_the_end_of_a_hit_computes_from_the_hits_end_on(make_daemon, make_engine, monkeypatch):
    """Blocks in front of it were found: they may be suspect, or a sibling's, and the step writes none of them."""
    model = HYBRIDS["deepseek-v4.1"]
    daemon, tokens = make_daemon(), prompt(5, 3 * model.chunk + 10)
    make_engine(daemon, **model.options).generate("cold", tokens)
    begun = []
    scheduled = Acceptance.scheduled

    def noted(acceptance, state, before, after, anew):
        if anew:
            begun.append((before, after))
        scheduled(acceptance, state, before, after, anew)

    monkeypatch.setattr(Acceptance, "scheduled", noted)
    assert make_engine(daemon, **model.options).generate("warm", tokens).external == 3 * model.chunk
    assert begun == [(3 * model.chunk, len(tokens))]


@pytest.mark.parametrize("more", [0, 1, 70])
def test_a_tail_behind_the_last_chunk_ends_before_the_last_token_where_a_ring_goes_on(make_daemon, make_engine, more):
    model = HYBRIDS["qwen4"]
    daemon, block = make_daemon(chunk_tokens=4 * model.block_size, tails="on"), model.block_size
    tokens = prompt(4, 6 * block + more)
    make_engine(daemon, **model.options).generate("cold", tokens, count=1)
    answer = make_engine(daemon, **model.options).generate("warm", tokens)
    assert answer.external == (len(tokens) - 1) // block * block


def test_what_prompts_share_is_hit_by_the_third_engine(make_daemon, make_hybrid, chunk, tokens):
    daemon = make_daemon()
    engines = [make_hybrid(daemon) for _ in range(3)]
    answers = [engine.generate("warm", [*tokens, *prompt(9 + n, 100)]) for n, engine in enumerate(engines)]
    assert answers[2].external == 5 * chunk


def test_a_hit_of_the_engines_own_blocks_goes_on_with_loaded_ones(make_daemon, make_hybrid, model, chunk, tokens):
    daemon = make_daemon()
    make_hybrid(daemon).generate("cold", tokens)
    warm = make_hybrid(daemon)
    warm.generate("shorter", tokens[: 3 * chunk + 1])
    answer = warm.generate("warm", tokens)
    assert answer.local
    assert answer.local + answer.external == 5 * chunk


def test_a_load_that_left_out_any_object_group_would_be_seen(make_daemon, make_hybrid, model, tokens):
    """The control: what one copy has loaded is zeroed before the request goes on."""
    daemon = make_daemon()
    make_hybrid(daemon).generate("cold", tokens)
    for group in range(len(model.kinds)):
        warm = make_hybrid(daemon)
        warm.add("warm", tokens)
        warm.run(until=lambda warm=warm: bool(warm.received))
        (load,) = [load for load in warm.loads if load.group == group]
        for kv in warm.runners[0].kv:
            kv[ids_of(load)] = 0
        with pytest.raises(AssertionError, match="foreign"):
            warm.run()


@pytest.mark.parametrize("ranks", [1, 2])
def test_when_one_object_group_fails_to_load_the_request_is_computed(
    make_daemon, make_tap, make_hybrid, model, ranks, tokens
):
    tap = make_tap(make_daemon())
    make_hybrid(tap.endpoint, world_size=ranks).generate("cold", tokens)
    refused = Error(code=ErrorCode.INTERNAL, message="as the test wants it")
    for group in range(len(model.kinds)):
        tap.instead = lambda message, group=group: (
            refused if isinstance(message, Retrieve) and message.group == group else None
        )
        warm = make_hybrid(tap.endpoint, world_size=ranks)
        warm.generate("warm", tokens)
        assert warm.received == ["warm"]
        assert warm.worker.worker.counters["load_failures"] == 1
        assert warm.generate("again", tokens).local, "what was computed instead is right"


def test_nothing_is_found_of_which_one_object_group_was_not_stored(make_daemon, make_tap, make_hybrid, model, chunk):
    tap = make_tap(make_daemon())
    refused = Error(code=ErrorCode.INTERNAL, message="as the test wants it")
    for group in range(len(model.kinds)):
        tap.instead = lambda message, group=group: (
            refused if isinstance(message, Store) and message.group == group else None
        )
        short = prompt(50 + group, 2 * chunk + 10)
        make_hybrid(tap.endpoint).generate("cold", short)
        assert make_hybrid(tap.endpoint).generate("warm", short).external == 0


def test_requests_that_share_a_prefix_in_a_small_pool_have_right_kv(make_daemon, make_hybrid, model, chunk, tokens):
    daemon = make_daemon()
    engine = make_hybrid(daemon, num_blocks=model.few_blocks, max_tokens_per_step=5 * chunk // 2)
    answers = [engine.add(f"r{n}", [*tokens[: chunk * n], *prompt(n, 40)], count=200) for n in range(5)]
    engine.run(60)
    assert all(answer.right for answer in answers)
