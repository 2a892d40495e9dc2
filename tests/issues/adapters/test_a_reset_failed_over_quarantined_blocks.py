"""Quarantined blocks counted as used in vLLM's pool, so `reset_prefix_cache` failed and `pause_generation(clear_cache=True)`
raised, although no prefix of theirs can be found. A reset succeeds now, and they stay out of use.
"""

from __future__ import annotations

import pytest
from made_up_model import BLOCK, prompt
from modelless import Engine
from support.daemon import Daemon, wait_until
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from kvserver.adapters.common.specs import ids_of

TOKENS = prompt(1, 266)


def begin_load(daemon: Daemon, make_engine, **options) -> Engine:
    """An engine with `warm` loading, in a daemon that hangs with some of its bytes copied. 60 blocks, 59 usable."""
    make_engine(daemon).generate("cold", TOKENS)
    engine = make_engine(daemon, num_blocks=60, extra={"kvserver.load_timeout_ms": 800}, **options)
    with daemon.paused_copies():
        engine.begin_load("warm", TOKENS)
        daemon.freeze()
    engine.lose_patience()
    return engine


def reset(engine: Engine) -> bool:
    """As EngineCore's pause does when it is complete."""
    return engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)


def pause(engine: Engine) -> bool:
    """`pause_generation(mode="abort", clear_cache=True)`: EngineCoreProc steps until nothing is left, then resets."""
    engine.abort("warm")
    engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    engine.run(until=lambda: not engine.busy)
    return reset(engine)


@pytest.mark.parametrize("ends_by", ["acknowledgement", "death"])
def test_a_pause_that_clears_the_cache_succeeds_and_the_blocks_stay_out_of_use(make_daemon, make_engine, ends_by):
    daemon = make_daemon(pauses=True)
    engine = begin_load(daemon, make_engine)
    quarantined = set(ids_of(engine.loads[0]))

    assert pause(engine), "bounded by the load's timeout: the daemon does not run"
    assert engine.free_blocks == 59 - len(quarantined)

    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    assert not engine.use_free_blocks(8) & quarantined
    assert reset(engine), "as often as it is requested"
    assert engine.free_blocks == 59 - len(quarantined)

    if ends_by == "death":
        daemon.kill()
    else:
        daemon.thaw()
    wait_until(lambda: engine.generate_free("tick") == 59, 10, "the blocks come back")
    assert engine.use_free_blocks(8) & quarantined
    engine.run()
    assert reset(engine)


def test_a_reset_forgets_what_was_cached_beside_quarantined_blocks(make_daemon, make_engine):
    daemon = make_daemon(pauses=True)
    engine = begin_load(daemon, make_engine)
    assert pause(engine)
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    again = prompt(9, 5 * BLOCK)
    for name, local in (("first", 0), ("second", 4 * BLOCK)):
        answer = engine.add(name, again)
        engine.run(until=lambda answer=answer: answer.finish_reason is not None)
        assert answer.local == local
    engine.finish_steps()
    assert reset(engine)
    answer = engine.add("third", again)
    engine.run(until=lambda: answer.finish_reason is not None)
    assert answer.local == 0
    daemon.thaw()
    wait_until(lambda: engine.generate_free("tick") == 59, 10, "the blocks come back")


def test_a_reset_still_fails_while_requests_use_blocks(make_daemon, make_engine):
    """What is beside the quarantined blocks keeps its KV: vLLM must receive that it does."""
    daemon = make_daemon(pauses=True)
    engine = begin_load(daemon, make_engine)
    quarantined = len(ids_of(engine.loads[0]))
    assert pause(engine)
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    answer = engine.add("running", prompt(3, 5 * BLOCK), count=20)
    engine.run(until=lambda: len(answer.tokens) > 3)
    used = 59 - quarantined - engine.free_blocks
    assert used > 0
    assert not engine.scheduler.reset_prefix_cache()
    assert engine.free_blocks == 59 - quarantined - used
    engine.run(until=lambda: answer.finish_reason is not None)
    assert answer.right
    daemon.thaw()
    wait_until(lambda: engine.generate_free("tick") == 59, 10, "the blocks come back")
