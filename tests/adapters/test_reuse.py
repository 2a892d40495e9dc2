"""What one engine stores another one loads: how many tokens, and every byte of them."""

from __future__ import annotations

import pytest
from modelless import BLOCK, prompt

CHUNK = 64  # the test daemon's chunk_tokens


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
def test_a_second_engine_loads_what_the_first_one_stored(make_daemon, make_engine, asynchronous):
    daemon = make_daemon()
    cold = make_engine(daemon, asynchronous=asynchronous)
    tokens = prompt(1, 3 * CHUNK + 20)
    assert cold.generate("cold", tokens).external == 0

    warm = make_engine(daemon, asynchronous=asynchronous)
    answer = warm.generate("warm", tokens)
    assert (answer.local, answer.external) == (0, 3 * CHUNK)
    assert warm.received == ["warm"]
    assert not cold.errors()
    assert not warm.errors()
