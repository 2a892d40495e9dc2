"""A daemon with --l1-file is restarted under an engine that computes: its tokens stay right, and the next requests hit as before."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from engines import Engine, Engines, Prompt
from support.daemon import Daemon, wait_until

PROMPTS = 3


@pytest.mark.parametrize("restarts", [2, pytest.param(50, marks=pytest.mark.long)])
def test_restarts_of_the_daemon_under_load_keep_tokens_and_hits(
    first: Engine,
    engines: Engines,
    start_daemon: Callable[..., Daemon],
    prompt: Callable[..., Prompt],
    l1_file: Path,
    restarts: int,
) -> None:
    chance = random.Random(restarts)
    texts = [prompt(7000 + n, 300 + 260 * n) for n in range(PROMPTS)]
    alone = [first.generate([text], 8)[0]["tokens"] for text in texts]  # no daemon: the reference
    first.forget()
    daemon = start_daemon(l1_file=l1_file, copy_delay_us=300, copy_threads=1)
    first.generate(texts, 8)
    first.wait_for_stores(120)
    first.forget()
    before = [output["cached_tokens"] for output in first.generate(texts, 8)]
    assert all(before)
    for number in range(restarts):
        first.forget()
        asked = chance.sample(range(PROMPTS), 2)
        new = prompt(9000 + number, 300)
        first.send("generate", prompts=[*(texts[n] for n in asked), new], max_tokens=8)
        time.sleep(chance.uniform(0, 0.4))
        assert daemon.terminate() == 0, daemon.log
        (daemon.folder / "log").unlink()
        daemon.start()
        outputs = first.receive()["outputs"]
        assert [output["tokens"] for output in outputs[:-1]] == [alone[n] for n in asked]
        wait_until(lambda: "L1 kept" in daemon.log, seconds=120, what="L1 is adopted")
        engines.wait_registered(daemon)
        first.wait_for_stores(120)
        first.forget()  # so that only the daemon gives hits
        outputs = first.generate(texts, 8)
        assert [output["tokens"] for output in outputs] == alone
        assert [output["cached_tokens"] for output in outputs] == before, f"restart {number}"
    counters = first.counters()
    assert counters["errors"] == {}
    assert "a fault in" not in first.log.read_text()
    daemon.audit()
