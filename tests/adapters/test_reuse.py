"""What one engine stores another one loads: how many tokens, and every byte of them.

`Engine.generate` asserts the tokens, and every step that no request attends to a wrong byte.
"""

from __future__ import annotations

import pytest
from made_up_model import BLOCK, continuation, prompt
from support.daemon import wait_until

from kvserver.adapters.common.specs import ids_of
from kvserver.protocol import KEY_BYTES

CHUNK = 64  # tokens: the test daemon's chunk_tokens


@pytest.fixture(params=["async", "sync", "async-V2"])
def how(request):
    """Which scheduler. For vLLM's second model runner, resumed requests come as new ones."""
    return {"asynchronous": request.param != "sync", "runner": 2 if "V2" in request.param else 1}


def test_a_second_engine_loads_what_the_first_one_stored(make_daemon, make_engine, how):
    daemon = make_daemon()
    cold = make_engine(daemon, **how)
    tokens = prompt(1, 3 * CHUNK + 20)
    assert cold.generate("cold", tokens).external == 0

    warm = make_engine(daemon, **how)
    answer = warm.generate("warm", tokens)
    assert (answer.local, answer.external) == (0, 3 * CHUNK)
    assert warm.received == ["warm"]
    daemon.wait_for_accounting(tickets=0, pins=0, leases=0)


def test_a_prompt_of_whole_chunks_leaves_its_last_token_to_compute(make_daemon, make_engine, how):
    daemon = make_daemon()
    tokens = prompt(2, 2 * CHUNK)
    make_engine(daemon, **how).generate("cold", tokens)
    warm = make_engine(daemon, **how)
    assert warm.generate("warm", tokens).external == 2 * CHUNK - 1


def test_only_whole_chunks_are_found(make_daemon, make_engine):
    daemon = make_daemon()
    tokens = prompt(3, 3 * CHUNK)
    make_engine(daemon).generate("cold", tokens[: 2 * CHUNK + BLOCK], count=1)
    assert make_engine(daemon).generate("warm", tokens).external == 2 * CHUNK


@pytest.mark.parametrize("blocks", [1, 4, 5, 7, 8])
def test_blocks_that_the_engine_has_itself_are_left_out_of_a_load(make_daemon, make_engine, how, blocks):
    """Other requests read them: a load must not write there, wherever in a chunk the local hit ends."""
    daemon = make_daemon()
    tokens = prompt(4, 3 * CHUNK + 10)
    make_engine(daemon).generate("cold", tokens)

    warm = make_engine(daemon, **how)
    held = warm.add("held", [*tokens[: blocks * BLOCK], 5], count=40)
    warm.run(until=lambda: len(held.tokens) > 2)
    answer = warm.add("warm", tokens)
    warm.run()
    assert held.right
    assert answer.right
    assert (answer.local, answer.external) == (blocks * BLOCK, 3 * CHUNK - blocks * BLOCK)
    load = warm.loads[-1]
    assert load.skip_blocks == blocks % (CHUNK // BLOCK)
    assert len(ids_of(load)) == 12 - blocks


def test_a_longer_local_hit_needs_no_load(make_daemon, make_engine):
    daemon = make_daemon()
    tokens = prompt(5, 2 * CHUNK + 2 * BLOCK)
    engine = make_engine(daemon)
    engine.generate("first", tokens)
    answer = engine.generate("second", tokens)
    assert (answer.local, answer.external) == (2 * CHUNK + BLOCK, 0)
    assert not engine.loads


def test_an_engine_that_has_a_prompt_itself_waits_for_no_answer(make_daemon, make_engine):
    """Its lookup could find no block more; the daemon hangs, and a lookup is given up after 15 s."""
    daemon = make_daemon()
    tokens = prompt(6, 2 * CHUNK + 2 * BLOCK)
    engine = make_engine(daemon)
    engine.generate("first", tokens)
    daemon.freeze()
    answer = engine.add("second", tokens)
    engine.run(10, until=lambda: answer.finish_reason is not None)
    assert (answer.local, answer.external, answer.right) == (2 * CHUNK + BLOCK, 0, True)
    daemon.thaw()
    engine.run()


def test_chunked_prefill_stores_chunks_as_they_get_full(make_daemon, make_engine, how):
    daemon = make_daemon()
    tokens = prompt(6, 5 * CHUNK + 7)
    cold = make_engine(daemon, **how, max_tokens_per_step=48)
    cold.generate("cold", tokens)
    assert len(cold.stores) >= 5
    assert sum(len(store.keys) // 32 for store in cold.stores) == 5, "a chunk was sent twice"
    warm = make_engine(daemon, **how, max_tokens_per_step=48)
    assert warm.generate("warm", tokens).external == 5 * CHUNK


def test_generated_tokens_are_stored_too(make_daemon, make_engine, how):
    daemon = make_daemon()
    tokens = prompt(7, CHUNK)
    cold = make_engine(daemon, **how)
    cold.generate("cold", tokens, count=2 * CHUNK + 5)
    longer = tokens + continuation(tokens, 2 * CHUNK + 5)
    assert make_engine(daemon).generate("warm", longer).external == 3 * CHUNK


def test_several_requests_load_the_same_prefix_at_once(make_daemon, make_engine, how):
    daemon = make_daemon(copy_delay_us=500)
    shared = prompt(8, 2 * CHUNK)
    make_engine(daemon).generate("cold", [*shared, 3])
    warm = make_engine(daemon, **how)
    answers = [warm.add(f"warm{i}", shared + prompt(100 + i, 30)) for i in range(5)]
    warm.run()
    assert [answer.external for answer in answers] == [2 * CHUNK] * 5
    assert all(answer.right for answer in answers)
    assert sorted(warm.received) == [f"warm{i}" for i in range(5)]


@pytest.mark.parametrize("drafts", [1, 3])
def test_rejected_drafts_are_never_stored(make_daemon, make_engine, how, drafts):
    daemon = make_daemon()
    tokens = prompt(9, CHUNK + 3)
    cold = make_engine(daemon, **how, drafts=drafts)
    cold.generate("cold", tokens, count=4 * CHUNK)
    longer = tokens + continuation(tokens, 4 * CHUNK)
    warm = make_engine(daemon, **how, drafts=drafts)
    assert warm.generate("warm", longer).external == 5 * CHUNK


def stored(daemon, engine):
    """Wait for the daemon: a store that has not ended is cancelled if other requests need its blocks."""

    def done():
        received = sum(instance["requests"]["stores"] for instance in daemon.status()["instances"])
        return received >= len(engine.stores) and not daemon.accounting()["tickets"]

    wait_until(done, what="the stores of this step have ended")


def test_preempted_requests_go_on_and_load_what_they_had_stored(make_daemon, make_engine, how):
    daemon = make_daemon()
    engine = make_engine(daemon, **how, num_blocks=36)
    engine.after_step = lambda plan: stored(daemon, engine) if plan.stores else None
    answers = [engine.add(f"r{i}", prompt(20 + i, 2 * CHUNK + 9), count=100) for i in range(4)]
    engine.run(60)
    assert engine.preemptions, "nothing was preempted: the pool is too large for this test"
    assert all(answer.right for answer in answers)
    assert engine.loads, "no preempted request loaded its own prefix"
    assert len(engine.received) == len(engine.loads)
    for i in range(4):
        assert make_engine(daemon).generate("again", prompt(20 + i, 2 * CHUNK + 9)).external == 2 * CHUNK


def test_of_a_window_shorter_than_a_chunk_the_end_of_the_kept_chunks_is_stored(make_daemon, make_engine):
    """In steps of a block a window of a block has moved past a chunk's beginning before its end is computed."""
    daemon = make_daemon()
    tokens = prompt(10, 6 * CHUNK)
    cold = make_engine(daemon, window=BLOCK, max_tokens_per_step=BLOCK)
    cold.generate("cold", tokens, count=3)
    assert [(len(store.keys) // KEY_BYTES, len(ids_of(store))) for store in cold.stores] == [(1, 1), (1, 1)]
    warm = make_engine(daemon, window=BLOCK, max_tokens_per_step=BLOCK)
    assert warm.generate("warm", tokens, count=3).external == 5 * CHUNK
    further = make_engine(daemon, window=BLOCK, max_tokens_per_step=BLOCK)
    assert further.generate("goes on", [*tokens, 5, 6]).external == 6 * CHUNK


def test_blocks_that_a_sliding_window_gave_up_are_not_loaded(make_daemon, make_engine):
    daemon = make_daemon()
    tokens = prompt(10, 6 * CHUNK)
    make_engine(daemon, window=40, max_tokens_per_step=32).generate("cold", tokens, count=3)
    warm = make_engine(daemon, window=40, max_tokens_per_step=32)
    assert warm.generate("warm", tokens, count=3).external > 0
    (load,) = warm.loads
    assert 0 not in ids_of(load)
    assert warm.received == ["warm"]


def test_a_sliding_window_loads_the_end_of_its_prefix_only(make_daemon, make_engine):
    """In one step the whole prompt has its blocks, so that all is stored; a load brings the window's ones."""
    daemon = make_daemon()
    tokens = prompt(11, 3 * CHUNK + 5)
    make_engine(daemon, window=40).generate("cold", tokens, count=3)
    warm = make_engine(daemon, window=40)
    answer = warm.generate("warm", tokens, count=3)
    assert answer.external == 3 * CHUNK
    assert len(ids_of(warm.loads[0])) < 12


def test_an_idle_engine_steps_until_its_stores_have_ended(make_daemon, make_engine):
    daemon = make_daemon(pauses=True)
    engine = make_engine(daemon)
    engine.run()  # its first step
    with daemon.paused_copies():
        answer = engine.add("r", prompt(12, 3 * CHUNK), count=1)
        assert not engine.connector.has_pending_push_work()
        engine.run(until=lambda: answer.finish_reason is not None)
        assert engine.connector.has_pending_push_work()
        assert engine.scheduler.has_requests()
    engine.run()
    assert not engine.connector.has_pending_push_work()
    assert daemon.status()["l1"]["chunks"] == 3


def test_the_server_is_notified_of_every_block_and_request(make_daemon, make_engine):
    daemon = make_daemon()
    engine = make_engine(daemon)
    for i in range(3):
        engine.generate(f"r{i}", prompt(30 + i, 2 * CHUNK))
    engine.generate("last", prompt(33, 5))  # what ends with a step is reported in the next one
    counts = daemon.status()["instances"][0]["requests"]
    assert counts["ended_requests"] >= 3
    assert counts["sequence_gaps"] == 0


def test_with_a_draft_model_the_last_position_is_held_back(make_daemon, make_engine):
    """EAGLE and MTP rewrite the draft layers' KV of the last accepted token in the next step."""

    def eagle(config, caches):
        object.__setattr__(config.speculative_config, "method", "eagle")

    engine = make_engine(make_daemon(), drafts=2, adjust=eagle)
    engine.generate("r", prompt(13, 2 * CHUNK), count=8)
    assert [len(store.keys) // 32 for store in engine.stores] == [1, 1], "one chunk each, not both at once"
