"""A daemon that hangs, dies, restarts or comes late costs hits only: every request is answered, with the same tokens."""

from __future__ import annotations

import time

import pytest
from conftest import Engines
from sglang_engines import PAGE, Engine, Prompt
from support.daemon import Daemon, wait_until
from test_sglang_outputs import Make, Start, cached, wait_for_stores

QUICK = {
    "kvserver.lookup_poll_ms": 50,
    "kvserver.lookup_timeout_ms": 200,
    "kvserver.load_wait_ms": 500,
    "kvserver.store_timeout_ms": 2000,
}


def victim(engines: Engines) -> Engine:
    return engines.get("victim", extra=QUICK)


def hits_come_back(engine: Engine, daemon: Daemon, text: Prompt) -> None:
    """Wait until a prompt that the engine stored and forgot is found in the daemon."""

    def found() -> bool:
        engine.generate([text], 1)
        time.sleep(0.2)
        engine.flush()
        return bool(engine.generate([text], 1)[0]["cached_tokens"] == cached(len(text)))

    wait_until(found, 60, "hits")


@pytest.mark.long
def test_a_daemon_that_starts_after_the_engine_gives_hits(engines: Engines, start_daemon: Start, prompt: Make) -> None:
    engine = victim(engines).wait_ready()
    text = prompt(1, 500)
    reference = engine.generate([text])[0]
    engine.flush()
    assert engine.generate([text])[0]["tokens"] == reference["tokens"]
    daemon = start_daemon(engine)
    engine.flush()
    hits_come_back(engine, daemon, prompt(2, 300))


def test_a_stopped_daemon_costs_hits_only(engines: Engines, start_daemon: Start, prompt: Make) -> None:
    engine = victim(engines)
    daemon = start_daemon(engine)
    texts = [prompt(10 + n, 400) for n in range(4)]
    reference = [engine.generate([text])[0]["tokens"] for text in texts]
    wait_for_stores(daemon, 4 * (400 // PAGE))
    engine.flush()
    daemon.freeze()
    try:
        assert [engine.generate([text])[0]["tokens"] for text in texts] == reference
    finally:
        daemon.thaw()
    hits_come_back(engine, daemon, prompt(20, 300))


@pytest.mark.long
def test_a_killed_daemon_and_the_next_one_cost_hits_only(engines: Engines, start_daemon: Start, prompt: Make) -> None:
    engine = victim(engines)
    daemon = start_daemon(engine)
    text = prompt(30, 600)
    reference = engine.generate([text])[0]["tokens"]
    wait_for_stores(daemon, 600 // PAGE)
    engine.flush()
    daemon.kill()
    assert engine.generate([text])[0]["tokens"] == reference
    engine.flush()
    daemon = start_daemon(engine)
    assert engine.generate([text])[0]["tokens"] == reference
    engine.flush()
    hits_come_back(engine, daemon, prompt(31, 300))


@pytest.mark.long
def test_an_engine_outlives_a_load_that_does_not_end(engines: Engines, start_daemon: Start, prompt: Make) -> None:
    """SGLang flushes, and computes until each of its free slots was used, while the copy waits; its idle check counts the slots."""
    engine = victim(engines)
    daemon = start_daemon(engine, pauses=True)
    text = prompt(40, 1600)
    reference = engine.generate([text])[0]["tokens"]
    wait_for_stores(daemon, 1600 // PAGE)
    engine.flush()
    others = [prompt(50 + n, 1500) for n in range(5)]  # of 8192 tokens that the engine has
    with daemon.paused_copies():
        engine.send("generate", prompts=[text], max_tokens=16)
        daemon.wait_for_a_copy()
        assert engine.receive()["outputs"][0] | {"logprobs": []} == {
            "tokens": reference,
            "logprobs": [],
            "cached_tokens": 0,
        }
        time.sleep(2)  # idle: SGLang counts its slots
        engine.flush()
        computed = [engine.generate([other])[0]["tokens"] for other in others]
    assert [engine.generate([other])[0]["tokens"] for other in others] == computed
    engine.flush()
    assert [engine.generate([other])[0]["tokens"] for other in others] == computed
    engine.flush()
    hits_come_back(engine, daemon, prompt(60, 300))
    assert "memory leak detected" not in engine.tail(5), "all slots are back"
