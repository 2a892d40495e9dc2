"""What the two halves keep of stores and loads that are not over."""

from __future__ import annotations

import time

import pytest
from kvserver.adapters.vllm.hazards import PendingStores
from kvserver.adapters.vllm.metadata import LoadSpec, StepPlan
from kvserver.adapters.vllm.outbox import DirectOutbox
from kvserver.adapters.vllm.settings import AdapterSettings
from kvserver.adapters.vllm.worker import WorkerHalf


def test_a_stores_time_begins_when_its_step_was_computed():
    """A first step may take longer than any store."""
    pending = PendingStores(ranks=1)
    pending.add(1, [3, 4], seconds=0.05)
    time.sleep(0.1)  # the step
    pending.next_pass()
    assert pending.awaited


def test_a_store_whose_end_was_lost_is_not_awaited_for_ever():
    pending = PendingStores(ranks=1)
    pending.add(1, [3, 4], seconds=0.05)
    for _ in range(5):
        pending.next_pass()
        time.sleep(0.02)
    assert not pending.awaited
    assert list(pending.readers(3)) == [1], "but its blocks are still looked after"


@pytest.mark.parametrize("fails_requests", [False, True])
def test_a_failed_load_is_told_as_this_vllm_takes_it(fails_requests):
    """Its blocks before 0.30, since then the request. Either way the request's load is over, once."""
    faults = []
    worker = WorkerHalf(
        AdapterSettings(),
        None,
        DirectOutbox(),
        fails_requests=fails_requests,
        fault=lambda *fault: faults.append(fault),
    )
    plan = StepPlan(loads=[LoadSpec(1, "r", "", 4, b"k" * 32, [5, 6, 7, 8], 0)])
    worker.start_loads(plan)
    worker.answer_for_loads(plan)
    assert worker.take_finished() == ({"r"}, {"r"} if fails_requests else set())
    assert worker.take_invalid_blocks() == (set() if fails_requests else {5, 6, 7, 8})
    assert worker.take_finished() == (set(), set())
    assert faults == []
