"""What the two halves keep of stores and loads that are not over."""

from __future__ import annotations

import pytest

from kvserver._native import pack_blocks
from kvserver.adapters.common.faults import Faults
from kvserver.adapters.common.send_queue import DirectSendQueue
from kvserver.adapters.common.settings import CommonSettings
from kvserver.adapters.common.specs import LoadSpec
from kvserver.adapters.common.steps import StepPlan
from kvserver.adapters.common.worker import WorkerHalf


@pytest.mark.parametrize("fails_requests", [False, True])
def test_a_failed_load_is_reported_as_this_vllm_takes_it(fails_requests):
    """Its blocks before 0.30, since then the request. Either way the request's load is over, once."""
    faults = Faults()
    worker = WorkerHalf(CommonSettings(), DirectSendQueue(), faults, fails_requests=fails_requests)
    plan = StepPlan(loads=[LoadSpec(1, "r", "", 4, b"k" * 32, pack_blocks([5, 6, 7, 8]), 0)])
    worker.start_loads(plan)
    worker.answer_for_loads(plan)
    assert worker.load_ends.take_finished() == ({"r"}, {"r"} if fails_requests else set())
    assert worker.load_ends.take_invalid_blocks() == (set() if fails_requests else {5, 6, 7, 8})
    assert worker.load_ends.take_finished() == (set(), set())
    assert not faults.counts
