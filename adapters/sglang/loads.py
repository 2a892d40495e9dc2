"""The loads of one rank: SGLang's scheduler waits for each, so that a load that fails is a request that is computed.

Who may still write after the wait ended: a load that had not begun is cancelled, and no process will. One that runs is cancelled, and
the daemon acknowledges behind the page that it copies. If it does not, as when it is stopped, its pages stay out of use (`quarantine`).

Owns: the wait. Refuses to know: SGLang's transfers, the wire (`worker`), and how long a load may take (`budget`).
"""

from __future__ import annotations

import time

from kvserver.adapters.common.specs import LoadSpec
from kvserver.adapters.common.steps import StepPlan
from kvserver.adapters.common.worker import WorkerHalf

_END_SECONDS = 1.0  # a cancelled load is reported long before, also where the daemon does not acknowledge


def load(half: WorkerHalf, spec: LoadSpec, step: int, seconds: float) -> bool:
    """Whether the pages were copied. Returns after `seconds`, and what a cancel takes, at most."""
    deadline = time.monotonic() + seconds
    plan = StepPlan(loads=[spec])
    half.begin_step(step)
    half.start_loads(plan)
    half.answer_for_loads(plan)
    cancelled = False
    while (now := time.monotonic()) < deadline + _END_SECONDS:
        finished, failed = half.load_ends.take_finished()
        if spec.request_id in finished:
            return spec.request_id not in failed
        if now >= deadline and not cancelled:
            cancelled = True
            half.give_up(spec.copy_id)
        half.poll(idle=True)
    return False
