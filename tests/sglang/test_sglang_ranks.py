"""Engines of two ranks, each with a scheduler of its own: all decide alike, also where one rank's load fails."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import Engines
from sglang_engines import PAGE
from support.daemon import wait_until
from test_sglang_outputs import Make, Start, cached, same

pytestmark = pytest.mark.long
PAIR: dict[str, Any] = {"tp_size": 2, "environ": {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}}


def test_two_ranks_load_what_two_ranks_stored(engines: Engines, start_daemon: Start, prompt: Make) -> None:
    """The control is the engine warm from its own cache."""
    pair = engines.get("pair", **PAIR)
    daemon = start_daemon(pair)
    text = prompt(1, 700)
    cold, own = pair.generate([text])[0], pair.generate([text])[0]
    wait_until(lambda: daemon.status()["l1"]["chunks"] >= 700 // PAGE, 20, "stores")
    pair.flush()
    warm = pair.generate([text])[0]
    assert [found["cached_tokens"] for found in (cold, own, warm)] == [0, cached(700), cached(700)]
    assert same(warm, own)
    assert warm["tokens"] == cold["tokens"]
    assert [len(instance["workers"]) for instance in daemon.status()["instances"]] == [2]
    assert daemon.status()["totals"]["failed_loads"] == 0


def test_a_load_that_fails_on_one_rank_is_computed_on_all(engines: Engines, start_daemon: Start, prompt: Make) -> None:
    engines.end("pair")
    pair = engines.get("failing pair", linker=("failing_rank", "FailingRank"), **PAIR)
    daemon = start_daemon(pair)
    texts = [prompt(10 + n, 500) for n in range(3)]
    cold = [pair.generate([text])[0] for text in texts]
    wait_until(lambda: daemon.status()["l1"]["chunks"] >= 3 * (500 // PAGE), 20, "stores")
    pair.flush()
    warm = [pair.generate([text])[0] for text in texts]
    assert [found["cached_tokens"] for found in warm] == [0, 0, 0]
    assert [found["tokens"] for found in warm] == [found["tokens"] for found in cold]
    assert daemon.status()["totals"]["loaded_bytes"] > 0, "rank 0 has loaded"


def test_a_rank_that_is_refused_alone_costs_hits_only(engines: Engines, start_daemon: Start, prompt: Make) -> None:
    engines.end("failing pair")
    pair = engines.get("refused pair", linker=("failing_rank", "RefusedRank"), **PAIR)
    start_daemon()
    pair.wait_ready()
    text = prompt(20, 500)
    cold = pair.generate([text])[0]
    pair.flush()
    warm = pair.generate([text])[0]
    assert [found["cached_tokens"] for found in (cold, warm)] == [0, 0]
    assert warm["tokens"] == cold["tokens"]
    assert pair.log.read_text().count("this engine runs without cache: a test") == 1
