"""vLLM hashes prompt embeddings as raw bytes and computes with their values: the KV of a float16 prompt was served to another
engine's bfloat16 prompt of the same bytes.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from made_up_model import prompt
from support.daemon import wait_until

from kvserver.protocol import EndRequest

CHUNK = 64
TOKENS = prompt(1, 2 * CHUNK + 10)
OWN = torch.arange(len(TOKENS) * 8, dtype=torch.int16).view(torch.bfloat16).reshape(len(TOKENS), 8)
FOREIGN = OWN.view(torch.float16)


def test_embeddings_of_two_dtypes_have_equal_bytes_and_other_values():
    assert bytes(OWN.view(torch.uint8).numpy()) == bytes(FOREIGN.view(torch.uint8).numpy())
    assert not torch.equal(OWN.float(), FOREIGN.float())


def test_embeddings_of_the_models_dtype_are_shared(make_daemon, make_engine):
    daemon = make_daemon(chunk_tokens=CHUNK)
    make_engine(daemon).generate("cold", TOKENS, prompt_embeds=OWN)
    assert make_engine(daemon).generate("warm", TOKENS, prompt_embeds=OWN.clone()).external == 2 * CHUNK


@pytest.mark.parametrize("foreign", [FOREIGN, OWN.float()], ids=["float16", "float32"])
def test_embeddings_of_another_dtype_are_neither_stored_nor_looked_up(make_daemon, make_engine, foreign):
    daemon = make_daemon(chunk_tokens=CHUNK)
    make_engine(daemon).generate("other dtype", TOKENS, prompt_embeds=foreign)
    assert daemon.status()["l1"]["chunks"] == 0
    make_engine(daemon).generate("the model's dtype", TOKENS, prompt_embeds=OWN)
    assert daemon.status()["l1"]["chunks"] == 2
    assert make_engine(daemon).generate("other dtype", TOKENS, prompt_embeds=foreign).external == 0


def test_what_vllms_own_cache_may_have_of_another_dtype_is_not_stored_as_the_models(make_daemon, make_engine):
    """vLLM finds its own blocks of the float16 prompt for the bfloat16 one, whose store would have them under its keys."""
    daemon = make_daemon(chunk_tokens=CHUNK)
    engine = make_engine(daemon)
    engine.generate("foreign", TOKENS, prompt_embeds=FOREIGN)
    assert engine.generate("own", TOKENS, prompt_embeds=OWN).local > 0
    assert daemon.status()["l1"]["chunks"] == 0
    assert engine.generate("text", TOKENS).right
    assert daemon.status()["l1"]["chunks"] == 2, "text is another key"


def test_a_prompt_that_runs_while_another_dtype_comes_stores_no_more(make_daemon, make_engine):
    daemon = make_daemon(chunk_tokens=CHUNK)
    engine = make_engine(daemon, max_tokens_per_step=CHUNK)
    tokens = prompt(2, 4 * CHUNK)
    embeds = torch.zeros(len(tokens), 8, dtype=torch.bfloat16)
    answer = engine.add("long", tokens, prompt_embeds=embeds)
    engine.run(until=lambda: len(engine.stores) >= 1)
    engine.add("foreign", TOKENS, prompt_embeds=FOREIGN)
    engine.run()
    assert answer.right
    assert 1 <= daemon.status()["l1"]["chunks"] < 4


def test_positions_that_are_tokens_are_no_part_of_the_key_so_such_prompts_are_the_engines_own(make_daemon, make_engine):
    """Token 0 and an embedding at its place have one hash: a mask beside the prompt has it."""
    daemon = make_daemon(chunk_tokens=CHUNK)
    mask = [True] * len(TOKENS)
    one, other = (make_engine(daemon, extra={"kvserver.on_prefix_reset": "keep"}) for _ in range(2))
    one.generate("tokens", TOKENS, prompt_embeds=OWN, prompt_is_token_ids=mask)
    assert other.generate("embeddings", TOKENS, prompt_embeds=OWN).external == 0
    assert make_engine(daemon).generate("mask", TOKENS, prompt_embeds=OWN, prompt_is_token_ids=mask).external == 0
    assert one.scheduler.reset_prefix_cache()
    assert one.generate("again", TOKENS, prompt_embeds=OWN, prompt_is_token_ids=mask).external == 2 * CHUNK


def test_the_reason_is_stated_of_each_request_and_explained(make_daemon, make_tap, make_engine):
    daemon = make_daemon(chunk_tokens=CHUNK)
    tap = make_tap(daemon)
    engine = make_engine(tap.endpoint)
    for name, embeds in (("foreign", FOREIGN), ("own", OWN)):
        engine.generate(name, TOKENS, prompt_embeds=embeds)
    wait_until(lambda: len(tap.of(EndRequest)) == 2)
    assert [end.not_loaded for end in tap.of(EndRequest)] == ["embeddings_dtype"] * 2
    assert engine.connector.scheduler.counters["foreign_embeddings_requests"] >= 2

    def explained() -> dict[str, Any] | None:
        code, body = daemon.http("/explain?request_id=foreign")
        return json.loads(body)["requests"][0] if code == 200 else None

    found = wait_until(explained)
    assert (found["outcome"], found["not_loaded"]) == ("no_lookup", "embeddings_dtype")
    assert any("another dtype than its model's" in hint for hint in found["advice"])
