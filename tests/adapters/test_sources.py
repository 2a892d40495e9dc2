"""Where the tokens of prompts came from, as the end of each request states it: vLLM's own counts, but for failed loads."""

from __future__ import annotations

import json
import os
import random
import time
from typing import Any

import pytest
from made_up_model import prompt
from model_folder import write_lora
from modelless import IMPATIENT, Answer, Engine
from support.daemon import wait_until
from tap import Tap
from vllm.lora.request import LoRARequest

from kvserver.adapters.vllm import facts
from kvserver.protocol import EndRequest, Error, LookupReply, Reply, Request, Retrieve

CHUNK = 64
RUN = 150  # requests


def ends(tap: Tap, engine: Engine) -> dict[str, EndRequest]:
    """Of every request of the engine, by its name; each ended once."""
    wait_until(lambda: len(tap.of(EndRequest)) >= len(engine.answers), what=f"{len(engine.answers)} ends")
    found = {end.request_id: end for end in tap.of(EndRequest)}
    assert len(found) == len(tap.of(EndRequest))
    return found


def counts(end: EndRequest) -> tuple[int, int, int, int, int]:
    return end.prompt_tokens, end.local_tokens, end.loaded_tokens, end.loads, end.failed_loads


def check(end: EndRequest, answer: Answer) -> None:
    """Against what vLLM counted of the same request."""
    if not answer.tokens:
        assert (end.prompt_tokens, end.local_tokens, end.loaded_tokens) == (0, 0, 0)
        return
    assert end.prompt_tokens == len(answer.prompt)
    assert end.local_tokens == answer.local
    kept = {not end.failed_loads, end.failed_loads < end.loads}  # of several the failed one may come after a preemption
    assert end.loaded_tokens in {answer.external * of for of in kept}
    assert end.local_tokens + end.loaded_tokens < end.prompt_tokens
    assert end.failed_loads <= end.loads


class SomeFail:
    """Refuses a third of the loads in the daemon's stead."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def __call__(self, message: Request) -> Reply | None:
        refuse = isinstance(message, Retrieve) and self.random.random() < 0.33
        return Error(code="internal", message="no") if refuse else None


@pytest.mark.parametrize(
    ("seed", "options"),
    [
        (1, {"asynchronous": True}),
        (2, {"asynchronous": False, "max_tokens_per_step": 96}),
        (3, {"asynchronous": True, "world_size": 2, "drafts": 2}),
    ],
)
def test_the_sources_of_a_random_run_are_vllms_own(make_daemon, make_tap, make_engine, seed, options):
    """With preemptions, failed loads (of one rank, or of both) and requests aborted at any time."""
    tap = make_tap(make_daemon(chunk_tokens=CHUNK, l1_size="2MiB"))
    tap.instead = SomeFail(seed)
    engine = make_engine(tap.endpoint, num_blocks=70, **options)
    source = random.Random(seed)
    families = [prompt(seed * 100 + i, 6 * CHUNK) for i in range(6)]
    while len(engine.answers) < RUN:
        live = [name for name, answer in engine.answers.items() if answer.finish_reason is None]
        if len(live) < 8 and source.random() < 0.5:
            tokens = source.choice(families)[: source.randrange(20, 6 * CHUNK)]
            engine.add(f"r{len(engine.answers)}", tokens, count=source.choice([1, 3, 40, 120]))
        elif live and source.random() < 0.02:
            engine.abort(source.choice(live))
        engine.step()
    engine.add("unanswered", families[0], count=1)
    engine.abort("unanswered")  # before a step: whether another is aborted unanswered is a matter of time
    engine.run(60, until=lambda: not engine.busy)

    found = ends(tap, engine)
    for name, answer in engine.answers.items():
        check(found[name], answer)
    answered = [answer for answer in engine.answers.values() if answer.tokens]
    assert sum(end.prompt_tokens for end in found.values()) == sum(len(answer.prompt) for answer in answered)
    loads, failed = (sum(getattr(end, name) for end in found.values()) for name in ("loads", "failed_loads"))
    print(
        f"seed {seed}: {len(answered)} answered of {len(found)}, {engine.preemptions} preemptions, {loads} loads, {failed} failed"
    )
    assert engine.preemptions
    assert 0 < failed < loads
    assert len(answered) < len(found)
    assert sum(end.loaded_tokens for end in found.values())
    assert sum(end.local_tokens for end in found.values())


def test_a_prompt_is_vllms_first_then_loaded_then_computed(make_daemon, make_tap, make_engine):
    tap = make_tap(make_daemon(chunk_tokens=CHUNK))
    first = make_engine(tap.endpoint)
    tokens = prompt(1, 3 * CHUNK + 10)
    first.generate("cold", tokens)
    first.generate("local", tokens)
    assert [counts(end) for end in ends(tap, first).values()] == [
        (3 * CHUNK + 10, 0, 0, 0, 0),
        (3 * CHUNK + 10, 3 * CHUNK, 0, 0, 0),
    ]
    other = make_engine(tap.endpoint)
    other.generate("short", tokens[: CHUNK + 20])
    other.generate("both", tokens)
    wait_until(lambda: len(tap.of(EndRequest)) == 4)
    assert [counts(end) for end in tap.of(EndRequest)[2:]] == [
        (CHUNK + 20, 0, CHUNK, 1, 0),
        (3 * CHUNK + 10, CHUNK + 16, 2 * CHUNK - 16, 1, 0),
    ]


def test_a_load_that_fails_is_computed(make_daemon, make_tap, make_engine):
    """On both ranks, which is one failed load."""
    tap = make_tap(make_daemon(chunk_tokens=CHUNK))
    tokens = prompt(1, 2 * CHUNK + 1)
    make_engine(tap.endpoint, world_size=2).generate("cold", tokens)
    tap.instead = lambda message: Error(code="internal", message="no") if isinstance(message, Retrieve) else None
    make_engine(tap.endpoint, world_size=2).generate("fails", tokens)
    wait_until(lambda: len(tap.of(EndRequest)) == 2)
    assert counts(tap.of(EndRequest)[1]) == (2 * CHUNK + 1, 0, 0, 1, 1)


def test_requests_that_run_without_cache_are_counted_too(make_daemon, make_tap, make_engine, tmp_path):
    """One that wants logprobs of its prompt, and one whose LoRA's files were replaced."""
    tap = make_tap(make_daemon(chunk_tokens=CHUNK))
    engine = make_engine(tap.endpoint)
    tokens = prompt(1, 2 * CHUNK)
    lora = LoRARequest("sql", 1, str(write_lora(tmp_path / "lora")))
    engine.generate("lora", tokens, lora_request=lora)
    write_lora(tmp_path / "lora", seed=1)
    os.utime(tmp_path / "lora" / "adapter_model.safetensors", (1, 1))
    engine.generate("replaced", tokens, lora_request=lora)
    engine.generate("logprobs", tokens, sampling={"prompt_logprobs": 1})
    found = ends(tap, engine)
    assert engine.connector.scheduler.counters["replaced_lora_requests"] >= 1
    assert counts(found["lora"]) == (2 * CHUNK, 0, 0, 0, 0)
    assert counts(found["replaced"]) == (2 * CHUNK, engine.answers["replaced"].local, 0, 0, 0)
    assert counts(found["logprobs"]) == (2 * CHUNK, 0, 0, 0, 0)
    assert found["logprobs"].not_loaded == "computes_all"


@pytest.mark.parametrize(
    ("why", "length", "extra"), [("lookup_timeout", 2 * CHUNK, IMPATIENT), ("whole_prompts_only", 2 * CHUNK + 9, {})]
)
def test_an_end_states_why_nothing_was_loaded_of_what_was_found(
    make_daemon, make_tap, make_engine, monkeypatch, why, length, extra
):
    """And `/explain` repeats it."""
    daemon = make_daemon(chunk_tokens=CHUNK)
    tap = make_tap(daemon)
    make_engine(tap.endpoint).generate("cold", prompt(1, length))

    def late(reply: Reply) -> Reply:
        if isinstance(reply, LookupReply):
            time.sleep(0.3)  # longer than kvserver.lookup_timeout_ms
        return reply

    if why == "lookup_timeout":
        tap.edit = late
    else:
        monkeypatch.setattr(facts, "whole_prompts_only", lambda config: True)
    warm = make_engine(tap.endpoint, extra=extra)
    assert warm.generate("warm", prompt(1, length)).external == 0
    wait_until(lambda: len(tap.of(EndRequest)) == 2)
    assert tap.of(EndRequest)[1].not_loaded == why

    def explained() -> dict[str, Any] | None:
        code, body = daemon.http("/explain?request_id=warm")
        found = json.loads(body)["requests"][0] if code == 200 else {"outcome": "running"}
        return found if found["outcome"] != "running" else None

    found = wait_until(explained)
    assert (found["outcome"], found["not_loaded"]) == ("not_loaded", why)
    assert f"({why})" in found["verdict"]


def test_a_request_that_was_never_placed_counts_nothing(make_daemon, make_tap, make_engine):
    tap = make_tap(make_daemon(chunk_tokens=CHUNK))
    engine = make_engine(tap.endpoint)
    engine.add("waits", prompt(1, 2 * CHUNK))
    engine.abort("waits")
    engine.run()
    assert counts(ends(tap, engine)["waits"]) == (0, 0, 0, 0, 0)


def test_of_a_streaming_session_the_first_prompt_counts(make_daemon, make_tap, make_engine):
    """As in vLLM, which states no prefill for what the session goes on with."""
    tap = make_tap(make_daemon(chunk_tokens=CHUNK))
    engine = make_engine(tap.endpoint)
    waiting = "WAITING_FOR_STREAMING_REQ"
    for tokens in (prompt(1, CHUNK + 6), prompt(2, CHUNK)):
        engine.add("session", tokens, count=1, resumable=True)
        engine.run(until=lambda: engine.status_of("session") == waiting)
    engine.abort("session")
    engine.run()
    assert counts(ends(tap, engine)["session"]) == (CHUNK + 6, 0, 0, 0, 0)
