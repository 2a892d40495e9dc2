"""Two ranks of a real engine (tensor parallelism): each stores and loads its own half of every chunk.

What is wrong with one rank must never show: a chunk is found only when both halves are whole. Engines of
two ranks take longest to start, so the tests share them; the last test kills one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import TIMEOUTS, Engine, Engines, Prompt, engine_group
from support.daemon import Daemon, wait_until
from test_vllm_outputs import zero_l1

from kvserver.adapters.common.failed_loads import SECONDS as FAILED_SECONDS
from kvserver.protocol import Unregistered, UnregisterWorker
from kvserver.protocol.client import Client, RequestFailed

Start = Callable[..., Daemon]
Make = Callable[..., Prompt]
STORE_SECONDS = 3
LOAD_SECONDS = TIMEOUTS["kvserver.load_timeout_ms"] / 1000
TWO_RANKS: dict[str, Any] = {
    "dtype": "float32",
    "extra": TIMEOUTS | {"kvserver.store_timeout_ms": 1000 * STORE_SECONDS},
    "tensor_parallel_size": 2,
    "environ": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
}
MOST_REGISTRATIONS = 64


@pytest.fixture(scope="module")
def engines(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """A group of their own: the engines of other files need not register in these daemons."""
    with engine_group(model, tmp_path_factory.mktemp("ranks")) as group:
        yield group


@pytest.fixture
def pair(engines: Engines) -> Engine:
    return engines.get("pair", **TWO_RANKS)


def ranks_of(daemon: Daemon, engine: Engine) -> list[dict[str, Any]]:
    """Its workers, as the daemon shows them."""
    workers = [worker for instance in daemon.status()["instances"] for worker in instance["workers"]]
    return [worker for worker in workers if group_of(worker["pid"]) == engine.process.pid]


def group_of(pid: int) -> int:
    """The process group, which is an engine's; 0 if the process has ended."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def wait_until_both_copy(daemon: Daemon, engine: Engine) -> None:
    wait_until(lambda: [worker["tickets"] for worker in ranks_of(daemon, engine)] == [1, 1], 20, "both ranks copy")


def end_one_rank(daemon: Daemon) -> None:
    """The registration of the rank that registered first ends as if it had died; the process runs on and registers again.

    REQUIRES: only one engine is registered.
    """
    with Client(daemon.endpoint, timeout=10) as client:
        for number in range(1, MOST_REGISTRATIONS):
            with contextlib.suppress(RequestFailed):  # of a rank that had to register twice
                client.ask(UnregisterWorker(boot_id=daemon.boot_id, registration=number), Unregistered)
                return
    raise AssertionError("no rank is registered")


def wait_until_both_registered(engines: Engines, daemon: Daemon, engine: Engine) -> None:
    wait_until(lambda: len(ranks_of(daemon, engine)) == 2, 20, "both ranks are registered")
    engines.wait_registered(daemon)


def test_one_rank_that_goes_during_a_store_leaves_nothing_half_stored(
    engines: Engines, pair: Engine, start_daemon: Start, prompt: Make
) -> None:
    daemon = start_daemon(copy_delay_us=50_000, copy_threads=2)
    text = prompt(200, 1000)
    pair.send("generate", prompts=[text], max_tokens=16)
    wait_until_both_copy(daemon, pair)
    end_one_rank(daemon)
    cold = pair.receive()["outputs"][0]
    wait_until_both_registered(engines, daemon, pair)
    pair.wait_for_stores()
    assert daemon.status()["totals"]["failed_stores"] == 1, "one rank's half was stored, the other's was not"
    pair.forget()
    again = pair.generate([text])[0]
    assert again["cached_tokens"] == 0, "a chunk without one rank's half was found"
    assert again["tokens"] == cold["tokens"]
    pair.wait_for_stores()
    pair.forget()
    warm = pair.generate([text])[0]
    assert warm["cached_tokens"] == 768, "the missing half was stored later"
    assert warm["tokens"] == cold["tokens"]


def test_one_rank_that_goes_during_a_load_costs_the_hit(
    engines: Engines, pair: Engine, start_daemon: Start, prompt: Make
) -> None:
    daemon = start_daemon(copy_delay_us=50_000, copy_threads=2)
    text = prompt(210, 1000)
    cold = pair.generate([text])[0]
    pair.wait_for_stores()
    pair.forget()
    pair.send("generate", prompts=[text], max_tokens=16)
    wait_until_both_copy(daemon, pair)
    end_one_rank(daemon)
    warm = pair.receive()["outputs"][0]
    assert warm["tokens"] == cold["tokens"]
    assert daemon.status()["totals"]["failed_loads"] == 1
    wait_until_both_registered(engines, daemon, pair)
    time.sleep(FAILED_SECONDS)  # until then the engine tries none of the keys whose load failed
    pair.forget()
    again = pair.generate([text])[0]
    assert (again["cached_tokens"], again["tokens"]) == (768, cold["tokens"]), "it is still there, whole"


def test_one_rank_that_stalls_until_its_deadline_leaves_nothing_half_stored(
    pair: Engine, start_daemon: Start, prompt: Make
) -> None:
    """One thread copies for both, so slowly that the second rank's store cannot end in time."""
    daemon = start_daemon(copy_delay_us=100_000, copy_threads=1)
    text = prompt(220, 1000)
    cold = pair.generate([text])[0]
    pair.wait_for_stores()
    wait_until(lambda: daemon.status()["totals"]["failed_stores"], 10, "the stalled store was given up")
    daemon.wait_for_accounting(tickets=0, pins=0)
    pair.forget()
    again = pair.generate([text])[0]
    assert (again["cached_tokens"], again["tokens"]) == (0, cold["tokens"])
    pair.wait_for_stores()
    daemon.close()
    start_daemon()
    pair.forget()
    assert pair.generate([text])[0]["tokens"] == cold["tokens"]
    pair.wait_for_stores()
    pair.forget()
    warm = pair.generate([text])[0]
    assert (warm["cached_tokens"], warm["tokens"]) == (768, cold["tokens"]), "and the engine goes on"


def test_a_rank_that_hangs_during_a_store_and_during_a_load_changes_no_token(
    pair: Engine, start_daemon: Start, prompt: Make
) -> None:
    """Its deadlines pass while it is stopped. The server copies on, and may: vLLM reuses nothing meanwhile."""
    daemon = start_daemon(copy_delay_us=50_000, copy_threads=2)
    text = prompt(225, 1000)
    cold = run_with_a_stop(daemon, pair, text, STORE_SECONDS + 1)
    pair.wait_for_stores()
    daemon.wait_for_accounting(tickets=0, pins=0)
    pair.forget()
    warm = run_with_a_stop(daemon, pair, text, LOAD_SECONDS + 1)
    assert warm["tokens"] == cold["tokens"]
    pair.wait_for_stores()
    daemon.wait_for_accounting(tickets=0, pins=0)
    pair.forget()
    again = pair.generate([text])[0]
    assert (again["cached_tokens"], again["tokens"]) == (768, cold["tokens"])


def run_with_a_stop(daemon: Daemon, engine: Engine, text: Prompt, seconds: float) -> dict[str, Any]:
    """Generate; rank 1 is stopped for so long while both ranks copy."""
    engine.send("generate", prompts=[text], max_tokens=16)
    wait_until_both_copy(daemon, engine)
    pid = ranks_of(daemon, engine)[1]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)
    output: dict[str, Any] = engine.receive()["outputs"][0]
    return output


def test_a_fresh_engine_of_two_ranks_gets_hits_and_equal_tokens(
    engines: Engines, pair: Engine, start_daemon: Start, prompt: Make
) -> None:
    other = engines.get("other pair", **TWO_RANKS)
    daemon = start_daemon()
    texts = [prompt(230 + n, 300 * n + 20) for n in (1, 2, 4)]
    cold = [pair.generate([text])[0] for text in texts]
    pair.wait_for_stores()
    one, two = (ranks_of(daemon, engine) for engine in (pair, other))
    assert [[worker["rank"] for worker in sorted(ranks, key=lambda w: w["rank"])] for ranks in (one, two)] == [
        [0, 1]
    ] * 2
    assert len({worker["pid"] for worker in one + two}) == 4
    warm = [other.generate([text])[0] for text in texts]
    assert [output["cached_tokens"] for output in warm] == [256, 512, 1024]
    assert [output["tokens"] for output in warm] == [output["tokens"] for output in cold]
    together = other.generate([text + prompt(240, 30) for text in texts])
    other.forget()
    assert [o["tokens"] for o in other.generate([text + prompt(240, 30) for text in texts])] == [
        o["tokens"] for o in together
    ]
    other.wait_for_stores()
    other.forget()
    assert zero_l1(daemon) > 1_000_000
    assert other.generate(texts[-1:])[0]["tokens"] != cold[-1]["tokens"], "the comparison would notice wrong KV"
    assert daemon.status()["totals"]["errors"] == 0
    other.forget()


def test_a_rank_that_is_killed_ends_its_engine_and_no_other(
    engines: Engines, pair: Engine, start_daemon: Start, prompt: Make
) -> None:
    """vLLM's engine dies with its rank. What it was storing is never found; the other engine does not notice."""
    other = engines.get("other pair", **TWO_RANKS)
    daemon = start_daemon(copy_delay_us=50_000, copy_threads=2)
    text = prompt(250, 1000)
    pair.send("generate", prompts=[text], max_tokens=200)
    wait_until_both_copy(daemon, pair)
    os.kill(ranks_of(daemon, pair)[1]["pid"], signal.SIGKILL)
    wait_until(lambda: len(ranks_of(daemon, pair)) < 2, 20, "the daemon saw it die")
    pair.kill()
    wait_until(lambda: len(daemon.status()["instances"]) == 1, 30, "the dead engine's ranks are unregistered")
    daemon.wait_for_accounting(tickets=0, pins=0)
    cold = other.generate([text])[0]
    assert cold["cached_tokens"] == 0, "half of a chunk was found"
    other.wait_for_stores()
    other.forget()
    warm = other.generate([text])[0]
    assert (warm["cached_tokens"], warm["tokens"]) == (768, cold["tokens"])
