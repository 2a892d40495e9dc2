"""`pause_generation(mode="keep", clear_cache=True)` raised while a load was in flight, since requests that wait for a load have blocks. Such a
load is cancelled now, and vLLM begins its request again: nothing of before the reset is used."""

from __future__ import annotations

import pytest
from engine_core import EngineCore
from hybrids import HYBRIDS
from made_up_model import BLOCK, prompt
from modelless import Engine
from support.daemon import Daemon, wait_until

from kvserver.adapters.vllm.support import TransferResults

pytestmark = pytest.mark.skipif(TransferResults is None, reason="this vLLM begins no request again after a failed load")

CHUNK = 64
TOKENS = prompt(1, 4 * CHUNK + 10)
RUNS = prompt(2, 3 * BLOCK)


@pytest.fixture(params=[True, False], ids=["async", "sync"])
def asynchronous(request):
    return request.param


@pytest.fixture(params=[1, 2], ids=["one rank", "two ranks"])
def ranks(request):
    return request.param


def store(daemon: Daemon, make_engine, **options) -> None:
    make_engine(daemon, **options).generate("cold", TOKENS)
    daemon.wait_for_accounting(tickets=0)


def end_load_unseen(engine: Engine, name: str) -> None:
    """Step until vLLM has the report of the load's end, which the next pass would use."""
    engine.run(until=lambda: name in engine.received)
    assert engine.status_of(name) == "WAITING_FOR_REMOTE_KVS"


def change_weights(engine: Engine) -> None:
    engine.weights = 1
    for answer in engine.answers.values():
        answer.weights = 1


@pytest.mark.parametrize("at", ["is copied", "has ended"])
def test_request_is_right_after_a_pause_clears_the_cache_beside_its_load(
    make_daemon, make_engine, asynchronous, ranks, at
):
    daemon = make_daemon(pauses=True)
    store(daemon, make_engine, world_size=ranks)
    engine = make_engine(daemon, asynchronous=asynchronous, world_size=ranks)
    core = EngineCore(engine)
    with daemon.paused_copies():
        warm = engine.begin_load("warm", TOKENS)
        if at == "is copied":
            core.operate(lambda: core.pause_scheduler(mode="keep", clear_cache=True))
    if at == "has ended":
        end_load_unseen(engine, "warm")
        core.operate(lambda: core.pause_scheduler(mode="keep", clear_cache=True))
    change_weights(engine)  # a wrong block fails the step that uses it
    core.resume_scheduler()
    engine.run()
    assert warm.right
    assert engine.free_blocks == engine.num_blocks - 1


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3-next"])
def test_request_of_a_hybrid_is_right_after_a_pause_clears_the_cache_beside_its_load(make_daemon, make_engine, name):
    daemon, hybrid = make_daemon(pauses=True), HYBRIDS[name]
    store(daemon, make_engine, **hybrid.options)
    engine = make_engine(daemon, **hybrid.options)
    core = EngineCore(engine)
    with daemon.paused_copies():
        warm = engine.begin_load("warm", TOKENS)
        core.operate(lambda: core.pause_scheduler(mode="keep", clear_cache=True))
    change_weights(engine)
    core.resume_scheduler()
    engine.run()
    assert warm.right


def test_blocks_of_its_own_that_a_loading_request_shares_are_computed_again(make_daemon, make_engine):
    daemon = make_daemon(pauses=True)
    store(daemon, make_engine)
    engine = make_engine(daemon)
    core = EngineCore(engine)
    engine.generate("part", TOKENS[: CHUNK + 3])
    with daemon.paused_copies():
        first = engine.begin_load("first", TOKENS)
        second = engine.begin_load("second", [*TOKENS[: 3 * CHUNK], 9])
        core.operate(lambda: core.pause_scheduler(mode="keep", clear_cache=True))
    change_weights(engine)
    core.resume_scheduler()
    engine.run()
    assert first.right
    assert second.right
    assert 0 in (first.local, second.local), "one of them computes all"


def test_running_request_and_load_are_both_right_after_a_pause_clears_the_cache(make_daemon, make_engine, asynchronous):
    daemon = make_daemon(pauses=True)
    store(daemon, make_engine)
    engine = make_engine(daemon, asynchronous=asynchronous)
    core = EngineCore(engine)
    runs = engine.add("runs", RUNS, count=40)
    engine.run(until=lambda: len(runs.tokens) > 3)
    with daemon.paused_copies():
        warm = engine.begin_load("warm", TOKENS)
        core.operate(lambda: core.pause_scheduler(mode="keep", clear_cache=True))
    core.resume_scheduler()
    engine.run()
    assert runs.right
    assert warm.right


@pytest.mark.parametrize("operation", ["sleep", "release"])
def test_loading_request_is_right_after_sleep_and_after_a_release_of_memory(make_daemon, make_engine, operation):
    daemon = make_daemon(pauses=True)
    store(daemon, make_engine)
    engine = make_engine(daemon)
    core = EngineCore(engine)
    with daemon.paused_copies():
        warm = engine.begin_load("warm", TOKENS)
    end_load_unseen(engine, "warm")
    if operation == "sleep":
        core.operate(lambda: core.sleep(level=1, mode="keep"))
    else:
        core.operate(lambda: core.pause_scheduler(mode="keep", clear_cache=False))
        core.operate(core.release_kv_cache_memory)
    for runner in engine.runners:
        for layer in runner.kv:
            layer[:] = 0
    core.operate(lambda: core.wake_up(None))
    engine.run()
    assert warm.right


@pytest.mark.parametrize("at", ["is copied", "has ended"])
def test_a_request_that_begins_again_may_be_aborted(make_daemon, make_engine, at):
    daemon = make_daemon(pauses=True)
    store(daemon, make_engine)
    engine = make_engine(daemon)
    core = EngineCore(engine)
    with daemon.paused_copies():
        engine.begin_load("warm", TOKENS)
        if at == "is copied":
            core.operate(lambda: core.pause_scheduler(mode="keep", clear_cache=True))
    if at == "has ended":
        end_load_unseen(engine, "warm")
        core.operate(lambda: core.pause_scheduler(mode="keep", clear_cache=True))
    engine.abort("warm")
    core.resume_scheduler()
    engine.run()
    assert engine.generate("again", TOKENS).right


def test_pause_beside_the_load_of_an_aborted_request_frees_all_blocks(make_daemon, make_engine):
    """The pause waits for the load's end: its request is not over before."""
    daemon = make_daemon(pauses=True)
    store(daemon, make_engine)
    engine = make_engine(daemon)
    core = EngineCore(engine)
    with daemon.paused_copies():
        engine.begin_load("warm", TOKENS)
        engine.abort("warm")
        core.operate(lambda: core.pause_scheduler(mode="keep", clear_cache=True))
    core.resume_scheduler()
    wait_until(lambda: engine.generate_free("tick") == engine.num_blocks - 1, 10, "all blocks are free")


def test_reset_beside_the_load_of_an_aborted_request_frees_all_blocks(make_daemon, make_engine):
    daemon = make_daemon(pauses=True)
    store(daemon, make_engine)
    engine = make_engine(daemon)
    with daemon.paused_copies():
        engine.begin_load("warm", TOKENS)
        engine.abort("warm")
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        assert engine.free_blocks < engine.num_blocks - 1
    wait_until(lambda: engine.generate_free("tick") == engine.num_blocks - 1, 10, "all blocks are free")


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_loading_request_is_right_after_a_pause_in_the_other_modes(make_daemon, make_engine, mode):
    daemon = make_daemon(pauses=True)
    store(daemon, make_engine)
    engine = make_engine(daemon)
    core = EngineCore(engine)
    with daemon.paused_copies():
        warm = engine.begin_load("warm", TOKENS)
    core.operate(lambda: core.pause_scheduler(mode=mode, clear_cache=True))
    core.resume_scheduler()
    engine.run()
    assert warm.right


def test_a_reset_that_keeps_the_weights_loads_the_request_again(make_daemon, make_forgetful_engine):
    daemon = make_daemon(pauses=True)
    store(daemon, make_forgetful_engine)
    engine = make_forgetful_engine(daemon)
    with daemon.paused_copies():
        warm = engine.begin_load("warm", TOKENS)
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.run()
    assert warm.right
    assert make_forgetful_engine(daemon).generate("other", TOKENS).external == 4 * CHUNK
    assert engine.generate("again", [*TOKENS[: 4 * CHUNK], 5]).right


def test_a_reset_that_is_to_disturb_no_request_fails_beside_a_load(make_daemon, make_forgetful_engine):
    daemon = make_daemon(pauses=True)
    store(daemon, make_forgetful_engine)
    engine = make_forgetful_engine(daemon)
    with daemon.paused_copies():
        warm = engine.begin_load("warm", TOKENS)
        before = engine.free_blocks
        assert not engine.scheduler.reset_prefix_cache()
        assert engine.free_blocks == before
    engine.run()
    assert (warm.right, warm.external) == (True, 4 * CHUNK)


def test_a_reset_still_fails_beside_a_request_that_runs(make_daemon, make_engine):
    daemon = make_daemon(pauses=True)
    store(daemon, make_engine)
    engine = make_engine(daemon)
    runs = engine.add("runs", RUNS, count=40)
    engine.run(until=lambda: len(runs.tokens) > 3)
    with daemon.paused_copies():
        warm = engine.begin_load("warm", TOKENS)
        before = engine.free_blocks
        assert not engine.scheduler.reset_prefix_cache()
        assert engine.free_blocks == before
    engine.run()
    assert runs.right
    assert warm.right
    wait_until(lambda: engine.generate_free("tick") == engine.num_blocks - 1, 10, "all blocks are free")
