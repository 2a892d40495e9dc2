"""The daemon is stopped for a moment or killed, at any moment of an engine's requests, again and again: its tokens stay right.

`adapters/test_random.py` has the same without a model, daily.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
from engines import Engine, Engines, Prompt
from support.daemon import Daemon

PROMPTS = 5
STOPS, KILLS = 55, 25
SECONDS = 0.6  # of one stop at most: some outlast a lookup, none a load


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
def test_tokens_stay_right_while_the_daemon_is_stopped_and_killed(
    first: Engine, engines: Engines, start_daemon: Callable[..., Daemon], prompt: Callable[..., Prompt], seed: int
) -> None:
    chance = random.Random(seed)
    texts = [prompt(1000 * seed + n, 280 + 140 * n) for n in range(PROMPTS)]
    alone = [first.generate([text], 8)[0]["tokens"] for text in texts]  # no daemon: the reference
    first.forget()
    daemon = start_daemon(copy_delay_us=300, copy_threads=1)
    stops = kills = hits = 0
    while stops < STOPS or kills < KILLS:
        asked = chance.sample(range(PROMPTS), chance.randint(1, 3))
        first.send("generate", prompts=[texts[n] for n in asked], max_tokens=8)
        for _ in range(chance.randint(1, 3)):
            time.sleep(chance.uniform(0, 0.3))
            if chance.random() < 0.7:
                daemon.freeze()
                time.sleep(chance.uniform(0, SECONDS))
                daemon.thaw()
                stops += 1
            else:
                daemon.kill()
                daemon.start()
                kills += 1
        outputs = first.receive()["outputs"]
        assert [o["tokens"] for o in outputs] == [alone[n] for n in asked]
        hits += sum(o["cached_tokens"] > 0 for o in outputs)
        if chance.random() < 0.3:
            engines.wait_registered(daemon)
        first.wait_for_stores()
        first.forget()  # so that only the daemon gives hits
    engines.wait_registered(daemon)
    counters = first.counters()
    failed_loads = counters["worker"].get("load_failures", 0)
    print(f"seed {seed}: {stops} stops, {kills} kills, {hits} hits, {failed_loads} failed loads")
    assert hits > 5
    assert (counters["errors"], counters["blocks_in_use"]) == ({}, 0)
    assert "a fault in" not in first.log.read_text()
