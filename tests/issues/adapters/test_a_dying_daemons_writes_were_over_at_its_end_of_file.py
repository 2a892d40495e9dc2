"""A process that is killed closes its sockets before its last files: a GPU may still work for it then. The adapter took the end of
the lifeline for the end of every write, and freed blocks that a running load still wrote.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
from made_up_model import prompt
from support import dying_daemon
from support.daemon import WITH_SIMULATED, wait_until

from kvserver.adapters.common.specs import ids_of
from kvserver.protocol import Unregistered, UnregisterWorker
from kvserver.protocol.client import Client

TOKENS = prompt(1, 4 * 64 + 10)
PROGRAM = (WITH_SIMULATED[0], dying_daemon.__file__)


@pytest.fixture
def begun(make_daemon, make_engine):
    """(a daemon, an engine whose load it has begun, which will take a second)."""
    daemon = make_daemon(program=PROGRAM, copy_delay_us=100_000)
    make_engine(daemon).generate("cold", TOKENS)
    engine = make_engine(daemon, num_blocks=60, extra={"kvserver.load_timeout_ms": 200})
    engine.begin_load("warm", TOKENS)
    return daemon, engine


def test_blocks_of_a_load_stay_out_of_use_until_the_process_has_ended(begun):
    daemon, engine = begun
    quarantined = set(ids_of(engine.loads[0]))
    os.kill(daemon.pid, signal.SIGRTMIN)
    answer = engine.answers["warm"]
    engine.run(until=lambda: answer.finish_reason is not None)
    assert answer.right
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        assert not engine.use_free_blocks(6) & quarantined
    daemon.kill()
    wait_until(lambda: engine.generate_free("tick") == 59, 10, "the blocks come back")
    assert engine.use_free_blocks(6) & quarantined
    daemon.start()
    wait_until(lambda: any(i["namespace"] for i in daemon.status()["instances"]), 20, "registered again")
    engine.run()


def test_a_connection_that_the_daemon_gives_up_ends_its_copies_at_once(begun):
    """The daemon runs on, but has nothing of the worker's memory mapped any more, and reports that."""
    daemon, engine = begun
    with Client(daemon.endpoint) as client:
        boot_id = client.hello().boot_id
        client.ask(UnregisterWorker(boot_id=boot_id, registration=2), Unregistered)
    engine.run(seconds=5)
    assert engine.answers["warm"].right
    wait_until(lambda: len(daemon.status()["instances"]) == 2, 5, "registered again")
    assert engine.generate("next", prompt(7, 100)).right
