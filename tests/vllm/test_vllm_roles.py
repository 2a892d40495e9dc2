"""Prefill and decode by two real engines: one computes prompts and stores them, the other loads them and generates.

A proxy sends each prompt to the first with `max_tokens=1`, and then to the second. Both have roles of their own, or `kv_both`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from engines import TIMEOUTS, Engine, Engines, Prompt
from support.daemon import Daemon, wait_until

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
    extra = TIMEOUTS | {"kvserver.fill_timeout_ms": 10_000, "kvserver.load_timeout_ms": 10_000}
    blocks = {"num_gpu_blocks_override": 500}  # room for ten prompts, whose stores are then not cancelled for others
    return engines.get(f"{name} {role}", dtype="float32", extra=extra, transfer={"kv_role": role}, **blocks)


def handed_over(prompts: list[Prompt], answers: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Requests for the decode engine, as a proxy makes them of the prefill engine's answers."""
    given = [{"kv_transfer_params": answer["kv_transfer_params"]} for answer in answers]
    return [
        {"prompt": text, "sampling": {"max_tokens": count, "extra_args": extra}}
        for text, extra in zip(prompts, given, strict=True)
    ]


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


def test_prompts_are_decoded_although_their_last_stores_arrive_after_the_lookups(
    prefill: Engine, decode: Engine, start_daemon: Start, prompt: Make
) -> None:
    """The prefill engine sends the last stores of a batch with its next step, which it makes when the decode engine waits for them."""
    daemon = start_daemon(tails="on")

    def requests() -> dict[str, int]:
        rows = {row["instance_id"]: row["requests"] for row in daemon.status()["instances"]}
        found: dict[str, int] = max(rows.values(), key=lambda counts: counts["handed_over_tokens"])
        return found

    lengths = random.Random(7)
    for batch in range(6):
        prompts = [prompt(1000 + 10 * batch + n, lengths.randrange(300, 1744)) for n in range(5)]
        prefilled = prefill.ask("serve", requests=[{"prompt": text, "sampling": {"max_tokens": 1}} for text in prompts])
        waits = requests()["store_waits"]
        decode.send("serve", requests=handed_over(prompts, prefilled["outputs"], 2))
        wait_until(lambda before=waits: requests()["store_waits"] > before, 60, "a lookup waits for a store")
        prefill.wait_for_stores()
        answers = decode.receive()["outputs"]
        for text, first, answer in zip(prompts, prefilled["outputs"], answers, strict=True):
            assert answer["cached_tokens"] >= len(text) - BLOCK - 1
            assert answer["tokens"][0] == first["tokens"][0]
        decode.wait_for_stores()
    assert (requests()["late_handovers"], requests()["lost_handovers"]) == (0, 0)


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
