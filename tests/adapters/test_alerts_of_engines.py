"""Alerts about an engine fire on the metrics that vLLM's own front end exports of it: beside a daemon that is missing, hangs or is killed."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import pytest
from front_end import FrontEnd, exposition, watches
from made_up_model import prompt
from modelless import Engine
from support.daemon import wait_until
from support.promtool import firing

from kvserver.adapters.vllm.scheduler import SchedulerHalf

pytestmark = pytest.mark.long
TOKENS = prompt(1, 200)


@contextlib.contextmanager
def front_of(engine: Engine) -> Iterator[FrontEnd]:
    """As vLLM makes it when the engine has started; its thread ends with it."""
    front = FrontEnd(engine)
    try:
        yield front
    finally:
        front.close()
        del front
        gc.collect()
        wait_until(lambda: not watches(), 5, "the threads ended")


def test_an_engine_that_finds_no_daemon_is_without_cache(make_engine, tmp_path):
    with front_of(make_engine("ipc:///nobody/there", register=False)) as front:
        assert not front.connected
        firing(tmp_path, {"KVServerEngineWithoutCache"}, exposition(), exposition())


def test_an_engine_whose_daemon_hangs_opens_its_breaker(make_daemon, make_engine, tmp_path):
    daemon = make_daemon()
    engine = make_engine(daemon, extra={"kvserver.lookup_timeout_ms": 20, "kvserver.store_timeout_ms": 200})
    with front_of(engine) as front:
        wait_until(lambda: front.connected)
        before = exposition()
        daemon.freeze()
        for number in range(5):
            engine.generate(f"r{number}", prompt(10 + number, 100))
        front.record_steps()
        wait_until(lambda: front.reason == "breaker_open")
        firing(tmp_path, {"KVServerEngineWithoutCache", "KVServerBreakerOpen"}, before, exposition())
        daemon.thaw()


def test_blocks_of_loads_that_a_hung_daemon_may_write_stay_out_of_use(make_daemon, make_engine, tmp_path):
    daemon = make_daemon(pauses=True)
    make_engine(daemon).generate("cold", TOKENS)
    engine = make_engine(daemon, num_blocks=40, extra={"kvserver.load_timeout_ms": 800})
    with front_of(engine) as front:
        wait_until(lambda: front.connected)
        before = exposition()
        with daemon.paused_copies():
            answer = engine.begin_load("warm", TOKENS)
            daemon.freeze()
        engine.lose_patience()
        engine.run(until=lambda: answer.finish_reason is not None)
        front.record_steps()
        wait_until(lambda: not front.connected)
        firing(tmp_path, {"KVServerEngineWithoutCache", "KVServerQuarantinedBlocks"}, before, exposition())
        daemon.thaw()
        wait_until(lambda: engine.generate_free("tick") == 39, 10, "the blocks come back")


def test_an_engine_whose_daemon_was_killed_cannot_send(make_daemon, make_engine, caplog, tmp_path):
    daemon = make_daemon()
    engine = make_engine(daemon)
    with front_of(engine) as front:
        wait_until(lambda: front.connected)
        before = exposition()

        def kill(plan):
            if plan.stores and daemon.running():
                daemon.kill()
                wait_until(lambda: "worker 0: running without cache" in caplog.text, what="the worker noticed")

        engine.before_step = kill
        engine.generate("a", TOKENS)
        front.record_steps()
        wait_until(lambda: not front.connected)
        firing(tmp_path, {"KVServerEngineWithoutCache", "KVServerUnsent"}, before, exposition())


def test_connector_that_raises_alerts_as_an_engine_fault(make_daemon, make_engine, monkeypatch, tmp_path):
    engine = make_engine(make_daemon(), may_fail=True)
    with front_of(engine) as front:
        wait_until(lambda: front.connected)
        before = exposition()
        monkeypatch.setattr(SchedulerHalf, "new_request", lambda *_: 1 / 0)
        engine.generate("a", TOKENS)
        front.record_steps()
        firing(tmp_path, {"KVServerEngineFaults"}, before, exposition())
