"""A scheduler half that learned of another daemon had no session before its Hello was answered: each request meanwhile was a miss."""

from __future__ import annotations

import time

from made_up_model import prompt
from support.daemon import wait_until

from kvserver.adapters.common import link
from kvserver.protocol.client import WatchedClient

CHUNK = 64
PROMPTS = [prompt(100 + i, CHUNK + 1) for i in range(60)]
PAUSE_SECONDS = 0.4


def test_requests_that_come_while_the_next_daemon_is_greeted_find_what_it_has(
    make_daemon, make_engine, make_tap, monkeypatch
):
    """Behind a proxy, whose connection does not end: only a refused message shows that the daemon is another one."""
    daemon = make_daemon(chunk_tokens=CHUNK)
    engine = make_engine(make_tap(daemon).endpoint)
    engine.generate("before", prompt(1, CHUNK))
    daemon.kill()
    daemon.start()
    wait_until(lambda: len(daemon.status()["instances"]) == 1, 20, "the engine's worker registers")
    other = make_engine(daemon)
    for i, tokens in enumerate(PROMPTS):
        other.generate(f"cold{i}", tokens)

    greeted = []

    class SlowClient(WatchedClient):
        def hello(self, name):
            time.sleep(PAUSE_SECONDS)
            greeted.append(name)
            return super().hello(name)

    monkeypatch.setattr(link, "Client", SlowClient)
    monkeypatch.setattr(link, "WatchedClient", SlowClient)
    found = []
    for i, tokens in enumerate(PROMPTS):
        found.append(engine.generate(f"warm{i}", tokens).external)
        time.sleep(0.03)
    assert "scheduler" in greeted, "it learned of the other daemon"
    assert found == [CHUNK] * len(PROMPTS)
