"""A request that must compute its whole prompt was given a hit: rows of its prompt logprobs came from uninitialised memory."""

from __future__ import annotations

import pytest
from made_up_model import prompt
from support.daemon import wait_until

from kvserver.protocol import Lookup

CHUNK = 64
TOKENS = prompt(1, 3 * CHUNK + 10)
WHOLE_PROMPT = {"prompt_logprobs": 1}


def asked(tap) -> list[str]:
    return [lookup.request_id for lookup in tap.of(Lookup)]


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
def test_request_with_prompt_logprobs_gets_no_hit_and_sends_no_lookup(make_daemon, make_tap, make_engine, asynchronous):
    """Before vLLM 0.31 the connector's answer is taken."""
    tap = make_tap(make_daemon())
    make_engine(tap.endpoint).generate("cold", TOKENS)
    engine = make_engine(tap.endpoint, asynchronous=asynchronous)
    answer = engine.add("logprobs", TOKENS, sampling=WHOLE_PROMPT)
    request = engine.scheduler.requests["logprobs"]
    assert engine.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    engine.run()
    assert answer.right
    assert (answer.local, answer.external) == (0, 0)
    assert asked(tap) == ["cold"]
    assert engine.generate("warm", TOKENS).right
    wait_until(lambda: asked(tap) == ["cold", "warm"])  # the engine has it all itself, and waits for no answer


def test_kv_of_a_request_with_prompt_logprobs_is_stored(make_daemon, make_engine):
    daemon = make_daemon()
    make_engine(daemon).generate("logprobs", TOKENS, sampling=WHOLE_PROMPT)
    assert make_engine(daemon).generate("warm", TOKENS).external == 3 * CHUNK


def test_preempted_request_with_prompt_logprobs_gets_no_hit(make_daemon, make_tap, make_engine):
    tap = make_tap(make_daemon())
    make_engine(tap.endpoint).generate("cold", TOKENS)
    engine = make_engine(tap.endpoint, extra={"kvserver.on_prefix_reset": "keep"})
    answer = engine.add("logprobs", TOKENS, count=20, sampling=WHOLE_PROMPT)
    engine.run(until=lambda: len(answer.tokens) > 5)
    engine.finish_steps()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert engine.connector.get_num_new_matched_tokens(engine.scheduler.requests["logprobs"], 0) == (0, False)
    engine.run()
    assert answer.right
    assert asked(tap) == ["cold"]
