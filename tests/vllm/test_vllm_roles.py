"""Prefill and decode by two real engines: one computes prompts and stores them, the other loads them and generates.

A proxy sends each prompt to the first with `max_tokens=1`, and then to the second. Both have roles of their own, or `kv_both`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from engines import TIMEOUTS, Engine, Engines, Prompt
from support.daemon import Daemon

Start = Callable[..., Daemon]
Make = Callable[..., Prompt]
BLOCK = 32
ROLES = {"roles": ("kv_producer", "kv_consumer"), "both": ("kv_both", "kv_both")}


@pytest.fixture(params=ROLES)
def roles(request: pytest.FixtureRequest) -> tuple[str, str]:
    return ROLES[request.param]


@pytest.fixture
def prefill(engines: Engines, roles: tuple[str, str]) -> Engine:
    return engine_of(engines, "prefill", roles[0])


@pytest.fixture
def decode(engines: Engines, roles: tuple[str, str]) -> Engine:
    return engine_of(engines, "decode", roles[1])


def engine_of(engines: Engines, name: str, role: str) -> Engine:
    return engines.get(f"{name} {role}", dtype="float32", extra=TIMEOUTS, transfer={"kv_role": role})


def test_five_turns_are_prefilled_by_one_engine_and_decoded_by_another(
    prefill: Engine, decode: Engine, roles: tuple[str, str], start_daemon: Start, prompt: Make
) -> None:
    """The decode engine computes a block and a token of each prompt at most. Its answers are those of an engine without cache."""
    start_daemon(tails="on")
    before = decode.metrics()["vllm:external_prefix_cache_hits"]
    turn, turns, hits = prompt(70, 700), [], 0
    for number in range(5):
        first = prefill.generate([turn], 1)[0]
        prefill.wait_for_stores()
        decode.forget()
        answer = decode.generate([turn])[0]
        decode.wait_for_stores()
        assert answer["cached_tokens"] >= len(turn) - BLOCK - 1
        assert answer["tokens"][0] == first["tokens"][0]
        hits += answer["cached_tokens"]
        turns.append((turn, answer["tokens"]))
        turn = [*turn, *answer["tokens"], *prompt(80 + number, 150)]
        prefill.forget()  # what it has itself would hide what it may load
    assert decode.metrics()["vllm:external_prefix_cache_hits"] - before == hits
    alone = prefill if roles[0] == "kv_producer" else None
    for text, tokens in turns if alone is not None else []:
        computed = alone.generate([text])[0]
        assert (computed["cached_tokens"], computed["tokens"]) == (0, tokens), "a producer loads nothing"
        alone.forget()


def test_a_producer_asks_for_nothing_and_a_consumer_stores_what_it_generates(
    engines: Engines, start_daemon: Start, prompt: Make
) -> None:
    prefill, decode = engine_of(engines, "prefill", "kv_producer"), engine_of(engines, "decode", "kv_consumer")
    daemon = start_daemon(tails="on")
    text = prompt(90, 600)
    prefill.generate([text], 1)
    prefill.wait_for_stores()
    answer = decode.generate([text], 200)[0]
    decode.wait_for_stores()
    looked = {row["instance_id"]: row["requests"]["lookups"] for row in daemon.status()["instances"]}
    assert sum(looked.values()) == 1
    decode.forget()
    turn = [*text, *answer["tokens"]]
    assert decode.generate([turn])[0]["cached_tokens"] >= len(turn) - BLOCK - 1
