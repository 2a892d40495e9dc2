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
    LOADED = 2


def load(half: WorkerHalf, specs: list[LoadSpec], seconds: float, faults: Faults) -> LoadEnd:
    """Copy the objects of all groups. Returns after `seconds`, and what a cancel takes, at most."""
    with faults.guarded("a load"):
        if _wait(half, specs, seconds):
            return LoadEnd.LOADED
    still = any(half.is_in_flight(spec.copy_id) for spec in specs)
    return LoadEnd.STILL_WRITTEN if still else LoadEnd.FAILED


def _wait(half: WorkerHalf, specs: list[LoadSpec], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    plan, spec = StepPlan(loads=specs), specs[0]
    half.load_ends.take_finished()  # of an earlier load of the same request, whose wait was over before
    half.begin_step(spec.copy_id)
    half.start_loads(plan)
    half.answer_for_loads(plan)
    given_up = False
    while (now := time.monotonic()) < deadline + _END_SECONDS:
        finished, failed = half.load_ends.take_finished()
        if spec.request_id in finished:
            return spec.request_id not in failed
        if now >= deadline and not given_up:
            given_up = True
            for each in specs:
                half.give_up(each.copy_id)
        half.poll(idle=True)
    return False
