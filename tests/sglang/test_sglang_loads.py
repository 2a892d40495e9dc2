"""The wait for one load. A step that still runs may write its slots, so a copy begins when the step has ended."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace as NS

import pytest

from kvserver._native import State, WordPage
from kvserver.adapters.common.faults import Faults
from kvserver.adapters.common.link import WORDS, Breaker, Session
from kvserver.adapters.common.load_ends import LoadEnds
from kvserver.adapters.common.settings import CommonSettings
from kvserver.adapters.common.specs import LoadSpec
from kvserver.adapters.common.steps import StepPlan
from kvserver.adapters.common.worker import PositionSize, Rank, WorkerHalf
from kvserver.adapters.sglang.loads import LoadEnd, load
from kvserver.protocol import Retrieve


class TimedHalf:
    """A worker's half whose message waits `queued` seconds for the step, and whose copy then takes `copying` seconds."""

    def __init__(self, queued: float = 0.0, copying: float = 0.0) -> None:
        self.load_ends = LoadEnds(fails_requests=True)
        self._queued, self._copying = queued, copying
        self._in_flight: dict[int, LoadSpec] = {}
        self._began = 0.0

    def begin_step(self, step: int) -> None:
        self._began = time.monotonic()

    def start_loads(self, plan: StepPlan) -> None:
        self._in_flight |= {spec.copy_id: spec for spec in plan.loads}

    def answer_for_loads(self, plan: StepPlan) -> None:
        return

    def is_queued(self, copy_id: int) -> bool:
        return time.monotonic() < self._began + self._queued

    def is_in_flight(self, copy_id: int) -> bool:
        return copy_id in self._in_flight

    def give_up(self, copy_ids: Sequence[int]) -> None:
        for copy_id in copy_ids:
            self.load_ends.part_ended(self._in_flight.pop(copy_id), failed=True)

    def poll(self, idle: bool) -> None:
        time.sleep(0.001)
        if time.monotonic() >= self._began + self._queued + self._copying:
            for copy_id in list(self._in_flight):
                self.load_ends.part_ended(self._in_flight.pop(copy_id), failed=False)


def spec(copy_id: int = 1) -> LoadSpec:
    return LoadSpec(copy_id, "r", "", 1, bytes(32), b"", skip_blocks=0)


def run(half: TimedHalf, seconds: float, own_work_seconds: float = 5.0) -> tuple[LoadEnd, float]:
    return load(half, [spec()], seconds, own_work_seconds, Faults())  # type: ignore[arg-type]


def test_a_load_behind_a_running_step_has_its_own_time_and_states_only_that() -> None:
    end, seconds = run(TimedHalf(queued=1.0, copying=0.05), seconds=0.9)
    assert end is LoadEnd.LOADED
    assert 0.04 < seconds < 1.0, "not the time behind the step, which is 1.0"


def test_a_copy_that_takes_too_long_has_failed() -> None:
    end, seconds = run(TimedHalf(queued=0.1, copying=9), seconds=0.1)
    assert end is LoadEnd.FAILED
    assert 0.09 < seconds < 8


def test_a_load_behind_a_step_that_does_not_end_is_given_up_and_has_not_begun() -> None:
    began = time.monotonic()
    assert run(TimedHalf(queued=9), seconds=0.1, own_work_seconds=0.2)[0] is LoadEnd.NOT_BEGUN
    assert time.monotonic() - began < 8


def test_the_end_of_an_earlier_load_is_not_taken_for_the_end_of_the_next_one_of_the_same_request() -> None:
    half = TimedHalf(copying=9)
    half.load_ends.part_ended(spec(copy_id=0), failed=False)
    assert run(half, seconds=0.1)[0] is LoadEnd.FAILED


class Words(WordPage):
    """State words, and the sequence that each was armed with."""

    def arm(self, index: int, sequence: int) -> None:
        super().arm(index, sequence)
        self.of[sequence] = index


class Copiers:
    """A send queue, and the copying threads behind it: each copy of a load, in order, does as its name states."""

    def __init__(self, *does: str) -> None:
        self.does = dict(enumerate(does, 1))
        self.words = Words(WORDS)
        self.words.of = {}
        self.session = Session(NS(boot_id="b"), None, words=self.words)  # type: ignore[arg-type]
        self.breaker = Breaker(lambda: None)
        self.faults = Faults()
        rank = Rank(positions=[PositionSize(1, 0)] * len(does))
        self.half = WorkerHalf(CommonSettings(), self, self.faults, rank, link=self)  # type: ignore[arg-type]

    def usable(self) -> Session:
        return self.session

    def adopt(self, session: Session | None) -> None:
        return

    def begin_step(self, step: int) -> None:
        return

    def post(self, message: Retrieve, computed_in: int | None = None) -> bool:
        return self.does[message.sequence] != "not sent"

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def is_queued(self, sequence: int) -> bool:
        return self.does[sequence] == "queued"

    def receive(self) -> list[tuple[int, object]]:
        for sequence, does in self.does.items():
            if (word := self.words.of.get(sequence)) is not None and does not in ("queued", "not sent", "not begun"):
                self.words.move(word, sequence, State.PENDING, State.RUNNING)
                if does in ("done", "failed"):
                    self.words.move(word, sequence, State.RUNNING, State[does.upper()])
                elif does == "late":  # it acknowledges a cancel; one that is stuck does not
                    self.words.move(word, sequence, State.CANCELLING, State.CANCELLED)
        return []

    def load(self, seconds: float = 0.1, own_work_seconds: float = 0.2) -> tuple[LoadEnd, float]:
        specs = [replace(spec(number), group=number - 1, copies=len(self.does)) for number in self.does]
        return load(self.half, specs, seconds, own_work_seconds, self.faults)

    @property
    def timeouts(self) -> int:
        return self.half.counters["timeouts"]


BEHAVIOURS = ("done", "failed", "late", "stuck", "not begun", "queued", "not sent")


@pytest.mark.parametrize("does", list(itertools.combinations_with_replacement(BEHAVIOURS, 3)), ids="+".join)
def test_a_load_of_several_copies_ends_once_and_as_its_worst_copy(does: tuple[str, ...]) -> None:
    copiers = Copiers(*does)
    began = time.monotonic()
    end, measured = copiers.load()
    assert time.monotonic() - began < 8
    kinds = set(does)
    slow = kinds & {"late", "stuck", "not begun"}
    if kinds == {"done"}:
        assert end is LoadEnd.LOADED
    elif "stuck" in kinds:
        assert end is LoadEnd.STILL_WRITTEN
    else:
        assert end is (LoadEnd.NOT_BEGUN if kinds == {"queued"} else LoadEnd.FAILED)
    assert copiers.timeouts == bool(slow)
    assert not copiers.breaker.open, "one late load"
    if end is not LoadEnd.LOADED:
        assert (measured >= 0.1) if slow and "queued" not in kinds else (measured == 0)
    assert not copiers.faults.counts
