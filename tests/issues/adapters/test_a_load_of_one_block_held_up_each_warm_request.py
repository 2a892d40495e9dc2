"""With EAGLE and MTP vLLM leaves the last block of its own hits out, since the draft model's KV of a token depends on the next one. Each warm
request then waited for a load of just that block, which a step computes at no cost."""

from __future__ import annotations

import pytest
from hybrids import HYBRIDS
from made_up_model import BLOCK, prompt
from modelless import Engine
from vllm.config import SpeculativeConfig

CHUNK = 64
TOKENS = prompt(5, 10 * BLOCK + 5)


@pytest.fixture
def make_eagle(make_engine, monkeypatch):
    """Start an engine whose vLLM leaves the last block out of its own hits. The drafts are played as always."""

    def make(*args, **options) -> Engine:
        for name in ("use_eagle", "use_eagle_block_drop"):
            monkeypatch.setattr(SpeculativeConfig, name, lambda self: True)
        engine = make_engine(*args, drafts=2, **options)
        monkeypatch.undo()
        return engine

    return make


@pytest.mark.parametrize("more", [0, 1, 5, BLOCK - 1])
@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
def test_a_warm_request_loads_nothing_where_vllm_left_out_one_block(make_daemon, make_eagle, asynchronous, more):
    daemon, tokens = make_daemon(tails="on"), prompt(5, 10 * BLOCK + more)
    engine = make_eagle(daemon, asynchronous=asynchronous)
    engine.generate("cold", tokens)
    daemon.wait_for_accounting(tickets=0)
    warm = engine.generate("warm", tokens)
    assert warm.local == (9 if more else 8) * BLOCK
    assert (warm.external, engine.loads) == (0, [])


def test_hit_beyond_one_block_is_loaded_but_for_its_last_block(make_daemon, make_eagle):
    daemon = make_daemon(tails="on")
    make_eagle(daemon).generate("cold", TOKENS)
    engine = make_eagle(daemon)
    engine.generate("part", TOKENS[: 4 * BLOCK + 2])
    warm = engine.generate("warm", TOKENS)
    assert (warm.local, warm.external) == (3 * BLOCK, 6 * BLOCK)


def test_an_engine_without_a_prefix_loads_a_hit_but_for_its_last_block(make_daemon, make_eagle):
    """That block's last token has another next token perhaps, and the draft model's KV of it would be another one's."""
    daemon = make_daemon(tails="on")
    make_eagle(daemon).generate("cold", TOKENS)
    warm = make_eagle(daemon).generate("warm", [*TOKENS[: 10 * BLOCK], 7])
    assert (warm.local, warm.external) == (0, 9 * BLOCK)


@pytest.mark.parametrize(("own_blocks", "loaded"), [(7, 0), (6, 2)])
@pytest.mark.parametrize("tails", ["off", "on"])
def test_beside_its_own_prefix_an_engine_computes_one_block_and_loads_two(
    make_daemon, make_engine, tails, own_blocks, loaded
):
    """Of any method: the step is made anyway, and a load takes one more."""
    daemon = make_daemon(tails=tails)
    make_engine(daemon).generate("cold", TOKENS)
    engine = make_engine(daemon)
    engine.generate("part", [*TOKENS[: own_blocks * BLOCK], 7])
    warm = engine.generate("warm", [*TOKENS[: 8 * BLOCK], 7])
    assert (warm.local, warm.external) == (own_blocks * BLOCK, loaded * BLOCK)


def test_an_engine_of_a_hybrid_loads_whole_chunks(make_daemon, make_eagle):
    """The states and windows of a hit are those of its end, so no block can be left out."""
    daemon, hybrid = make_daemon(), HYBRIDS["gpt-oss"]
    make_eagle(daemon, **hybrid.options).generate("cold", TOKENS)
    warm = make_eagle(daemon, **hybrid.options).generate("warm", TOKENS)
    assert warm.external == 2 * CHUNK
