"""Sleep takes the KV cache's memory away: before that the daemon must have let go of it."""

from __future__ import annotations

import logging

import pytest
from late_gpu import LateGpu
from made_up_model import prompt
from support.daemon import wait_until

from kvserver.adapters.vllm.connector import StillWritten

CHUNK = 64
TOKENS = prompt(1, 4 * CHUNK + 10)


def sleep(engine) -> None:
    """As vLLM 0.33's workers do, which are idle then."""
    for runner in engine.runners:
        runner.connector.unregister_kv_caches()


def wake(engine) -> None:
    for runner in engine.runners:
        runner.connector.restore_kv_caches()


@pytest.mark.parametrize("late", [False, True], ids=["direct", "ordered"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_after_unregistering_the_daemon_maps_nothing_and_after_restoring_it_serves(
    make_daemon, make_forgetful_engine, ranks, late
):
    daemon = make_daemon()
    engine = make_forgetful_engine(daemon, world_size=ranks, gpu=LateGpu() if late else None)
    engine.generate("cold", TOKENS)
    sleep(engine)
    assert daemon.accounting()["mappings"] == 0
    sleep(engine)
    assert engine.scheduler.reset_prefix_cache()
    assert engine.generate("asleep", TOKENS).external == 0
    assert engine.scheduler.reset_prefix_cache()
    wake(engine)
    wake(engine)
    assert daemon.accounting()["mappings"] == 2 * ranks
    assert engine.generate("warm", TOKENS).external == 4 * CHUNK
    more = prompt(2, 3 * CHUNK)
    engine.generate("more", more)
    assert make_forgetful_engine(daemon, world_size=ranks).generate("other", more).external > 0


def test_restoring_what_was_never_unregistered_changes_nothing(make_daemon, make_engine):
    daemon = make_daemon()
    engine = make_engine(daemon, register=False)
    wake(engine)
    assert daemon.status()["instances"] == []


def test_a_store_in_flight_is_cancelled(make_daemon, make_engine):
    daemon = make_daemon(copy_delay_us=50_000)
    engine = make_engine(daemon)
    answer = engine.add("r", TOKENS, count=1)
    engine.run(until=lambda: answer.finish_reason is not None)
    assert engine.connector.has_pending_push_work()
    sleep(engine)
    assert daemon.accounting()["mappings"] == 0
    engine.run()
    wake(engine)
    assert make_engine(daemon).generate("warm", TOKENS).external == 0


def test_a_load_in_flight_fails_its_request_which_is_computed(make_daemon, make_engine):
    daemon = make_daemon(copy_delay_us=50_000)
    make_engine(daemon).generate("cold", TOKENS)
    engine = make_engine(daemon)
    answer = engine.begin_load("warm", TOKENS)
    sleep(engine)
    assert daemon.accounting()["mappings"] == 2, "the other engine's"
    engine.run()
    assert answer.right
    assert engine.received == ["warm"]


def test_a_hung_daemon_holds_up_sleep_until_its_deadline_only(make_daemon, make_forgetful_engine, caplog):
    daemon = make_daemon()
    engine = make_forgetful_engine(daemon, extra={"kvserver.unregister_timeout_ms": 100})
    engine.generate("cold", TOKENS)
    daemon.freeze()
    caplog.set_level(logging.WARNING, "vllm.kvserver")
    sleep(engine)
    assert "did not close its mappings of the KV cache within 0.1 s" in caplog.text
    daemon.thaw()
    daemon.wait_for_accounting(mappings=0)
    wake(engine)
    assert engine.scheduler.reset_prefix_cache()
    wait_until(lambda: daemon.accounting()["mappings"] == 2, 20, "registered again")
    assert engine.generate("warm", TOKENS).external == 4 * CHUNK


def test_sleep_fails_while_a_hung_daemon_may_write(make_daemon, make_engine):
    daemon = make_daemon(pauses=True)
    make_engine(daemon).generate("cold", TOKENS)
    # Longer than the link waits for one answer.
    extra = {"kvserver.unregister_timeout_ms": 1500, "kvserver.load_timeout_ms": 800}
    engine = make_engine(daemon, extra=extra)
    with daemon.paused_copies():
        answer = engine.begin_load("warm", TOKENS)
        daemon.freeze()
    engine.lose_patience()
    with pytest.raises(StillWritten, match="may still write"):
        sleep(engine)
    engine.run(until=lambda: answer.finish_reason is not None)
    assert answer.right
    with pytest.raises(StillWritten):
        sleep(engine)
    assert engine.free_blocks < 99, "what may be written stays out of use"
    daemon.thaw()
    daemon.wait_for_accounting(mappings=2)
    sleep(engine)
    wait_until(lambda: engine.generate_free("tick") == 99, 10, "the blocks come back")


def test_a_load_that_a_hung_daemon_has_not_read_writes_nothing_after_sleep(make_daemon, make_engine):
    daemon = make_daemon()
    make_engine(daemon).generate("cold", TOKENS)
    extra = {"kvserver.unregister_timeout_ms": 200, "kvserver.load_timeout_ms": 60_000}
    engine = make_engine(daemon, extra=extra)
    engine.before_step = lambda plan: daemon.freeze() if plan.loads else None
    answer = engine.add("warm", TOKENS)
    engine.run(until=lambda: bool(engine.loads))
    engine.before_step = lambda plan: None
    sleep(engine)
    for kv in engine.runners[0].kv:
        kv[...] = 7  # as another user's
    daemon.thaw()
    daemon.wait_for_accounting(mappings=2)
    assert all((kv == 7).all() for kv in engine.runners[0].kv)
    engine.run()
    assert answer.right
