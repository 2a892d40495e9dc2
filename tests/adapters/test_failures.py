"""Whatever becomes of the daemon: right tokens, every load answered once, no block lost."""

from __future__ import annotations

import logging
import os
import resource
import time

import msgspec
import pytest
from made_up_model import continuation, prompt
from modelless import IMPATIENT
from support.daemon import wait_until

from kvserver.adapters.common.dispatcher import Dispatcher
from kvserver.adapters.common.specs import ids_of
from kvserver.protocol import Error, Retrieve, Retrieved, Stored
from kvserver.protocol.client import Client, RequestFailed

CHUNK = 64
TOKENS = prompt(1, 4 * CHUNK + 10)


@pytest.fixture(params=[True, False], ids=["async", "sync"])
def asynchronous(request):
    return request.param


@pytest.fixture
def stored(make_daemon, make_engine):
    """Start a daemon that holds TOKENS."""

    def start(**flags):
        daemon = make_daemon(**flags)
        make_engine(daemon).generate("cold", TOKENS)
        return daemon

    return start


# ---- there is no daemon to talk to ------------------------------------------------------------


def test_without_a_daemon_the_engine_serves(make_engine, tmp_path):
    engine = make_engine(f"ipc://{tmp_path}/nobody")
    assert engine.generate("a", TOKENS).external == 0
    assert engine.generate("b", TOKENS).local > 0
    assert not engine.loads


def test_a_daemon_that_starts_later_is_found(make_daemon, make_engine):
    daemon = make_daemon(start=False)
    engine = make_engine(daemon)
    engine.generate("a", TOKENS)
    daemon.start()
    wait_until(lambda: daemon.status()["instances"], 20, "the engine registers")
    names = (f"b{i}" for i in range(1000))
    wait_until(lambda: engine.generate(next(names), prompt(2, 70)) and daemon.status()["l1"]["chunks"], 20)


def test_a_worker_that_could_not_register_answers_for_every_load(stored, make_engine, asynchronous):
    """Its scheduler gets hits, because an engine of the same id and incarnation is registered in the daemon."""

    def same_incarnation(config, caches):
        config.instance_id = "one-incarnation"

    daemon = stored()
    make_engine(daemon, engine_id="twin", adjust=same_incarnation)
    engine = make_engine(daemon, engine_id="twin", adjust=same_incarnation, register=False, asynchronous=asynchronous)
    engine.generate("warm", TOKENS)
    assert len(engine.loads) == 1
    assert engine.received == ["warm"]


# ---- it refuses -------------------------------------------------------------------------------


def test_a_load_that_is_refused_is_over_at_once(stored, make_engine, make_tap):
    """Also if the daemon refused it before it knew the load's word."""
    tap = make_tap(stored())
    tap.instead = lambda message: Error(code="internal", message="no") if isinstance(message, Retrieve) else None
    engine = make_engine(tap.endpoint, extra={"kvserver.load_timeout_ms": 60_000})
    engine.generate("warm", TOKENS, seconds=10)
    assert len(engine.loads) == 1
    assert engine.received == ["warm"]


def test_a_load_that_was_given_up_is_never_begun(stored, make_engine, make_tap):
    """Whenever its message arrives, and whatever deadline is in it: its state word reads cancelled."""
    daemon = stored()
    tap = make_tap(daemon)
    tap.instead = lambda message: Stored(stored=0, skipped=0) if isinstance(message, Retrieve) else None  # goes astray
    engine = make_engine(tap.endpoint, extra={"kvserver.load_timeout_ms": 100})
    answer = engine.add("warm", TOKENS)
    engine.run(until=lambda: engine.received == ["warm"])
    (load,) = tap.of(Retrieve)
    late = msgspec.structs.replace(load, deadline_ns=time.monotonic_ns() + 10**10)
    with Client(daemon.endpoint, 5) as client, pytest.raises(RequestFailed) as refused:
        client.ask(late, Retrieved)
    assert refused.value.code == "cancelled"
    engine.run()
    assert answer.right


# ---- it dies ----------------------------------------------------------------------------------


def test_request_is_computed_when_its_daemon_is_killed_between_lookup_and_load(stored, make_engine, asynchronous):
    daemon = stored()
    engine = make_engine(daemon, asynchronous=asynchronous)
    engine.before_step = lambda plan: daemon.kill() if plan.loads else None
    engine.generate("warm", TOKENS)
    assert engine.received == ["warm"]


def test_cleared_between_lookup_and_load(stored, make_engine, asynchronous):
    """What the load did not bring is computed, and stored again."""
    daemon = stored()
    engine = make_engine(daemon, asynchronous=asynchronous)

    def clear(plan):
        if plan.loads:
            daemon.http("/cache/clear", "POST")

    engine.before_step = clear
    engine.generate("warm", TOKENS)
    assert engine.worker.worker.counters["load_failures"] == 1
    assert make_engine(daemon).generate("again", TOKENS).external == 4 * CHUNK


def test_request_is_computed_when_its_daemon_restarts_between_lookup_and_load(stored, make_engine):
    daemon = stored()
    engine = make_engine(daemon)

    def restart(plan):
        if plan.loads:
            daemon.kill()
            daemon.start()

    engine.before_step = restart
    engine.generate("warm", TOKENS)
    assert engine.received == ["warm"]


def test_request_is_computed_when_its_daemon_is_killed_during_the_load(stored, make_engine, asynchronous):
    daemon = stored(pauses=True)
    engine = make_engine(daemon, asynchronous=asynchronous)
    with daemon.paused_copies():
        answer = engine.begin_load("warm", TOKENS)
        daemon.kill()
    engine.run()
    assert answer.right
    assert engine.received == ["warm"]


def test_pending_store_ends_when_its_daemon_is_killed(make_daemon, make_engine):
    daemon = make_daemon(pauses=True)
    engine = make_engine(daemon)
    with daemon.paused_copies():
        answer = engine.add("r", TOKENS, count=1)
        engine.run(until=lambda: answer.finish_reason is not None)
        assert engine.connector.has_pending_push_work()
        daemon.kill()
    engine.run()
    assert not engine.connector.has_pending_push_work()


def test_after_a_restart_the_engine_stores_and_loads_again(stored, make_engine):
    daemon = stored()
    engine = make_engine(daemon)
    assert engine.generate("warm", TOKENS).external == 4 * CHUNK
    daemon.kill()
    engine.generate("alone", prompt(2, 3 * CHUNK))
    daemon.start()
    wait_until(lambda: any(i["namespace"] for i in daemon.status()["instances"]), 20, "registered again")
    names = (f"r{i}" for i in range(1000))
    wait_until(lambda: engine.generate(next(names), prompt(3, 2 * CHUNK)) and daemon.status()["l1"]["chunks"], 20)
    assert make_engine(daemon).generate("other", prompt(3, 2 * CHUNK)).external > CHUNK


def test_a_process_with_thousands_of_descriptors_is_served(stored, make_engine):
    """A real engine has them: sockets of its clients, pipes of its workers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip(f"no more than {hard} descriptors are allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    daemon = stored()
    taken = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        engine = make_engine(daemon)
        assert engine.generate("warm", TOKENS).external == 4 * CHUNK
        daemon.kill()
        daemon.start()
        wait_until(lambda: len(daemon.status()["instances"]) == 2, 20, "both engines register again")
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# ---- it hangs ---------------------------------------------------------------------------------


def test_stopped_during_a_load(stored, make_engine, asynchronous):
    """The blocks that the daemon may still write stay out of use until it runs again and reports that it has ended."""
    daemon = stored(pauses=True)
    engine = make_engine(daemon, asynchronous=asynchronous, num_blocks=60, extra={"kvserver.load_timeout_ms": 800})
    with daemon.paused_copies():
        answer = engine.begin_load("warm", TOKENS)
        quarantined = set(ids_of(engine.loads[0]))
        daemon.freeze()
    engine.lose_patience()
    engine.run(until=lambda: answer.finish_reason is not None)
    assert answer.right
    assert engine.received == ["warm"]

    used = engine.use_free_blocks(6)
    assert len(used) >= 35
    assert not used & quarantined
    assert engine.free_blocks == 59 - len(quarantined)
    daemon.thaw()
    wait_until(lambda: engine.step() or engine.generate_free("tick") == 59, 10, "the blocks come back")
    assert engine.use_free_blocks(6) & quarantined
    assert engine.received == ["warm", *engine.received[1:]]
    daemon.wait_for_accounting(tickets=0, pins=0)


def test_aborted_while_the_daemon_is_stopped_in_its_load(stored, make_engine):
    daemon = stored(pauses=True)
    engine = make_engine(daemon, extra={"kvserver.load_timeout_ms": 800})
    with daemon.paused_copies():
        engine.begin_load("warm", TOKENS)
        daemon.freeze()
    engine.abort("warm")
    engine.run(until=lambda: engine.received == ["warm"])
    assert engine.free_blocks == 99 - len(ids_of(engine.loads[0]))
    daemon.thaw()
    wait_until(lambda: engine.generate_free("tick") == 99, 10, "the blocks come back")


def test_daemon_stopped_before_a_load_began_keeps_no_block_out_of_use(stored, make_engine):
    """Cancelled while PENDING: the daemon will not touch a byte, so that the blocks are free at once."""
    daemon = stored()
    engine = make_engine(daemon, extra={"kvserver.load_timeout_ms": 100, "kvserver.store_timeout_ms": 300})

    def freeze(plan):
        if plan.loads:
            daemon.freeze()
            engine.lose_patience()

    engine.before_step = freeze
    engine.generate("warm", TOKENS)
    assert engine.received == ["warm"]
    daemon.thaw()
    engine.generate("next", prompt(5, 3 * CHUNK))


def test_store_of_a_stopped_daemon_publishes_no_bytes_of_reused_blocks(make_daemon, make_engine):
    daemon = make_daemon(pauses=True)
    engine = make_engine(daemon, num_blocks=24, extra=IMPATIENT)
    with daemon.paused_copies():
        answer = engine.add("r", TOKENS, count=1)
        engine.run(until=lambda: answer.finish_reason is not None and bool(engine.stores))
        daemon.wait_for_a_copy()
        daemon.freeze()
    for i in range(3):
        other = engine.add(f"other{i}", prompt(50 + i, 300))
        engine.run(until=lambda other=other: other.finish_reason is not None)
        assert other.right
    daemon.thaw()
    engine.run()
    make_engine(daemon).generate("warm", TOKENS)
    for i in range(3):
        make_engine(daemon).generate("warm", prompt(50 + i, 300))


@pytest.mark.parametrize("when", ["lookup", "load", "running"])
def test_an_aborted_request_leaves_nothing_behind(stored, make_engine, asynchronous, when):
    daemon = stored(pauses=True)
    engine = make_engine(daemon, asynchronous=asynchronous)
    with daemon.paused_copies():
        if when == "lookup":
            daemon.freeze()
            engine.add("warm", TOKENS)
            engine.step()
            assert engine.status_of("warm") == "WAITING"
        elif when == "load":
            engine.begin_load("warm", TOKENS)
        else:
            answer = engine.add("warm", prompt(9, 5 * CHUNK), count=50)
            engine.run(until=lambda: len(answer.tokens) >= 4)
            assert engine.connector.has_pending_push_work()
        engine.abort("warm")
        engine.step()  # which gives up a load, or a store
    daemon.thaw()
    engine.run()
    assert engine.received == (["warm"] if when == "load" else [])
    answer = engine.generate("next", TOKENS)
    assert answer.local + answer.external == 4 * CHUNK
    engine.generate("tick", prompt(8, 5))
    daemon.wait_for_accounting(tickets=0, pins=0, leases=0)


# ---- what waiting costs -----------------------------------------------------------------------


def test_a_hung_daemon_costs_a_millisecond_per_pass_and_nothing_once_the_breaker_is_open(
    stored, make_engine, caplog, monkeypatch
):
    daemon = stored()
    engine = make_engine(daemon, extra={"kvserver.store_timeout_ms": 500, **IMPATIENT})
    daemon.freeze()
    waited = [0.0]  # seconds, by pass; no answer ends a wait
    wait = Dispatcher.wait

    def recorded(dispatcher: Dispatcher, seconds: float) -> bool:
        waited[-1] += seconds
        return wait(dispatcher, seconds)

    monkeypatch.setattr(Dispatcher, "wait", recorded)
    engine.after_step = lambda plan: waited.append(0.0)
    answers = [engine.add(f"r{i}", prompt(60 + i, 2 * CHUNK)) for i in range(4)]
    engine.run()
    assert all(answer.right for answer in answers)
    assert 0 < max(waited) < 0.002, "the four requests share the millisecond"

    engine.generate("opens", prompt(70, 2 * CHUNK))
    assert "does not answer" in caplog.text
    half = engine.connector.scheduler
    sent = half.counters["lookups"]
    waited.clear()
    waited.append(0.0)
    engine.generate("open", prompt(71, 2 * CHUNK))
    assert (half.counters["lookups"], max(waited)) == (sent, 0.0)

    names = (f"again{i}" for i in range(10_000))
    caplog.set_level(logging.INFO)
    daemon.thaw()
    wait_until(lambda: engine.generate(next(names), prompt(72, 5)) and "answers again" in caplog.text, 20)
    assert engine.generate("warm", TOKENS).external == 4 * CHUNK
    assert continuation(TOKENS, 4) == engine.answers["warm"].tokens
