"""What a former daemon was given must be given to the next one too, in chunks of its size: no test noticed a session that was not begun anew."""

from __future__ import annotations

import pytest
from made_up_model import prompt
from reconnect import replace_daemon, restart, step_until_known
from support.daemon import wait_until

from kvserver.protocol import Cleared, EndRequest, Error, Lookup, ReportBlockAllocations

CHUNK = 64
TOKENS = prompt(1, 3 * CHUNK + 10)
NOTICES = (ReportBlockAllocations, EndRequest)


@pytest.mark.parametrize("steps", [0, 20], ids=["unnoticed", "noticed"])
def test_a_running_requests_first_chunks_are_stored_again(make_daemon, make_engine, caplog, steps):
    """Also where a report could not be sent meanwhile: a full state follows, of which no daemon complains."""
    daemon = make_daemon(chunk_tokens=CHUNK)
    engine = make_engine(daemon)
    answer = engine.add("long", TOKENS, count=6 * CHUNK)
    engine.run(until=lambda: len(answer.tokens) > 10)
    wait_until(lambda: daemon.status()["l1"]["chunks"] == 3)
    replace_daemon(daemon, engine, caplog, steps)
    engine.run()
    assert answer.right
    wait_until(lambda: engine.generate_free("r") and not engine.connector.has_pending_push_work())
    assert make_engine(daemon).generate("warm", TOKENS + answer.tokens[:CHUNK]).external == 4 * CHUNK


def test_a_daemon_that_does_not_know_the_instance_is_another_one(make_daemon, make_tap, make_engine, caplog):
    """Where nothing but its refusal of a lookup shows that."""
    daemon = make_daemon(chunk_tokens=CHUNK)
    tap = make_tap(daemon)
    engine = make_engine(tap.endpoint)
    answer = engine.add("long", TOKENS, count=6 * CHUNK)
    tap.instead = lambda message: Cleared(chunks=0) if isinstance(message, NOTICES) else None
    engine.run(until=lambda: len(answer.tokens) > 10)
    wait_until(lambda: daemon.status()["l1"]["chunks"] == 3)
    restart(daemon, caplog)
    unknown = Error(code="unknown_instance", message="its workers come later")
    tap.instead = lambda message: (
        Cleared(chunks=0) if isinstance(message, NOTICES) else unknown if isinstance(message, Lookup) else None
    )
    engine.add("other", prompt(3, CHUNK + 1))
    step_until_known(daemon, engine, caplog)
    assert engine.connector.scheduler.counters["refused_unknown_instance"] > 0
    engine.run()
    assert answer.right
    wait_until(lambda: engine.generate_free("r") and not engine.connector.has_pending_push_work())
    assert make_engine(daemon).generate("warm", TOKENS + answer.tokens[:CHUNK]).external == 4 * CHUNK


def test_a_daemon_with_chunks_of_another_size_is_served(make_daemon, make_tap, make_engine, caplog):
    """Where nothing but its refusal of a lookup, which names another number of blocks, shows that it is another daemon."""
    daemon = make_daemon(chunk_tokens=CHUNK)
    tap = make_tap(daemon)
    tap.instead = lambda message: Cleared(chunks=0) if isinstance(message, NOTICES) else None
    engine = make_engine(tap.endpoint)
    engine.generate("before", prompt(2, 3 * CHUNK))
    daemon.flags["chunk_tokens"] = CHUNK // 2
    restart(daemon, caplog)
    names = (f"r{i}" for i in range(1000))
    wait_until(lambda: engine.generate(next(names), TOKENS) and daemon.status()["l1"]["chunks"], 20)
    assert engine.connector.scheduler.counters["refused_bad_keys"] > 0
    assert make_engine(daemon).generate("warm", TOKENS[: 3 * CHUNK // 2 + 1]).external == 3 * CHUNK // 2
