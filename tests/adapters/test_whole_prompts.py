"""An engine that cannot prefill upon cached KV, only decode (vLLM's MLA on plain CPUs): most hits would be wrong."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from made_up_model import prompt

from kvserver.adapters.vllm import facts
from kvserver.adapters.vllm.support import whole_prompts_only

CHUNK = 64


@pytest.mark.parametrize(("length", "external"), [(2 * CHUNK + 1, 2 * CHUNK), (2 * CHUNK, 2 * CHUNK - 1)])
def test_whole_prompt_engine_loads_a_hit_that_leaves_one_token(make_daemon, make_engine, monkeypatch, length, external):
    monkeypatch.setattr(facts, "whole_prompts_only", lambda config: True)
    daemon = make_daemon()
    make_engine(daemon).generate("cold", prompt(1, length))
    assert make_engine(daemon).generate("warm", prompt(1, length)).external == external


@pytest.mark.parametrize("length", [2 * CHUNK + 2, 3 * CHUNK - 1])
def test_whole_prompt_engine_treats_a_hit_that_leaves_more_tokens_as_a_miss(
    make_daemon, make_engine, monkeypatch, length
):
    daemon = make_daemon()
    make_engine(daemon).generate("cold", prompt(1, length))
    monkeypatch.setattr(facts, "whole_prompts_only", lambda config: True)
    assert make_engine(daemon).generate("warm", prompt(1, length)).external == 0


def engine(device: str = "cpu", mla: bool = True, chunked: bool = False, prefixes: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type=device),
        model_config=SimpleNamespace(use_mla=mla),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=chunked),
        cache_config=SimpleNamespace(enable_prefix_caching=prefixes),
    )


def test_only_mla_on_cpus_without_prefix_reuse_of_vllm_needs_whole_prompts():
    assert whole_prompts_only(engine())
    others = [engine(device="cuda"), engine(mla=False), engine(chunked=True), engine(prefixes=True)]
    assert not any(whole_prompts_only(other) for other in others)
