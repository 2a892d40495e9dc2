"""The linker between SGLang's real tree and a daemon, without a model: what SGLang finds and loads, and when."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from modelless import PAGE, Stage
from support.daemon import Daemon, wait_until
from support.filling import filling

from kvserver.adapters.common.send_queue import OrderedSendQueue, SendQueue
from kvserver.adapters.sglang import KVServerLinker
from kvserver.adapters.sglang.loads import LoadEnd
from kvserver.adapters.sglang.ranks import Ranks

MakeStage = Callable[..., Stage]
PROMPT = list(range(10, 10 + 15 * PAGE + 1))
WHOLE = 15 * PAGE


@pytest.fixture
def daemon(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    daemon = Daemon(l1_size="64MiB", pauses="paused" in request.fixturenames)
    yield daemon.start()
    daemon.close()


@pytest.fixture
def paused(daemon: Daemon) -> Daemon:
    """The daemon, whose copies can be paused."""
    return daemon


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


# ---- what storage has -------------------------------------------------------------------------


def test_what_memory_has_is_found_at_once_and_what_storage_has_by_a_later_match(
    stage: MakeStage, daemon: Daemon, tmp_path: Path
) -> None:
    """The fill begins with the first lookup. No match waits for it, and the request needs no other lookup."""
    daemon.terminate()
    daemon.flags["l2"] = f"file://{tmp_path}/l2?size=256MiB"
    daemon.start()
    engine = stage(extra={"kvserver.lookup_age_ms": 60_000})
    wait_until(lambda: daemon.tier()["objects"] == WHOLE // PAGE, 20, "spilled")
    daemon.terminate()
    daemon.start()
    engine.wait_for_daemon(daemon)
    engine.compute(PROMPT[: 4 * PAGE])
    engine.wait_for_stores()
    engine.forget()
    request, lookups = engine.request(PROMPT), engine.linker.cache.counters["lookups"]
    assert engine.hit(request) == 4 * PAGE
    wait_until(lambda: engine.next_pass() or engine.hit(request) == WHOLE, 10, "what storage has")
    assert engine.linker.cache.counters["lookups"] == lookups + 1
    assert torch.equal(engine.kv(engine.load(request))[:, 4 * PAGE :], engine.written[:, 4 * PAGE :])


def test_no_pass_waits_for_a_tier_that_does_not_answer_and_a_later_one_finds_what_it_has(model: Path) -> None:
    """A lookup may wait a minute here for an answer, so a pass that waited for the tier would take that long."""
    with filling() as parts:
        engine = Stage(
            str(model),
            parts.running.endpoint,
            extra={"kvserver.lookup_poll_ms": 60_000, "kvserver.lookup_timeout_ms": 60_000},
        )
        try:
            wait_until(lambda: engine.next_pass() or engine.linker.cache._dispatcher.usable(), 20, "connected")
            wait_until(lambda: engine.linker.cache._half._usable(), 20, "registered")
            written = engine.kv(engine.compute(PROMPT[:WHOLE])).clone()
            engine.wait_for_stores()
            wait_until(lambda: len(parts.tier.objects) == WHOLE // PAGE, 20, "spilled")
            parts.forget_l1()
            engine.forget()
            parts.tier.stopped = True
            waiting, began = [engine.request(PROMPT) for _ in range(8)], time.monotonic()
            for _ in range(10):
                engine.next_pass()
                assert [engine.hit(request) for request in waiting] == [0] * len(waiting)
            assert time.monotonic() - began < 60
            wait_until(lambda: len(parts.gets()) >= WHOLE // PAGE, 20, "the fill has begun")
            parts.tier.release()
            wait_until(lambda: engine.next_pass() or engine.hit(waiting[0]) == WHOLE, 20, "what the tier has")
            assert torch.equal(engine.kv(engine.load(waiting[0])), written)
        finally:
            engine.close()


# ---- loads that fail, here or on another rank ---------------------------------------------


def test_slots_that_a_late_copy_may_write_are_not_free_until_the_copy_has_ended(
    stage: MakeStage, paused: Daemon
) -> None:
    engine = stage(extra={"kvserver.load_wait_ms": 100})
    free, request = engine.allocator.available_size(), engine.request(PROMPT)
    assert engine.hit(request) == WHOLE
    with paused.paused_copies():
        assert len(engine.load(request)) == 0
        engine.next_pass()
        assert engine.allocator.available_size() == free - WHOLE
    wait_until(lambda: engine.next_pass() or engine.allocator.available_size() == free, 10, "the slots")


class OtherRank(Ranks):
    """Beside this rank another one, which fails where `fails` is set."""

    fails = False

    def least(self, values: Sequence[int]) -> list[int]:
        return [min(int(value), LoadEnd.FAILED if value > 1 else 0) if self.fails else int(value) for value in values]


@pytest.fixture
def other_rank(monkeypatch: pytest.MonkeyPatch) -> OtherRank:
    ranks = OtherRank()
    monkeypatch.setattr("kvserver.adapters.sglang.linker.ranks_of", lambda *args: ranks)
    return ranks


def test_a_load_that_another_rank_has_not_is_refused(stage: MakeStage, other_rank: OtherRank) -> None:
    engine = stage()
    free, request = engine.allocator.available_size(), engine.request(PROMPT)
    assert engine.hit(request) == WHOLE
    other_rank.fails = True
    assert len(engine.load(request)) == 0
    assert engine.allocator.available_size() == free


def test_a_store_that_another_rank_has_not_begun_is_none(stage: MakeStage, other_rank: OtherRank) -> None:
    engine = stage()
    other_rank.fails = True
    engine.compute(list(range(500, 500 + 4 * PAGE)))
    assert not engine.tree.linker.pending_offloads
    other_rank.fails = False
    engine.compute(list(range(700, 700 + 4 * PAGE)))
    engine.wait_for_stores()
    engine.forget()
    assert engine.hit(engine.request(list(range(700, 700 + 4 * PAGE + 1)))) == 4 * PAGE


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
