"""The wait for one load. A step that still runs may write its slots, so a copy begins when the step has ended."""

from __future__ import annotations

import time

import pytest

from kvserver.adapters.common.faults import Faults
from kvserver.adapters.common.load_ends import LoadEnds
from kvserver.adapters.common.specs import LoadSpec
from kvserver.adapters.common.steps import StepPlan
from kvserver.adapters.sglang.loads import LoadEnd, load


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

    def give_up(self, copy_id: int) -> None:
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
    end, seconds = run(TimedHalf(queued=0.3, copying=0.05), seconds=0.2)
    assert end is LoadEnd.LOADED
    assert 0.04 < seconds < 0.2


def test_a_copy_that_takes_too_long_has_failed() -> None:
    end, seconds = run(TimedHalf(queued=0.1, copying=9), seconds=0.1)
    assert end is LoadEnd.FAILED
    assert seconds == pytest.approx(0.1, abs=0.05)


def test_a_load_behind_a_step_that_does_not_end_is_given_up_and_has_not_begun() -> None:
    began = time.monotonic()
    assert run(TimedHalf(queued=9), seconds=0.1, own_work_seconds=0.2)[0] is LoadEnd.NOT_BEGUN
    assert time.monotonic() - began < 1


def test_the_end_of_an_earlier_load_is_not_taken_for_the_end_of_the_next_one_of_the_same_request() -> None:
    half = TimedHalf(copying=9)
    half.load_ends.part_ended(spec(copy_id=0), failed=False)
    assert run(half, seconds=0.1)[0] is LoadEnd.FAILED
