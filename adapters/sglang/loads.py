"""One load: SGLang's scheduler waits for it, so that a load that fails is a request that is computed.

Who may still write after the wait ended: a load that had not begun is cancelled, and no process will. One that runs is cancelled, and
the daemon acknowledges behind the page that it copies. If it does not, as when it is stopped, the load's slots must stay out of use.

Owns: the wait. Refuses to know: SGLang's transfers, the wire (`worker`), and how long a load may take (`budget`).
"""

from __future__ import annotations

import enum
import time

from kvserver.adapters.common.faults import Faults
from kvserver.adapters.common.specs import LoadSpec
from kvserver.adapters.common.steps import StepPlan
from kvserver.adapters.common.worker import WorkerHalf

_END_SECONDS = 1.0  # a cancelled load is reported long before, also where the daemon does not acknowledge


class LoadEnd(enum.IntEnum):
    """The least of all ranks' counts."""

    STILL_WRITTEN = 0  # failed, and the slots must stay out of use while the copy is in flight
    FAILED = 1  # no process writes the slots
    NOT_BEGUN = 2  # SGLang's own work on the slots did not end in time; no process writes them
    LOADED = 3


def load(
    half: WorkerHalf, specs: list[LoadSpec], seconds: float, own_work_seconds: float, faults: Faults
) -> tuple[LoadEnd, float]:
    """Copy the objects of all groups. Returns the end, and the seconds by which the rate of copying can be measured, or 0.

    A load that failed before its time was over states nothing of the rate.
    On a GPU the copy begins when a step that still runs has ended. The wait for that is no time of the copy, and has a bound of its own:
    `own_work_seconds`. The wait for the copy has `seconds`. A cancel takes a little longer.
    """
    wait = _Wait(half, specs)
    with faults.guarded("a load"):
        if wait.until(seconds, own_work_seconds):
            return LoadEnd.LOADED, wait.seconds
    if any(half.is_in_flight(spec.copy_id) for spec in specs):
        return LoadEnd.STILL_WRITTEN, wait.seconds_if_slow
    return LoadEnd.NOT_BEGUN if wait.never_began else LoadEnd.FAILED, wait.seconds_if_slow


class _Wait:
    def __init__(self, half: WorkerHalf, specs: list[LoadSpec]) -> None:
        self._half, self._specs = half, specs
        self._sent = time.monotonic()  # or later: it was queued until then
        self.never_began = False  # and it was given up
        self.seconds = 0.0  # of the copy
        self._slow = False  # the copy itself took all its time

    @property
    def seconds_if_slow(self) -> float:
        return self.seconds if self._slow else 0.0

    def until(self, seconds: float, own_work_seconds: float) -> bool:
        """True if all objects were copied."""
        half, spec, plan = self._half, self._specs[0], StepPlan(loads=self._specs)
        half.load_ends.take_finished()  # of an earlier load of the same request, whose wait was over before
        half.begin_step(spec.copy_id)
        half.start_loads(plan)
        half.answer_for_loads(plan)
        began, given_up = time.monotonic(), False
        while True:
            queued = [half.is_queued(each.copy_id) for each in self._specs]
            finished, failed = half.load_ends.take_finished()
            now = time.monotonic()
            if any(queued) and not given_up:
                self._sent = now
            self.seconds = now - self._sent
            if spec.request_id in finished:
                return spec.request_id not in failed
            late = now - began - own_work_seconds if any(queued) else self.seconds - seconds
            if late >= 0 and not given_up:
                given_up, self.never_began, self._slow = True, all(queued), not any(queued)
                half.give_up([each.copy_id for each in self._specs])
            if late >= _END_SECONDS:
                return False
            half.poll(idle=True)
