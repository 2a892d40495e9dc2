"""Pins: blocks that a store reads are given to no other request before the store has ended, however late that is.

vLLM's model runner V2 zeroes new blocks, and copies into them what was partly hit, as the first thing of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from made_up_model import BLOCK, prompt
from modelless import IMPATIENT, Answer, Engine
from support.daemon import Daemon, wait_until
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvserver.adapters.common.send_queue import DirectSendQueue
from kvserver.adapters.common.specs import ids_of
from kvserver.adapters.common.steps import StepPlan
from kvserver.adapters.vllm.blockpool import PoolHook
from kvserver.adapters.vllm.shortage import PATIENCE

CHUNK = 64
FIRST = prompt(1, 4 * CHUNK)
OTHER = prompt(2, 4 * CHUNK + 50)


@pytest.fixture(params=[True, False], ids=["async", "sync"])
def asynchronous(request):
    return request.param


@pytest.fixture(params=["zeroes", "copies"])
def make_early_writer(request, monkeypatch, make_engine):
    """Start an engine whose runner writes into every new block of a step, by zeroing or by copying, before all else."""
    monkeypatch.setattr(KVCacheConfig, "needs_kv_cache_zeroing", True)

    def make(*args: Any, **options: Any) -> Engine:
        engine: Engine = make_engine(*args, runner=2, **options)
        if request.param == "copies":
            copy_into_new_blocks(engine)
        return engine

    return make


def copy_into_new_blocks(engine: Engine) -> None:
    schedule = engine.scheduler.schedule

    def scheduled() -> Any:
        output = schedule()
        new, output.new_block_ids_to_zero = output.new_block_ids_to_zero or [], None
        output.kv_cache_block_copies = [(block - 1, block) for block in new]
        return output

    engine.scheduler.schedule = scheduled


def freeze_at_store(engine: Engine, daemon: Daemon) -> None:
    """Stop the daemon before it can receive the next store."""

    def before_step(plan: StepPlan) -> None:
        if plan.stores:
            daemon.freeze()
            engine.before_step = lambda plan: None

    engine.before_step = before_step


def begin_late_store(engine: Engine, daemon: Daemon) -> set[int]:
    """Serve a request whose store a stopped daemon has not received when the request is over; the blocks that the store reads."""
    freeze_at_store(engine, daemon)
    first = engine.add("first", FIRST, count=1)
    engine.run(until=lambda: first.finish_reason is not None and bool(engine.stores))
    assert first.right
    return {block for store in engine.stores for block in ids_of(store)}


def serve_another(engine: Engine) -> None:
    another = engine.add("another", prompt(7, BLOCK), count=5)
    engine.run(until=lambda: another.finish_reason is not None)
    assert another.right


def use_all_free_blocks(engine: Engine) -> set[int]:
    """Serve small prompts, too short to be stored or looked up, one after the other; the blocks that they had."""
    used: set[int] = set()
    engine.after_step = lambda plan: used.update(*(row.blocks for row in engine.batch.rows.values()))
    for number in range(engine.num_blocks // 2):
        answer = engine.add(f"small{number}", prompt(100 + number, CHUNK - BLOCK), count=2)
        engine.run(until=lambda answer=answer: answer.finish_reason is not None)
        assert answer.right
    return used


def kept(engine: Engine) -> int:
    """How many blocks are neither free nor any request's."""
    owned = {
        b.block_id
        for m in engine.scheduler.kv_cache_manager.coordinator.single_type_managers
        for blocks in m.req_to_blocks.values()
        for b in blocks
    }
    return engine.num_blocks - 1 - engine.free_blocks - len(owned - {0})


# ---- a late store -----------------------------------------------------------------------------


def test_a_late_store_stores_what_its_request_computed(make_daemon, make_early_writer, make_engine, asynchronous):
    daemon = make_daemon()
    engine = make_early_writer(daemon, asynchronous=asynchronous, num_blocks=44)
    stored = begin_late_store(engine, daemon)
    used = use_all_free_blocks(engine)
    assert len(used) == 43 - len(stored), "the pool is too large for this test"
    assert not used & stored
    daemon.thaw()
    engine.run()
    assert engine.worker.worker.counters["cancelled_stores"] == 0
    assert make_engine(daemon).generate("warm", FIRST).external == 4 * CHUNK - 1


def test_store_without_pins_copies_foreign_bytes_in_this_rig(make_daemon, make_early_writer, make_engine, monkeypatch):
    """The control: what the test above would see of an adapter that forgets the hazard."""
    for name in ("pin", "unpin"):
        monkeypatch.setattr(PoolHook, name, lambda self, block_ids: None)
    daemon = make_daemon()
    engine = make_early_writer(daemon, num_blocks=44)
    stored = begin_late_store(engine, daemon)
    assert use_all_free_blocks(engine) & stored
    daemon.thaw()
    engine.run()
    with pytest.raises(AssertionError, match="attends to foreign KV"):
        make_engine(daemon).generate("warm", FIRST)


def test_stores_of_preempted_requests_store_what_was_computed(make_daemon, make_early_writer, make_engine):
    daemon = make_daemon(copy_delay_us=4000)
    engine = make_early_writer(daemon, num_blocks=30)
    prompts = [prompt(20 + i, 2 * CHUNK + 9) for i in range(3)]
    answers = [engine.add(f"r{i}", tokens, count=80) for i, tokens in enumerate(prompts)]
    engine.run(60)
    assert engine.preemptions
    assert all(answer.right for answer in answers)
    for tokens in prompts:
        make_engine(daemon).generate("warm", tokens)


def test_blocks_of_a_request_that_was_aborted_stay_until_its_store_has_ended(make_daemon, make_engine, asynchronous):
    daemon = make_daemon()
    engine = make_engine(daemon, asynchronous=asynchronous)
    freeze_at_store(engine, daemon)
    answer = engine.add("first", FIRST, count=500)
    engine.run(until=lambda: len(answer.tokens) > 2)
    engine.abort("first")
    serve_another(engine)
    assert kept(engine) == 4 * CHUNK // BLOCK
    daemon.thaw()
    engine.run()
    assert make_engine(daemon).generate("warm", FIRST).external == 4 * CHUNK - 1


def test_blocks_that_a_window_leaves_stay_until_their_store_has_ended(make_daemon, make_engine):
    daemon = make_daemon()
    engine = make_engine(daemon, window=CHUNK, num_blocks=200)
    freeze_at_store(engine, daemon)
    answer = engine.add("first", FIRST, count=2 * CHUNK)
    engine.run(until=lambda: len(answer.tokens) > CHUNK + BLOCK)
    assert kept(engine) >= 2 * CHUNK // BLOCK  # of the two boundaries at the end of the prompt
    daemon.thaw()
    engine.run()
    assert answer.right
    assert engine.worker.worker.counters["cancelled_stores"] == 0
    assert make_engine(daemon, window=CHUNK).generate("warm", FIRST).external == 3 * CHUNK


def test_every_rank_must_have_ended_a_store(make_daemon, make_engine):
    engine = make_engine(make_daemon(), world_size=2)
    late = engine.runners[1].connector
    build, late.build_connector_worker_meta = late.build_connector_worker_meta, lambda: None
    first = engine.add("first", FIRST, count=1)
    engine.run(until=lambda: first.finish_reason is not None)
    wait_until(lambda: engine.step() or engine.worker.worker.counters["store_bytes"], what="the first rank's end")
    serve_another(engine)
    assert kept(engine) == 4 * CHUNK // BLOCK
    late.build_connector_worker_meta = build
    engine.run()


def test_sleep_ends_the_pins_of_its_stores(make_daemon, make_engine):
    daemon = make_daemon()
    engine = make_engine(daemon, extra={"kvserver.unregister_timeout_ms": 100})
    begin_late_store(engine, daemon)
    engine.worker.unregister_kv_caches()
    engine.run(5)
    daemon.thaw()
    daemon.wait_for_accounting(tickets=0)
    assert daemon.status()["l1"]["chunks"] == 0


def test_a_session_that_ends_ends_the_pins_of_its_stores(make_daemon, make_engine):
    daemon = make_daemon()
    engine = make_engine(daemon)
    begin_late_store(engine, daemon)
    daemon.kill()
    engine.run(5)


# ---- not for ever, and not too many -----------------------------------------------------------


def test_a_request_that_needs_the_blocks_waits_for_the_cancel_of_the_store(make_daemon, make_engine, asynchronous):
    """Not for its end: the daemon hangs. Of 22 blocks the store keeps 16."""
    daemon = make_daemon()
    engine = make_engine(daemon, asynchronous=asynchronous, num_blocks=23)
    begin_late_store(engine, daemon)
    other = engine.add("other", prompt(3, CHUNK - 1), count=4 * CHUNK)
    steps = len(engine.plans)
    engine.run(until=lambda: other.finish_reason is not None)
    assert other.right
    assert engine.preemptions == 0
    assert len(engine.plans) - steps < 4 * CHUNK + 6
    assert [plan.abort_stores for plan in engine.plans if plan.abort_stores] == [[engine.stores[0].copy_id]]
    assert engine.worker.worker.counters["cancelled_stores"] == 1
    daemon.thaw()
    engine.run()
    assert make_engine(daemon).generate("warm", FIRST).external == 0


def test_a_long_prompt_waits_for_the_cancel_though_half_of_the_pool_is_free(make_daemon, make_engine):
    daemon = make_daemon()
    engine = make_engine(daemon, num_blocks=100, extra=IMPATIENT)
    begin_late_store(engine, daemon)
    answer = engine.add("long", prompt(4, 90 * BLOCK), count=2)
    engine.run(5, until=lambda: answer.finish_reason is not None)
    assert answer.right
    assert engine.stores[0].copy_id in [store for plan in engine.plans for store in plan.abort_stores]
    daemon.thaw()


def test_a_load_into_blocks_that_a_store_keeps_waits_for_the_cancel_of_the_store(make_daemon, make_engine):
    daemon = make_daemon(pauses=True)
    make_engine(daemon).generate("cold", OTHER, seconds=30)
    engine = make_engine(daemon, num_blocks=23)
    with daemon.paused_copies():
        first = engine.add("first", FIRST, count=1)
        engine.run(
            until=lambda: bool(first.finish_reason and engine.stores) and engine.connector.has_pending_push_work()
        )
        other = engine.add("other", OTHER, count=3)
        engine.run(until=lambda: bool(engine.loads))
    engine.run()
    assert other.right
    assert other.external == 4 * CHUNK
    assert engine.worker.worker.counters["cancelled_stores"] > 0
    assert make_engine(daemon).generate("warm", FIRST).external == 0


def test_requests_are_served_as_blocks_are_needed_beside_stores_that_do_not_end(make_daemon, make_engine, asynchronous):
    """No store ends by itself, so slow is the daemon. A cancel takes effect with the report of its step."""
    daemon = make_daemon(copy_delay_us=1_000_000)
    engine = make_engine(daemon, asynchronous=asynchronous, num_blocks=100)
    answers = [engine.add(f"r{i}", prompt(200 + i, CHUNK * (1 + i % 3) + 9), count=2 + 5 * i) for i in range(24)]
    idle: list[bool] = []
    engine.after_step = lambda plan: idle.append(plan.idle)
    engine.run(60, until=lambda: all(answer.finish_reason is not None for answer in answers[:-8]))
    assert all(answer.right for answer in answers[:-8])
    assert engine.worker.worker.counters["cancelled_stores"] > 0
    assert longest_row(idle) <= PATIENCE + 4, "no step computes while requests wait for stores"


def longest_row(steps: list[bool]) -> int:
    longest = row = 0
    for idle in steps:
        row = row + 1 if idle else 0
        longest = max(longest, row)
    return longest


def test_an_engine_with_room_keeps_the_blocks_of_all_its_stores(make_daemon, make_engine):
    daemon = make_daemon()
    engine = make_engine(daemon, num_blocks=100)
    begin_late_store(engine, daemon)
    serve_another(engine)
    assert kept(engine) == 16 > 100 // 16
    daemon.thaw()
    engine.run()
    assert engine.worker.worker.counters["cancelled_stores"] == 0
    assert make_engine(daemon).generate("warm", FIRST).external == 4 * CHUNK - 1


def test_a_hung_daemon_adds_nothing_to_a_worker_step(make_daemon, make_engine, monkeypatch):
    """Only a step that computes nothing waits for an answer, for 1 ms."""
    waited: list[float] = []  # seconds, by step
    wait: Callable[[DirectSendQueue, float], None] = DirectSendQueue.wait

    def recorded(queue: DirectSendQueue, seconds: float) -> None:
        waited[-1] += seconds
        wait(queue, seconds)

    monkeypatch.setattr(DirectSendQueue, "wait", recorded)
    daemon = make_daemon()
    engine = make_engine(daemon, num_blocks=23, extra=IMPATIENT)
    engine.after_step = lambda plan: waited.append(0.0)
    waited.append(0.0)
    begin_late_store(engine, daemon)
    frozen = len(engine.plans)
    other = engine.add("other", OTHER, count=40)
    engine.run(until=lambda: other.finish_reason is not None)
    assert other.right
    steps = list(zip(engine.plans, waited, strict=False))[frozen:]
    assert len(steps) >= 40
    assert {seconds for plan, seconds in steps if not plan.idle} == {0.0}
    assert max(seconds for _, seconds in steps) <= 0.001
    daemon.thaw()
    engine.run()
    assert make_engine(daemon).generate("warm", FIRST).external == 0


# ---- resets -----------------------------------------------------------------------------------


@pytest.mark.parametrize("runs", [False, True], ids=["idle", "running"])
def test_a_reset_succeeds_beside_stores_and_cancels_them(make_daemon, make_engine, runs):
    daemon = make_daemon()
    engine = make_engine(daemon, asynchronous=False)
    stored = begin_late_store(engine, daemon)
    answer: Answer | None = engine.add("runs", prompt(5, 9), count=30) if runs else None
    if answer is not None:
        engine.run(until=lambda: len(answer.tokens) > 3)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert kept(engine) == len(stored), "until the worker has cancelled the store"
    engine.run(5)
    assert answer is None or answer.right
    assert engine.worker.worker.counters["cancelled_stores"] == 1
    daemon.thaw()
    daemon.wait_for_accounting(tickets=0)
    assert daemon.status()["l1"]["chunks"] == 0


def test_a_reset_that_keeps_the_weights_keeps_the_stores(make_daemon, make_forgetful_engine):
    daemon = make_daemon()
    engine = make_forgetful_engine(daemon)
    begin_late_store(engine, daemon)
    assert engine.scheduler.reset_prefix_cache()
    daemon.thaw()
    engine.run()
    assert make_forgetful_engine(daemon).generate("warm", FIRST).external == 4 * CHUNK - 1
