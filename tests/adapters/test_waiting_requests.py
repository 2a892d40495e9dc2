"""Requests that wait in vLLM's queue with their answer while the world changes."""

from __future__ import annotations

import pytest
from made_up_model import BLOCK, prompt
from modelless import Engine
from reconnect import replace_daemon
from support.daemon import Daemon

CHUNK = 64
TOKENS = prompt(1, 3 * CHUNK + 10)


def wait_with_an_answer(engine: Engine):
    """Submit TOKENS, for which there is no room before another request has ended. REQUIRES: the daemon has them."""
    engine.add("first", prompt(5, 8 * BLOCK), count=8 * BLOCK)
    engine.step()
    waiting = engine.add("waiting", TOKENS)
    engine.run(until=lambda: engine.connector.scheduler.counters["lookup_hits"] > 0)
    assert engine.status_of("waiting") == "WAITING"
    return waiting


@pytest.fixture
def engine(make_daemon, make_engine) -> tuple[Daemon, Engine]:
    daemon = make_daemon()
    make_engine(daemon).generate("cold", TOKENS)
    # Their answers do not age: nothing but what happens meanwhile makes them void.
    return daemon, make_engine(daemon, num_blocks=21, extra={"kvserver.lookup_age_ms": 600_000})


def test_what_the_last_daemon_had_is_not_loaded_from_the_next_one(engine, caplog):
    daemon, engine = engine
    waiting = wait_with_an_answer(engine)
    replace_daemon(daemon, engine, caplog)
    assert engine.status_of("waiting") == "WAITING"
    engine.run()
    assert waiting.right
    assert engine.loads == []


def test_what_the_old_weights_made_is_not_loaded_after_a_reset(engine):
    _, engine = engine
    waiting = wait_with_an_answer(engine)
    engine.connector.reset_cache()
    engine.run()
    assert waiting.right
    assert engine.loads == []
