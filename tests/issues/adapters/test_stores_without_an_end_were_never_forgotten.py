"""Ranks that never reported a store's end (pipeline parallel with speculation on runner V1, external_launcher) left it
pending for good: each reuse of its blocks ended it again, requests took five times as long after 600 of them, and an idle
engine stepped on for 11 s.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter

import pytest
from made_up_model import prompt

from kvserver.adapters.common.hazards import PinnedStores

CHUNK = 64


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Pool(Counter[int]):
    """How often each block is pinned. All blocks that are pinned are kept by pins only."""

    @property
    def kept(self) -> set[int]:
        return set(+self)

    def pin(self, block_ids: list[int]) -> None:
        self.update(block_ids)

    def unpin(self, block_ids: list[int]) -> None:
        self.subtract(block_ids)
        assert min(self.values()) >= 0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pool() -> Pool:
    return Pool()


def test_stores_without_an_end_are_cancelled_once_for_their_blocks_and_the_engine_comes_to_rest(
    make_daemon, make_engine
):
    daemon = make_daemon()
    engine = make_engine(daemon, world_size=2, num_blocks=40, extra={"kvserver.store_timeout_ms": 200})
    engine.runners[1].connector._begin_stores = lambda: None
    for i in range(30):
        answer = engine.add(f"r{i}", prompt(i, CHUNK + 8), count=1)
        engine.run(until=lambda answer=answer: answer.finish_reason is not None)
        assert answer.right
    aborted = [store_id for plan in engine.plans for store_id in plan.abort_stores]
    assert aborted, "no block was needed"
    assert len(aborted) == len(set(aborted))
    engine.run(seconds=5)
    assert not engine.connector.has_pending_push_work()


def test_a_store_is_forgotten_some_time_after_its_step(pool, clock):
    stores = PinnedStores(pool, ranks=2, seconds=11.0, clock=clock)
    stores.add(1, [3, 4])
    stores.sent(1, 7)
    clock.now += 60  # a slow first step: the workers begin the store when it was computed
    stores.step_ended(7)
    stores.ended(1)
    assert stores.awaited
    clock.now += 10.9
    assert stores.awaited
    assert pool.kept == {3, 4}
    clock.now += 0.2
    assert not stores.awaited
    assert pool.kept == set()
    stores.ended(1)
    assert pool.kept == set(), "once"


def test_a_store_whose_ranks_never_answer_is_forgotten_and_costs_nothing(pool, clock):
    stores = PinnedStores(pool, ranks=2, seconds=11.0, clock=clock)
    for store_id in range(1, 1001):
        stores.add(store_id, [3, 4])
        stores.sent(store_id, store_id)
        stores.ended(store_id)
        stores.step_ended(store_id)
        clock.now += 1
        assert pool[3] == pool[4] <= 12
    clock.now += 11
    assert not stores.awaited
    assert list(stores) == []
    assert pool.kept == set()


def test_a_store_whose_step_never_ends_is_kept(pool, clock):
    """Some rank may begin it yet."""
    stores = PinnedStores(pool, ranks=1, seconds=11.0, clock=clock)
    stores.add(1, [3, 4])
    stores.sent(1, 2)
    stores.step_ended(1)
    clock.now += 3600
    assert stores.awaited
    assert pool.kept == {3, 4}


def test_a_store_that_was_not_sent_is_kept_until_it_is_dropped(pool, clock):
    stores = PinnedStores(pool, ranks=1, seconds=11.0, clock=clock)
    stores.add(1, [3, 4])
    stores.step_ended(5)
    clock.now += 3600
    assert stores.awaited, "it is to be accepted, or dropped"
    assert pool.kept == {3, 4}
    stores.drop(1)
    assert not stores.awaited
    assert pool.kept == set()


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
