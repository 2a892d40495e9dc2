"""Lookups that waited for room while the daemon was replaced raised in the pass that noticed it, which then stored nothing."""

from __future__ import annotations

from made_up_model import prompt
from support.daemon import wait_until

from kvserver.adapters.common.lookups import MOST_IN_FLIGHT

CHUNK = 64
MOST_RUNNING = 16


def test_lookups_that_wait_are_void_with_their_session(make_daemon, make_engine):
    daemon = make_daemon(chunk_tokens=CHUNK)
    engine = make_engine(daemon, num_blocks=400)
    running = [engine.add(f"run{i}", prompt(i, CHUNK), count=200) for i in range(MOST_RUNNING)]
    engine.run(until=lambda: all(answer.tokens for answer in running))  # vLLM schedules no other while they run
    daemon.freeze()
    late = [engine.add(f"late{i}", prompt(1000 + i, CHUNK + 1), count=1) for i in range(MOST_IN_FLIGHT + 50)]
    daemon.kill()
    daemon.start()
    wait_until(lambda: engine.connector.scheduler.connected, 10, "the scheduler half has the next daemon")
    engine.run(60)
    assert engine.errors() == {}
    assert all(answer.right for answer in running + late)
