"""Two ranks, joined by vLLM's own KVOutputAggregator: a load is whole only if it is so on both."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_up_model import BLOCK, LAYERS, prompt
from support.daemon import wait_until
from vllm.config import ParallelConfig

from kvserver.adapters.common.specs import ids_of
from kvserver.protocol import Store

CHUNK = 64
TOKENS = prompt(1, 3 * CHUNK + 10)


@pytest.fixture
def pair(make_engine):
    """Start an engine of two ranks."""

    def make(daemon, **options):
        return make_engine(daemon, world_size=2, **options)

    return make


def test_both_ranks_store_and_load_their_own_bytes(make_daemon, pair):
    daemon = make_daemon()
    pair(daemon).generate("cold", TOKENS)
    warm = pair(daemon)
    assert warm.generate("warm", TOKENS).external == 3 * CHUNK
    assert warm.received == ["warm"]
    assert [len(instance["workers"]) for instance in daemon.status()["instances"]] == [2, 2]


def test_one_rank_shares_nothing_with_two(make_daemon, make_engine, pair):
    daemon = make_daemon()
    make_engine(daemon).generate("cold", TOKENS)
    assert pair(daemon).generate("warm", TOKENS).external == 0


def test_a_chunk_that_one_rank_could_not_store_is_not_found(make_daemon, pair):
    daemon = make_daemon()
    cold = pair(daemon)
    half = cold.runners[1].connector.worker
    start = half.start_stores  # the daemon will refuse what has no keys
    half.start_stores = lambda plan: start(replace(plan, stores=[replace(s, keys=b"") for s in plan.stores]))
    cold.generate("cold", TOKENS)
    assert daemon.status()["totals"]["failed_stores"] > 0
    assert pair(daemon).generate("warm", TOKENS).external == 0


@pytest.mark.parametrize("failing", [0, 1])
def test_when_one_rank_fails_to_load_the_request_is_computed(make_daemon, pair, failing):
    """The other one's load still runs then, into blocks that stay the request's."""
    daemon = make_daemon(copy_delay_us=5000)
    pair(daemon).generate("cold", TOKENS)
    warm = pair(daemon)
    half, other = (warm.runners[i].connector.worker for i in (failing, 1 - failing))
    start = half.start_loads
    half.start_loads = lambda plan: start(replace(plan, loads=[replace(load, keys=b"") for load in plan.loads]))
    warm.generate("warm", TOKENS)
    assert warm.received == ["warm"]
    assert (half.counters["load_failures"], other.counters["loaded"]) == (1, 1)
    assert warm.generate("again", TOKENS).local == 3 * CHUNK


def test_blocks_that_one_rank_cannot_get_back_are_quarantined_until_it_can(make_daemon, pair):
    daemon = make_daemon(pauses=True)
    pair(daemon).generate("cold", TOKENS)
    warm = pair(daemon, extra={"kvserver.load_timeout_ms": 800})
    counts = [runner.connector.worker.counters for runner in warm.runners]
    half = warm.runners[1].connector.worker
    start = half.start_loads

    def start_when_the_other_has_loaded(plan):
        if not plan.loads:
            return start(plan)
        wait_until(lambda: daemon.status()["totals"]["loaded_bytes"], what="the first rank has loaded")
        with daemon.paused_copies():
            start(plan)
            daemon.wait_for_a_copy()
            daemon.freeze()
        warm.lose_patience()

    half.start_loads = start_when_the_other_has_loaded
    answer = warm.add("warm", TOKENS)
    warm.run(until=lambda: answer.finish_reason is not None)
    assert answer.right
    assert warm.received == ["warm"]
    assert [(of_rank["loaded"], of_rank["load_failures"]) for of_rank in counts] == [(1, 0), (0, 1)]
    assert warm.free_blocks == warm.num_blocks - 1 - sum(len(ids_of(copy)) for copy in (*warm.loads, *warm.stores))
    daemon.thaw()
    wait_until(lambda: warm.generate_free("tick") == warm.num_blocks - 1, 10, "the blocks come back")


def test_blocks_that_no_rank_can_get_back_are_quarantined_until_both_can(make_daemon, pair):
    daemon = make_daemon(pauses=True)
    pair(daemon).generate("cold", TOKENS)
    warm = pair(daemon, extra={"kvserver.load_timeout_ms": 800})
    with daemon.paused_copies():
        answer = warm.begin_load("warm", TOKENS)
        daemon.freeze()
    warm.lose_patience()
    warm.run(until=lambda: answer.finish_reason is not None)
    assert answer.right
    assert warm.received == ["warm"]
    assert warm.free_blocks == warm.num_blocks - 1 - sum(len(ids_of(copy)) for copy in (*warm.loads, *warm.stores))
    daemon.thaw()
    wait_until(lambda: warm.generate_free("tick") == warm.num_blocks - 1, 10, "the blocks come back")


def test_request_of_two_ranks_is_computed_when_the_daemon_is_killed_during_its_load(make_daemon, pair):
    daemon = make_daemon(pauses=True)
    pair(daemon).generate("cold", TOKENS)
    warm = pair(daemon)
    with daemon.paused_copies():
        answer = warm.begin_load("warm", TOKENS)
        daemon.kill()
    warm.run()
    assert answer.right
    assert warm.received == ["warm"]


def test_a_store_counts_as_pending_until_both_ranks_ended_it(make_daemon, pair):
    daemon = make_daemon()
    cold = pair(daemon)
    first, second = (runner.connector.worker for runner in cold.runners)
    poll, second.poll = second.poll, lambda idle: None  # it does not see its stores end
    cold.add("cold", TOKENS, count=1)
    block_bytes = daemon.status()["instances"][0]["workers"][0]["block_bytes"]
    cold.run(until=lambda: first.counters["store_bytes"] == 3 * CHUNK // BLOCK * block_bytes)
    for _ in range(3):  # what the first rank reported has reached the scheduler half
        cold.step()
    assert cold.connector.has_pending_push_work()
    second.poll = poll
    cold.run()
    assert not cold.connector.has_pending_push_work()
    assert daemon.status()["l1"]["chunks"] == 3
    assert pair(daemon).generate("warm", TOKENS).external == 3 * CHUNK


# ---- ranks that hold the same KV (MLA) --------------------------------------------------------


def same_on_all(config, caches):
    caches.kv_tp_replicas = config.parallel_config.tensor_parallel_size


def test_replicated_kv_is_stored_once_and_loaded_by_each_rank(make_daemon, pair):
    daemon = make_daemon()
    cold = pair(daemon, adjust=same_on_all)
    cold.generate("cold", TOKENS)
    block_bytes = daemon.status()["instances"][0]["workers"][0]["block_bytes"]
    once = 3 * CHUNK // 16 * block_bytes
    assert daemon.status()["totals"]["stored_bytes"] == once
    assert not cold.connector.has_pending_push_work(), "the rank that stores nothing reported so"
    warm = pair(daemon, adjust=same_on_all)
    assert warm.generate("warm", TOKENS).external == 3 * CHUNK
    assert daemon.status()["totals"]["loaded_bytes"] == 2 * once
    assert [runner.connector.worker.counters["loaded"] for runner in warm.runners] == [1, 1]


def test_ranks_take_turns_to_store_what_all_hold(make_daemon, make_tap, pair):
    """Over a prompt in steps of one and a half chunks each rank stores half of the bytes."""
    tap = make_tap(make_daemon())
    engine = pair(tap.endpoint, adjust=same_on_all, num_blocks=400, max_tokens_per_step=96)
    engine.generate("cold", prompt(7, 20 * CHUNK))
    assert len(tap.of(Store)) == 2 * len(engine.stores)
    moved = [runner.connector.worker.counters["store_bytes"] for runner in engine.runners]
    assert moved[0] == moved[1] > 0
    assert sum(store.contents is not None for store in tap.of(Store)) in (0, len(engine.stores)), (
        "rank 0 describes them"
    )


def test_engines_with_and_without_replicated_kv_share_nothing(make_daemon, pair):
    daemon = make_daemon()
    pair(daemon, adjust=same_on_all).generate("cold", TOKENS)
    assert pair(daemon).generate("warm", TOKENS).external == 0


@pytest.mark.parametrize("failing", [0, 1])
def test_replicated_hit_is_computed_when_one_rank_cannot_load_it(make_daemon, pair, failing):
    daemon = make_daemon()
    pair(daemon, adjust=same_on_all).generate("cold", TOKENS)
    warm = pair(daemon, adjust=same_on_all)
    half = warm.runners[failing].connector.worker
    start = half.start_loads
    half.start_loads = lambda plan: start(replace(plan, loads=[replace(load, keys=b"") for load in plan.loads]))
    warm.generate("warm", TOKENS)
    assert warm.received == ["warm"]


# ---- ranks that hold other layers (a pipeline) ------------------------------------------------


def pipeline(config, caches):
    config.parallel_config = ParallelConfig(pipeline_parallel_size=2, distributed_executor_backend="mp")


def test_stages_of_a_pipeline_store_and_load_their_own_layers(make_daemon, make_engine):
    daemon = make_daemon()
    make_engine(daemon, asynchronous=False, adjust=pipeline).generate("cold", TOKENS)
    (instance,) = daemon.status()["instances"]
    first, last = sorted(instance["workers"], key=lambda worker: worker["rank"])
    assert last["block_bytes"] * LAYERS == first["block_bytes"] * (LAYERS + 1), "the last stage has a layer more"
    warm = make_engine(daemon, asynchronous=False, adjust=pipeline)
    assert warm.generate("warm", TOKENS).external == 3 * CHUNK
    stored = daemon.status()["totals"]["stored_bytes"]
    assert stored == 3 * CHUNK // 16 * (first["block_bytes"] + last["block_bytes"])
    assert daemon.status()["totals"]["loaded_bytes"] == stored


def test_a_pipeline_shares_nothing_with_tensor_parallel_ranks(make_daemon, make_engine, pair):
    daemon = make_daemon()
    make_engine(daemon, asynchronous=False, adjust=pipeline).generate("cold", TOKENS)
    assert pair(daemon).generate("warm", TOKENS).external == 0


@pytest.mark.parametrize("stage", [0, 1])
def test_a_chunk_that_one_stage_could_not_store_is_not_found(make_daemon, make_engine, stage):
    daemon = make_daemon()
    cold = make_engine(daemon, asynchronous=False, adjust=pipeline)
    half = cold.runners[stage].connector.worker
    start = half.start_stores
    half.start_stores = lambda plan: start(replace(plan, stores=[replace(s, keys=b"") for s in plan.stores]))
    cold.generate("cold", TOKENS)
    assert make_engine(daemon, asynchronous=False, adjust=pipeline).generate("warm", TOKENS).external == 0
