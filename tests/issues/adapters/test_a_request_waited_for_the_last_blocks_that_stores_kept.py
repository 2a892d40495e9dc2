"""Stores were cancelled down to a share of the pool, a sixteenth, and not down to what the engine needed. Beside a daemon that hung, a
request that needed nearly the whole pool waited out the store timeout, and a running one was preempted."""

from __future__ import annotations

import time

import pytest
from hybrids import HYBRIDS
from made_up_model import BLOCK, prompt
from modelless import IMPATIENT, Answer, Engine
from support.daemon import Daemon

CHUNK = 64
SECONDS = 3.0  # far less than the store timeout of 60 s
NEVER = {**IMPATIENT, "kvserver.store_timeout_ms": 60_000}


@pytest.fixture(params=[True, False], ids=["async", "sync"])
def asynchronous(request):
    return request.param


def begin_late_store(engine: Engine, daemon: Daemon) -> None:
    """Serve a request of one chunk whose store a stopped daemon does not receive. It keeps 4 blocks, less than a sixteenth of 100."""

    def before_step(plan) -> None:
        if plan.stores:
            daemon.freeze()
            engine.before_step = lambda plan: None

    engine.before_step = before_step
    first = engine.add("first", prompt(1, CHUNK), count=1)
    engine.run(until=lambda: first.finish_reason is not None and bool(engine.stores))
    assert first.right


def served(engine: Engine, answer: Answer) -> bool:
    engine.run(SECONDS, until=lambda: answer.finish_reason is not None)
    return answer.right


def test_a_request_that_needs_the_whole_pool_is_served_beside_a_hung_daemon(make_daemon, make_engine, asynchronous):
    daemon = make_daemon()
    engine = make_engine(daemon, asynchronous=asynchronous, num_blocks=100, extra=NEVER)
    begin_late_store(engine, daemon)
    assert served(engine, engine.add("whole", prompt(2, 98 * BLOCK), count=4))
    assert engine.preemptions == 0
    daemon.thaw()


def test_a_request_without_cache_is_served_as_well(make_daemon, make_engine):
    """The connector knows no such request, but it needs blocks as others do."""
    daemon = make_daemon()
    engine = make_engine(daemon, num_blocks=100, extra=NEVER)
    begin_late_store(engine, daemon)
    engine.connector.scheduler._variants.of = lambda request: None
    assert served(engine, engine.add("whole", prompt(2, 98 * BLOCK), count=4))
    daemon.thaw()


def test_a_running_request_is_not_preempted_for_blocks_that_stores_keep(make_daemon, make_engine, asynchronous):
    daemon = make_daemon()
    engine = make_engine(daemon, asynchronous=asynchronous, num_blocks=100, extra=NEVER)
    begin_late_store(engine, daemon)
    assert served(engine, engine.add("grows", prompt(2, 90 * BLOCK), count=9 * BLOCK - 2))
    assert engine.preemptions == 0
    daemon.thaw()


def wait_for_blocks(engine: Engine, tokens: list[int]) -> Answer:
    """Submit a prompt that no lookup is answered for any more."""
    answer = engine.add("waits", tokens, count=2)
    engine.step()
    time.sleep(0.15)  # the lookup's timeout
    for _ in range(30):
        engine.step()
    return answer


def test_stores_are_cancelled_for_one_step_of_a_prompt_where_vllm_admits_that(make_daemon, make_engine):
    """It reserves no blocks for the whole prompt. The first step needs 32, of 30 free ones."""

    def adjust(config, caches):
        config.scheduler_config.scheduler_reserve_full_isl = False

    daemon = make_daemon()
    engine = make_engine(daemon, num_blocks=100, max_tokens_per_step=512, adjust=adjust, extra=NEVER)
    begin_late_store(engine, daemon)
    runs = engine.add("runs", prompt(2, 64 * BLOCK), count=20 * BLOCK)
    engine.run(until=lambda: len(runs.tokens) > 2)
    wait_for_blocks(engine, prompt(3, 80 * BLOCK))
    assert engine.worker.worker.counters["cancelled_stores"] == 1
    assert runs.finish_reason is None
    daemon.thaw()


def is_placed(engine: Engine, tokens: list[int]) -> bool:
    engine.add("tried", tokens, count=1)
    for _ in range(10):
        engine.step()
    return engine.status_of("tried") != "WAITING"


@pytest.mark.parametrize("name", ["gpt-oss", "llama4", "qwen3-next", "nemotron"])
def test_a_request_of_a_hybrid_that_needs_the_whole_pool_is_served(make_daemon, make_engine, name):
    daemon, hybrid, tokens = make_daemon(), HYBRIDS[name], prompt(2, 10 * CHUNK)
    roomy = make_engine(daemon, **hybrid.options)
    free: list[int] = []
    roomy.after_step = lambda plan: free.append(roomy.free_blocks)
    roomy.generate("measured", tokens)
    sizes = range(hybrid.num_blocks - min(free), hybrid.num_blocks)
    options = [{**hybrid.options, "num_blocks": blocks} for blocks in sizes]
    least = next(each for each in options if is_placed(make_engine("ipc:///nowhere", **each), tokens))
    engine = make_engine(daemon, extra=NEVER, **least)
    begin_late_store(engine, daemon)
    assert served(engine, engine.add("whole", prompt(3, len(tokens))))
    daemon.thaw()


def test_a_request_that_was_loaded_is_served_beside_stores_that_keep_blocks(make_daemon, make_engine):
    """vLLM asks no second time about it. Another request takes the blocks that it needs for its rest, and leaves them to a slow store."""
    daemon = make_daemon(copy_delay_us=20_000)
    loaded = prompt(4, CHUNK)
    make_engine(daemon).generate("cold", loaded)
    daemon.wait_for_accounting(tickets=0)
    engine = make_engine(daemon, num_blocks=100, extra={"kvserver.store_timeout_ms": 60_000})
    warm = engine.begin_load("warm", loaded + prompt(5, 40 * BLOCK))
    other = engine.add("other", prompt(6, 80 * BLOCK), count=1)
    engine.run(until=lambda: other.finish_reason is not None and warm.finish_reason is not None)
    assert warm.right
    assert warm.external == CHUNK
    assert engine.worker.worker.counters["cancelled_stores"] > 0


def test_stores_go_on_while_a_request_waits_that_needs_more_than_they_keep(make_daemon, make_engine):
    """Their cancel would not help: another request has the blocks."""
    daemon = make_daemon()
    engine = make_engine(daemon, num_blocks=100, extra=NEVER)
    begin_late_store(engine, daemon)
    runs = engine.add("runs", prompt(2, 40 * BLOCK), count=10 * BLOCK)
    engine.run(until=lambda: len(runs.tokens) > 2)
    waits = wait_for_blocks(engine, prompt(3, 90 * BLOCK))
    assert engine.status_of("waits") == "WAITING"
    assert engine.worker.worker.counters["cancelled_stores"] == 0
    assert runs.finish_reason is None
    daemon.thaw()
    engine.run(until=lambda: waits.finish_reason is not None)


def test_a_store_of_a_healthy_daemon_ends_before_it_is_cancelled(make_daemon, make_engine, asynchronous):
    """A request waits for the blocks of the one before it, which a store keeps for some steps. They take as long as a model's: four steps
    without a model are over before a busy machine has run the daemon once."""
    daemon = make_daemon()
    engine = make_engine(daemon, asynchronous=asynchronous, num_blocks=30)
    engine.after_step = lambda plan: time.sleep(0.02)
    answers = [engine.add(f"r{i}", prompt(10 + i, 26 * BLOCK), count=2) for i in range(6)]
    engine.run(30)
    assert all(answer.right for answer in answers)
    assert engine.worker.worker.counters["cancelled_stores"] == 0
