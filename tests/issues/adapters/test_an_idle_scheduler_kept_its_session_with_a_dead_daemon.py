"""The scheduler half learned of another daemon by a refused message alone. An idle one kept the dead daemon's chunk size and features, and a
request in progress was looked up again once it knew. Where the next daemon followed within a second, and a full state
of the blocks was due, the daemon refused nothing: the engine kept the former session for good.
"""

from __future__ import annotations

import logging

from made_up_model import prompt
from reconnect import connected
from support.daemon import wait_until

FORMER, NEXT = 256, 64  # tokens of a chunk
SHORT = prompt(1, NEXT + 1)  # of one chunk of the next daemon, and of none of the former


def test_the_first_request_after_a_restart_is_looked_up_and_stored_as_the_next_daemon_has_it(
    make_daemon, make_engine, caplog
):
    caplog.set_level(logging.INFO, "vllm.kvserver")
    former = make_daemon(chunk_tokens=FORMER)
    engines = [make_engine(former) for _ in range(2)]
    for engine in engines:
        engine.generate("before", prompt(2, FORMER))
    former.kill()
    daemon = make_daemon(chunk_tokens=NEXT, endpoint=former.endpoint)
    for half in ("worker 0", "scheduler"):
        wait_until(lambda half=half: connected(caplog, daemon, half) >= len(engines), 20, "no half was at work")
    writer, reader = engines
    writer.generate("short", SHORT)
    assert reader.generate("short", SHORT).external == NEXT
