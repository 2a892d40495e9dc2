"""States by vLLM's real scheduler: which are stored, and at which boundaries vLLM is requested to keep them."""

from __future__ import annotations

import pytest
from hybrids import HYBRIDS
from made_up_model import prompt
from modelless import Engine

from kvserver.protocol import KEY_BYTES

CHUNK = 64
BLOCK = 32
STATES = 1  # their object group
TOKENS = prompt(1, 5 * CHUNK + 10)


@pytest.fixture
def make_hybrid(make_engine):
    def make(daemon, **options) -> Engine:
        return make_engine(daemon, **{"num_blocks": 200, **HYBRIDS["qwen3-next"].options, **options})

    return make


def stored_states(engine: Engine) -> int:
    return sum(len(store.keys) // KEY_BYTES for store in engine.stores if store.group == STATES)


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, 5 * CHUNK, 5 * CHUNK + 1])
def test_states_are_stored_at_the_ends_of_the_prompt_and_at_each_boundary_that_is_generated(
    make_daemon, make_hybrid, asynchronous, length
):
    daemon = make_daemon()
    engine = make_hybrid(daemon, asynchronous=asynchronous, max_tokens_per_step=96)
    engine.generate("r", TOKENS[:length], count=150)
    ends = {length // CHUNK, (length - 1) // CHUNK} - {0}
    generated = (length + 149) // CHUNK - length // CHUNK
    assert stored_states(engine) == len(ends) + generated
    dropped = [store.dropped for store in engine.stores if store.dropped]
    assert len(b"".join(dropped)) // KEY_BYTES == generated - 1, "all but the last"


@pytest.mark.parametrize("most", [96, 4096])
def test_a_state_is_stored_at_each_interval_so_that_other_prompts_can_part_there(make_daemon, make_hybrid, most):
    daemon = make_daemon(boundary_interval=2 * CHUNK)
    cold = make_hybrid(daemon, max_tokens_per_step=most)
    cold.generate("cold", TOKENS)
    assert stored_states(cold) == 3, "after 2, 4 and 5 chunks"
    assert make_hybrid(daemon).generate("other", [*TOKENS[: 3 * CHUNK + 5], 7]).external == 2 * CHUNK


def test_a_loaded_state_is_not_stored_again(make_daemon, make_hybrid):
    daemon = make_daemon()
    make_hybrid(daemon).generate("cold", TOKENS)
    warm = make_hybrid(daemon)
    assert warm.generate("warm", TOKENS).external == 5 * CHUNK
    assert warm.stores == []


def test_where_full_attention_alone_was_found_the_state_is_stored(make_daemon, make_hybrid):
    """A system prompt: the first engine stored no state at its end."""
    daemon = make_daemon()
    shared = TOKENS[: 3 * CHUNK + 20]
    make_hybrid(daemon).generate("first", [*shared, *prompt(2, 150)])
    second = make_hybrid(daemon)
    assert second.generate("second", [*shared, *prompt(3, 150)]).external == 0
    assert stored_states(second) == 2, "at the junction and at the end"
    assert make_hybrid(daemon).generate("third", [*shared, *prompt(4, 150)]).external == 3 * CHUNK


def test_the_engine_keeps_the_states_that_it_wants_itself(make_daemon, make_hybrid):
    """Its own junction is at the end of a block that is no end of a chunk."""
    engine = make_hybrid(make_daemon())
    shared = TOKENS[: 3 * CHUNK + BLOCK]
    for n in range(2):
        engine.generate(f"r{n}", [*shared, *prompt(2 + n, 150)])
    assert engine.generate("third", [*shared, *prompt(4, 150)]).local == len(shared)


@pytest.mark.parametrize("runner", [1, 2])
def test_states_are_right_where_few_blocks_are_reused_at_once(make_daemon, make_hybrid, runner):
    """Requests free the blocks of states one step after they were offered. Another engine checks each state that was stored."""
    daemon = make_daemon()
    engine = make_hybrid(daemon, num_blocks=60, max_tokens_per_step=96, runner=runner)
    prompts = [[*TOKENS[: 70 * n], *prompt(n, 40)] for n in range(5)]
    answers = [engine.add(f"r{n}", tokens, count=150) for n, tokens in enumerate(prompts)]
    engine.run(60)
    turns = [[*answer.prompt, *answer.tokens, 7] for answer in answers]
    other = make_hybrid(daemon, runner=runner)
    assert sum(other.generate(f"r{n}", turn).external for n, turn in enumerate(turns)) > 0
