"""A request that waited in vLLM's queue kept the answer from its arrival: a miss though all was stored since, or a hit on what was evicted since."""

from __future__ import annotations

import time

import pytest
from made_up_model import BLOCK, prompt
from modelless import Engine
from reconnect import restart, step_until_known
from support.daemon import wait_until

from kvserver.protocol import Cleared, EndRequest, Error, Lookup, ReportBlockAllocations

CHUNK = 64
TOKENS = prompt(1, 3 * CHUNK + 10)
HIT = 3 * CHUNK


def occupy(engine: Engine, count: int):
    """A request of so many tokens that leaves no room for another one. REQUIRES: 75 blocks."""
    answer = engine.add("occupies", prompt(9, 62 * BLOCK), count=count)
    engine.run(until=lambda: len(answer.tokens) > 0)
    return answer


def wait_in_queue(engine: Engine):
    """TOKENS, looked up while there is no room for it."""
    waiting = engine.add("waiting", TOKENS, count=2)
    engine.step()
    assert engine.status_of("waiting") == "WAITING"
    return waiting


@pytest.fixture(params=[True, False], ids=["async", "sync"])
def asynchronous(request):
    return request.param


def test_what_was_stored_meanwhile_is_found(make_daemon, make_engine, asynchronous):
    daemon = make_daemon(chunk_tokens=CHUNK)
    engine = make_engine(daemon, asynchronous=asynchronous, num_blocks=75, extra={"kvserver.lookup_age_ms": 20})
    occupied = occupy(engine, 150)
    waiting = wait_in_queue(engine)
    assert make_engine(daemon).generate("stores", TOKENS).external == 0
    engine.run()
    assert waiting.external == HIT
    assert waiting.right
    assert occupied.right


@pytest.mark.parametrize("lease_seconds", [0.1, 60])
def test_what_was_evicted_meanwhile_is_not_loaded(make_daemon, make_engine, asynchronous, lease_seconds):
    """The daemon's word of its lease is enough where that is short; where the lease was ended otherwise, the age is."""
    daemon = make_daemon(chunk_tokens=CHUNK, lease_seconds=lease_seconds)
    make_engine(daemon).generate("stores", TOKENS)
    extra = {} if lease_seconds < 1 else {"kvserver.lookup_age_ms": 20}
    engine = make_engine(daemon, asynchronous=asynchronous, num_blocks=75, extra=extra)
    occupy(engine, 150)
    waiting = wait_in_queue(engine)
    wait_until(lambda: engine.connector.scheduler.counters["lookup_hits"] or engine.step())
    assert daemon.http("/cache/clear", "POST")[0] == 200  # an eviction, but at a moment that the test chooses
    engine.run()
    assert (waiting.external, waiting.right) == (0, True)
    assert engine.connector.scheduler.counters["failed_loads"] == 0


def test_a_request_that_waits_long_asks_seldom(make_daemon, make_tap, make_engine):
    """vLLM asks in every pass."""
    tap = make_tap(make_daemon(chunk_tokens=CHUNK))
    engine = make_engine(tap.endpoint, num_blocks=75, extra={"kvserver.lookup_age_ms": 60_000})
    occupy(engine, 150)
    wait_in_queue(engine)
    before = len(engine.plans)
    engine.run()
    assert len(engine.plans) - before > 100
    assert [lookup.request_id for lookup in tap.of(Lookup)] == ["occupies", "waiting"]


def test_an_answer_of_a_former_daemon_is_void(make_daemon, make_engine):
    daemon = make_daemon(chunk_tokens=CHUNK)
    make_engine(daemon).generate("stores", TOKENS)
    engine = make_engine(daemon, num_blocks=75, extra={"kvserver.lookup_age_ms": 60_000})
    occupy(engine, 180)
    waiting = wait_in_queue(engine)
    wait_until(lambda: engine.connector.scheduler.counters["lookup_hits"] or engine.step())
    daemon.kill()
    daemon.start()
    wait_until(lambda: len(daemon.status()["instances"]) == 2, 20, "the engines register")
    engine.before_step = lambda plan: time.sleep(0.01)  # time to learn of it from a refused report
    engine.run()
    assert (waiting.external, waiting.right) == (0, True)
    assert engine.connector.scheduler.counters["failed_loads"] == 0


@pytest.mark.parametrize("code", ["unknown_instance", "duplicate_instance", "bad_keys"])
def test_a_refused_lookup_shows_that_the_daemon_is_another(make_daemon, make_tap, make_engine, caplog, code):
    daemon = make_daemon(chunk_tokens=CHUNK)
    tap = make_tap(daemon)
    notices = (ReportBlockAllocations, EndRequest)
    tap.instead = lambda message: Cleared(chunks=0) if isinstance(message, notices) else None
    engine = make_engine(tap.endpoint)
    long = engine.add("long", TOKENS, count=5 * CHUNK)
    engine.run(until=lambda: len(long.tokens) > 10)
    restart(daemon, caplog)
    refused = []

    def refuse_once(message):
        if isinstance(message, Lookup) and not refused:
            refused.append(message)
            return Error(code=code, message="of the test")
        return Cleared(chunks=0) if isinstance(message, notices) else None

    tap.instead = refuse_once
    engine.add("refused", prompt(2, CHUNK + 1), count=1)
    step_until_known(daemon, engine, caplog)
    assert refused
    engine.run()
    assert make_engine(daemon).generate("warm", TOKENS + long.tokens[:CHUNK]).external == 4 * CHUNK
