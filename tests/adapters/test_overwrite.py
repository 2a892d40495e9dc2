"""The overwrite hazard: a block is given to another request while the daemon still reads it for a store."""

from __future__ import annotations

import pytest
from kvserver.adapters.common.send_queue import DirectSendQueue
from kvserver.adapters.common.specs import ids_of
from kvserver.adapters.common.worker import WorkerHalf
from made_up_model import prompt
from modelless import Engine

CHUNK = 64
FIRST = prompt(1, 4 * CHUNK)
OTHER = prompt(2, 4 * CHUNK + 50)
SLOW = 20_000  # microseconds a block


@pytest.fixture(params=[True, False], ids=["async", "sync"])
def asynchronous(request):
    return request.param


def overwrite(engine: Engine) -> None:
    """End a request whose store has just begun, then give all blocks to another one."""
    first = engine.add("first", FIRST, count=1)
    engine.run(until=lambda: first.finish_reason is not None)
    assert engine.connector.has_pending_push_work()
    other = engine.add("other", OTHER, count=3)
    engine.run()
    assert first.right
    assert other.right
    stored = {block for store in engine.stores if store.request_id == "first" for block in ids_of(store)}
    taken = {block for store in engine.stores if store.request_id == "other" for block in ids_of(store)}
    assert stored & taken, "the pool was too large for this test: nothing was overwritten"


def test_a_store_is_cancelled_before_its_blocks_are_overwritten(make_daemon, make_engine, asynchronous):
    daemon = make_daemon(copy_delay_us=SLOW)
    engine = make_engine(daemon, asynchronous=asynchronous, num_blocks=23, extra={"kvserver.settle_ms": 1})
    overwrite(engine)
    assert any(plan.overwritten_stores for plan in engine.plans)
    assert engine.worker.worker.counters["cancelled_stores"] > 0
    assert make_engine(daemon).generate("warm", FIRST).external == 0
    assert make_engine(daemon).generate("warm", OTHER).external > 0


def test_a_store_that_ends_in_time_is_kept(make_daemon, make_engine, asynchronous):
    daemon = make_daemon(copy_delay_us=SLOW)
    engine = make_engine(daemon, asynchronous=asynchronous, num_blocks=23, extra={"kvserver.settle_ms": 10_000})
    overwrite(engine)
    assert any(plan.overwritten_stores for plan in engine.plans)
    assert engine.worker.worker.counters["cancelled_stores"] == 0
    assert make_engine(daemon).generate("warm", FIRST).external == 4 * CHUNK - 1


def test_without_the_wait_for_stores_this_test_would_see_mixed_bytes(make_daemon, make_engine, monkeypatch):
    """The control: what the two tests above would see of an adapter that forgets the hazard."""
    monkeypatch.setattr(WorkerHalf, "end_overwritten_stores", lambda self, plan: None)
    daemon = make_daemon(copy_delay_us=SLOW)
    overwrite(make_engine(daemon, num_blocks=23))
    with pytest.raises(AssertionError, match="attends to foreign KV"):
        make_engine(daemon).generate("warm", FIRST)


def test_stores_of_a_preempted_requests_blocks_are_ended_too(make_daemon, make_engine):
    daemon = make_daemon(copy_delay_us=4000)
    engine = make_engine(daemon, num_blocks=30)
    prompts = [prompt(20 + i, 2 * CHUNK + 9) for i in range(3)]
    answers = [engine.add(f"r{i}", tokens, count=80) for i, tokens in enumerate(prompts)]
    engine.run(60)
    assert engine.preemptions
    assert all(answer.right for answer in answers)
    for tokens in prompts:
        make_engine(daemon).generate("warm", tokens)


def test_stores_of_the_targets_of_a_load_are_ended_too(make_daemon, make_engine):
    """A load's blocks are in no request's list of new blocks: only the pool's hook sees them."""
    daemon = make_daemon(copy_delay_us=SLOW)
    make_engine(daemon).generate("cold", OTHER, seconds=30)
    engine = make_engine(daemon, num_blocks=23, extra={"kvserver.settle_ms": 1})
    first = engine.add("first", FIRST, count=1)
    engine.run(until=lambda: first.finish_reason is not None)
    assert engine.connector.has_pending_push_work()
    other = engine.add("other", OTHER, count=3)
    engine.run()
    assert other.right
    assert other.external == 4 * CHUNK
    assert engine.worker.worker.counters["cancelled_stores"] > 0
    assert make_engine(daemon).generate("warm", FIRST).external == 0


def test_a_hung_daemon_adds_little_to_each_worker_step_and_nothing_wrong_to_l1(make_daemon, make_engine, monkeypatch):
    """A step that must end stores waits for settle_ms in all, and a step that computes nothing for 1 ms. No answer ends a wait."""
    waited: list[float] = []  # seconds, by step
    wait = DirectSendQueue.wait

    def recorded(queue: DirectSendQueue, seconds: float) -> None:
        waited[-1] += seconds
        wait(queue, seconds)

    monkeypatch.setattr(DirectSendQueue, "wait", recorded)
    daemon = make_daemon(copy_delay_us=SLOW)
    engine = make_engine(daemon, num_blocks=23, extra={"kvserver.settle_ms": 50})
    engine.before_step = lambda plan: waited.append(0.0)
    first = engine.add("first", FIRST, count=1)
    engine.run(until=lambda: first.finish_reason is not None)
    assert engine.connector.has_pending_push_work()
    daemon.freeze()
    frozen = len(waited)
    other = engine.add("other", OTHER, count=40)
    engine.run(until=lambda: other.finish_reason is not None)
    assert first.right
    assert other.right
    steps = list(zip(engine.plans, waited, strict=True))[frozen:]
    assert len(steps) >= 40
    ending = [seconds for plan, seconds in steps if plan.overwritten_stores]
    assert 0 < max(ending) < 0.055
    assert all(seconds <= 0.001 for plan, seconds in steps if not plan.overwritten_stores)
    daemon.thaw()
    engine.run()
    assert make_engine(daemon).generate("warm", FIRST).external == 0
