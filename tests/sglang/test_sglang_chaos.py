"""Daemons are stopped and killed under an engine's load, again and again: no request fails, and no token changes."""

from __future__ import annotations

import random
import time

import pytest
from conftest import Engines
from test_sglang_failures import hits_come_back, victim
from test_sglang_outputs import Make, Start

pytestmark = pytest.mark.long
STOPS, KILLS = 20, 10


def test_stops_and_kills_under_load_change_no_token(engines: Engines, start_daemon: Start, prompt: Make) -> None:
    engine = victim(engines).wait_ready()
    stem = prompt(1, 400)
    texts = [stem + prompt(2 + n, 50 + 130 * n) for n in range(6)]
    reference = [engine.generate([text], 8)[0]["tokens"] for text in texts]  # no daemon
    engine.flush()
    daemon = start_daemon(engine)
    source = random.Random(0)
    events = ["stop"] * STOPS + ["kill"] * KILLS
    source.shuffle(events)
    hits = 0
    for number, event in enumerate(events):
        chosen = source.sample(range(len(texts)), 4)
        engine.send("generate", prompts=[texts[i] for i in chosen], max_tokens=8)
        time.sleep(source.uniform(0, 0.4))
        if event == "stop":
            daemon.freeze()
            time.sleep(source.uniform(0.05, 0.5))
            daemon.thaw()
        else:
            daemon.kill()
            daemon = start_daemon(engine)
        outputs = engine.receive()["outputs"]
        assert [output["tokens"] for output in outputs] == [reference[i] for i in chosen], f"event {number}: {event}"
        hits += sum(output["cached_tokens"] > 0 for output in outputs)
        if number % 2:
            engine.flush()
    assert hits > 0
    engine.flush()
    hits_come_back(engine, daemon, prompt(100, 300))
