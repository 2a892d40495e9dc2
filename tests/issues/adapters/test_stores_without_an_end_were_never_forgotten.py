"""Ranks that never reported a store's end (pipeline parallel with speculation on runner V1, external_launcher) left it
pending for good: each reuse of its blocks ended it again, requests took five times as long after 600 of them, and an idle
engine stepped on for 11 s.
"""

from __future__ import annotations

import copy
import logging

import pytest
from kvserver.adapters.common.hazards import PendingStores
from made_up_model import prompt

CHUNK = 64


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_reuse_ends_a_store_once_and_the_engine_comes_to_rest(make_daemon, make_engine):
    daemon = make_daemon()
    engine = make_engine(daemon, world_size=2, num_blocks=40, extra={"kvserver.store_timeout_ms": 200})
    engine.runners[1].connector.wait_for_save = lambda: None  # as those ranks do
    for i in range(600):
        answer = engine.add(f"r{i}", prompt(i, CHUNK + 8), count=1)
        engine.run(until=lambda answer=answer: answer.finish_reason is not None)
        assert answer.right
    ended = [store_id for plan in engine.plans for store_id in plan.overwritten_stores]
    assert len(ended) > 500, "blocks were not reused"
    assert len(ended) == len(set(ended)), "a store that was ended before its blocks were overwritten is over"
    engine.run(seconds=5)
    assert not engine.connector.has_pending_push_work()


def test_a_store_is_forgotten_some_time_after_its_step(clock):
    pending = PendingStores(ranks=2, seconds=11.0, clock=clock)
    pending.add(1, [3, 4])
    pending.planned()
    clock.now += 60  # a slow first step: the workers begin the store when it was computed
    pending.step_ended()
    pending.ended(1)
    assert pending.awaited
    clock.now += 10.9
    assert pending.awaited
    assert list(pending.overwrite(3)) == [1]


def test_a_store_whose_ranks_never_answer_is_forgotten_and_costs_nothing(clock):
    pending = PendingStores(ranks=2, seconds=11.0, clock=clock)
    for store_id in range(1000):
        pending.add(store_id, [3, 4])
        pending.planned()
        pending.ended(store_id)
        pending.step_ended()
        clock.now += 1
        assert len(pending) <= 12
    clock.now += 11
    assert not pending.awaited
    assert len(pending) == 0
    assert list(pending.overwrite(3)) == []


def test_a_store_whose_step_never_ends_is_kept(clock):
    """Some rank may begin it yet."""
    pending = PendingStores(ranks=1, seconds=11.0, clock=clock)
    pending.planned()  # a step without stores, whose outputs come
    pending.add(1, [3, 4])
    pending.planned()
    pending.step_ended()
    clock.now += 3600
    assert not pending.awaited, "an engine with a step under way goes on by itself"
    assert list(pending.overwrite(4)) == [1]


def test_ends_of_steps_that_were_not_planned_do_not_count(clock):
    pending = PendingStores(ranks=1, seconds=11.0, clock=clock)
    for _ in range(3):
        pending.step_ended()
    pending.add(1, [3, 4])
    pending.planned()
    clock.now += 3600
    assert len(pending) == 1
    assert list(pending.overwrite(3)) == [1]


def pipeline_with_drafts(config, caches):
    config.parallel_config = copy.copy(config.parallel_config)
    config.parallel_config.pipeline_parallel_size = config.parallel_config.world_size = 2
    config.speculative_config = object()


def external_launcher(config, caches):
    config.parallel_config = copy.copy(config.parallel_config)
    config.parallel_config.tensor_parallel_size = config.parallel_config.world_size = 2
    config.parallel_config.distributed_executor_backend = "external_launcher"


@pytest.mark.parametrize("adjust", [pipeline_with_drafts, external_launcher])
def test_where_ranks_cannot_answer_the_engine_runs_without_cache(make_daemon, make_halves, caplog, adjust):
    caplog.set_level(logging.WARNING, "vllm.kvserver")
    scheduler, worker = make_halves(make_daemon(), adjust)
    assert scheduler.scheduler is None
    assert sum("runs without cache" in record.getMessage() for record in caplog.records) == 2
    worker.register_kv_caches({})
    assert scheduler.errors == worker.errors == {}
