"""Of 3,000 requests that arrived at once 128 lookups found no room in the channel and became misses, though all was stored."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from made_up_model import prompt
from modelless import IMPATIENT, Engine
from support.daemon import Daemon, wait_until

from kvserver.adapters.common.lookups import MOST_IN_FLIGHT

CHUNK = 64
TOKENS = prompt(1, 2 * CHUNK + 10)
LASTING = {"kvserver.lookup_age_ms": 60_000}
NOTHING = SimpleNamespace(
    num_scheduled_tokens={},
    total_num_scheduled_tokens=0,
    scheduled_new_reqs=[],
    scheduled_cached_reqs=SimpleNamespace(req_ids=[], resumed_req_ids=set(), num_computed_tokens=[], new_block_ids=[]),
)


@pytest.fixture
def begin(make_engine):
    """An engine, and what requests are left is aborted at the end."""
    engines: list[Engine] = []

    def make(daemon: Daemon, extra: dict[str, float]) -> Engine:
        engines.append(make_engine(daemon, extra=extra))
        return engines[-1]

    yield make
    for engine in engines:
        for name in list(engine.scheduler.requests):
            engine.abort(name)
        engine.run()


def submit(engine: Engine, count: int) -> None:
    for number in range(count):
        engine.add(f"r{number}", TOKENS)


def answers(engine: Engine) -> dict[str, tuple[int | None, bool]]:
    """vLLM queries each request in turn, in one pass after the other until it has its answer."""
    found: dict[str, tuple[int | None, bool]] = {}
    passes = 0
    while len(found) < len(engine.scheduler.requests):
        for name, request in engine.scheduler.requests.items():
            if name not in found:
                answer = engine.connector.get_num_new_matched_tokens(request, 0)
                if answer != (None, False):
                    found[name] = answer
        engine.connector.build_connector_meta(NOTHING)
        passes += 1
        assert passes < 20_000
    return found


def test_lookups_of_a_burst_wait_their_turn_and_hit(make_daemon, make_engine, begin):
    """The daemon is busy while they come."""
    daemon = make_daemon(chunk_tokens=CHUNK)
    make_engine(daemon).generate("stores", TOKENS)
    engine = begin(daemon, LASTING)
    daemon.freeze()
    submit(engine, 3000)
    daemon.thaw()
    assert set(answers(engine).values()) == {(2 * CHUNK, True)}
    counters = engine.connector.scheduler.counters
    assert (counters["lookups"], counters["lookup_hits"], counters["lookup_timeouts"]) == (3000, 3000, 0)


def test_waiting_lookups_are_sent_without_a_further_query(make_daemon, begin):
    """As passes end, in the order of arrival."""
    daemon = make_daemon(chunk_tokens=CHUNK)
    engine = begin(daemon, LASTING)
    daemon.freeze()
    submit(engine, 3 * MOST_IN_FLIGHT)
    counters = engine.connector.scheduler.counters
    assert counters["lookups"] <= MOST_IN_FLIGHT
    daemon.thaw()
    wait_until(lambda: engine.connector.build_connector_meta(NOTHING) and counters["lookups"] == 3 * MOST_IN_FLIGHT)


def test_requests_that_end_before_their_turn_are_not_looked_up(make_daemon, begin):
    """The daemon answers again when they end, since an end is a notice: one that finds no room has the link look for the
    daemon, and the session ends where that is silent for 2 s. No answer is received, and no place free, before answers().
    """
    daemon = make_daemon(chunk_tokens=CHUNK)
    engine = begin(daemon, LASTING)
    daemon.freeze()
    submit(engine, MOST_IN_FLIGHT + 100)
    daemon.thaw()
    sent = engine.connector.scheduler.counters["lookups"]
    assert sent <= MOST_IN_FLIGHT
    for number in range(MOST_IN_FLIGHT + 50):
        engine.abort(f"r{number}")
    assert len(answers(engine)) == 50
    assert engine.connector.scheduler.counters["lookups"] == sent + 50


def test_waiting_lookups_of_a_hung_daemon_are_misses(make_daemon, begin):
    """When their time is over, and at once when the breaker is open."""
    daemon = make_daemon(chunk_tokens=CHUNK)
    engine = begin(daemon, {"kvserver.store_timeout_ms": 200, **IMPATIENT})
    daemon.freeze()
    submit(engine, 2 * MOST_IN_FLIGHT)
    assert set(answers(engine).values()) == {(0, False)}
    assert engine.connector.scheduler.counters["lookups"] <= MOST_IN_FLIGHT
    assert not engine.connector.scheduler.connected
    daemon.thaw()
