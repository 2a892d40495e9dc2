"""The linker between SGLang's real tree and a daemon, without a model: what SGLang finds and loads, and when."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from modelless import PAGE, Stage
from support.daemon import Daemon, wait_until

from kvserver.adapters.common.send_queue import OrderedSendQueue, SendQueue
from kvserver.adapters.sglang import KVServerLinker

MakeStage = Callable[..., Stage]
PROMPT = list(range(10, 10 + 15 * PAGE + 1))
WHOLE = 15 * PAGE


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    daemon = Daemon(l1_size="64MiB")
    yield daemon.start()
    daemon.close()


@pytest.fixture
def stage(model: Path, daemon: Daemon) -> Iterator[MakeStage]:
    """`stage(extra, ...)`: SGLang's cache with a linker that is registered, and whose prompt the daemon has, not SGLang."""
    made: list[Stage] = []

    def make(stored: bool = True, **options: Any) -> Stage:
        one = Stage(str(model), daemon.endpoint, **options)
        made.append(one)
        if stored:
            wait_until(lambda: one.next_pass() or daemon.status()["instances"][0]["namespace"], 10, "registered")
            one.written = one.kv(one.compute(PROMPT[:WHOLE])).clone()
            one.wait_for_stores()
            one.forget()
        return one

    yield make
    for one in made:
        one.close()


def test_a_prompt_that_was_flushed_comes_back_with_equal_bytes(stage: MakeStage) -> None:
    engine = stage()
    request = engine.request(PROMPT)
    assert engine.hit(request) == WHOLE
    assert torch.equal(engine.kv(engine.load(request)), engine.written)


# ---- lookups ------------------------------------------------------------------------------


def test_a_hit_stays_one_while_its_lookup_is_renewed(stage: MakeStage, daemon: Daemon) -> None:
    """SGLang would compute a request without a hit in the same pass. A daemon that does not answer ends the hit at the lookup's timeout."""
    engine = stage(
        extra={"kvserver.lookup_age_ms": 50, "kvserver.lookup_poll_ms": 1, "kvserver.lookup_timeout_ms": 400}
    )
    request = engine.request(PROMPT)
    wait_until(lambda: engine.next_pass() or engine.hit(request) == WHOLE, 5, "a hit")
    daemon.freeze()
    try:
        time.sleep(0.1)
        for _ in range(3):
            engine.next_pass()
            assert engine.hit(request) == WHOLE
        wait_until(lambda: engine.next_pass() or engine.hit(request) == 0, 2, "no hit of a daemon that does not answer")
    finally:
        daemon.thaw()


def test_a_renewed_lookup_finds_what_is_new(stage: MakeStage) -> None:
    engine = stage(extra={"kvserver.lookup_age_ms": 50})
    longer = PROMPT[:WHOLE] + list(range(700, 700 + 4 * PAGE + 1))
    request = engine.request(longer)
    assert engine.hit(request) == WHOLE
    engine.compute(longer[: WHOLE + 4 * PAGE])
    engine.wait_for_stores()
    engine.forget()
    wait_until(lambda: engine.next_pass() or engine.hit(request) == WHOLE + 4 * PAGE, 5, "the new pages")


def test_answers_of_the_last_daemon_are_forgotten(stage: MakeStage, daemon: Daemon) -> None:
    engine = stage(extra={"kvserver.lookup_age_ms": 60_000})
    request = engine.request(PROMPT)
    assert engine.hit(request) == WHOLE
    daemon.kill()
    daemon.start()
    wait_until(lambda: engine.next_pass() or engine.hit(request) == 0, 10, "no hit in an empty daemon")


# ---- loads behind a running step ----------------------------------------------------------


class Step:
    """A step of the engine's that runs until it is ended. Also what torch.cuda.Event is of it."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._ended.set()

    def begin(self) -> None:
        self._ended.clear()

    def end(self) -> None:
        self._ended.set()

    def record(self) -> None:
        return

    def synchronize(self) -> None:
        self._ended.wait()


@pytest.fixture
def step() -> Iterator[Step]:
    step = Step()
    yield step
    step.end()


def behind(step: Step) -> type:
    class Behind(KVServerLinker):  # type: ignore[misc, valid-type]
        def _send_queue(self, on_gpu: bool) -> SendQueue:
            return OrderedSendQueue(lambda: step)

    return Behind


def test_the_end_of_a_running_step_is_no_time_of_the_load_behind_it(stage: MakeStage, step: Step) -> None:
    """Taken for it, the load of 2 pages would have shown a machine that copies 4 pages a second."""
    engine = stage(linker=behind(step), extra={"kvserver.load_wait_ms": 2000})
    request = engine.request(PROMPT[: 2 * PAGE + 1])
    assert engine.hit(request) == 2 * PAGE
    step.begin()
    threading.Timer(0.5, step.end).start()
    assert len(engine.load(request)) == 2 * PAGE
    assert engine.hit(engine.request(PROMPT)) == WHOLE


def test_a_load_behind_a_step_that_does_not_end_is_refused_and_found_again_once_it_has(
    stage: MakeStage, step: Step
) -> None:
    engine = stage(linker=behind(step), extra={"kvserver.load_wait_ms": 200})
    request = engine.request(PROMPT)
    assert engine.hit(request) == WHOLE
    step.begin()
    assert len(engine.load(request)) == 0
    step.end()
    assert engine.hit(request) == WHOLE
    assert torch.equal(engine.kv(engine.load(request)), engine.written)


# ---- an SGLang that is not known ----------------------------------------------------------


def test_an_argument_that_is_not_known_starts_an_engine_without_cache_and_one_warning(
    stage: MakeStage, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "kvserver"):
        engine = stage(stored=False, prefetch_stream=None)
    assert [record.getMessage() for record in caplog.records if record.name.startswith("kvserver")] == [
        "kvserver: this engine runs without cache: SGLang passes prefetch_stream, which this adapter does not know"
    ]
    engine.compute(PROMPT[:WHOLE])
    engine.next_pass()
    engine.forget()
    assert engine.hit(request := engine.request(PROMPT)) == 0
    assert len(engine.load(request)) == 0


# ---- what a pass costs --------------------------------------------------------------------


def test_more_waiting_requests_than_are_remembered_cause_no_lookups_in_each_pass(
    stage: MakeStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvserver.adapters.sglang.hits.MOST_REMEMBERED", 20)
    engine = stage(extra={"kvserver.lookup_age_ms": 60_000})
    waiting = [engine.request(PROMPT) for _ in range(50)]
    for _ in range(3):
        engine.next_pass()
        found = [engine.hit(request) for request in waiting]
    assert found == [WHOLE] * 20 + [0] * 30, "the first ones are admitted first"
    assert engine.linker.cache.counters["lookups"] == 20
