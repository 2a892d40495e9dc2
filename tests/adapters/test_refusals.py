"""What is not supported runs without cache: one clear warning, no exception, an engine that serves."""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
from types import SimpleNamespace

import pytest
import torch
from made_up_model import BLOCK, prompt
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MambaSpec, SlidingWindowSpec

from kvserver.adapters.common import host_memory
from kvserver.adapters.common.link import WORDS, Link
from kvserver.adapters.common.load_ends import LoadEnds
from kvserver.adapters.common.steps import StepPlan
from kvserver.adapters.common.worker import WorkerHalf
from kvserver.adapters.vllm import KVServerConnector, support
from kvserver.adapters.vllm.scheduler import SchedulerHalf
from kvserver.protocol import EndRequest, Lookup, Retrieve, Store
from kvserver.protocol.client import Channel

CHUNK = 64
TOKENS = prompt(1, 3 * CHUNK + 10)


@pytest.fixture
def warnings_of(caplog):
    """The connector's warnings so far."""
    caplog.set_level(logging.WARNING, "vllm.kvserver")
    return lambda: [r.getMessage() for r in caplog.records if r.name in ("vllm.kvserver", "kvserver")]


def with_states(mode="align", **unserved):
    other = MambaSpec(block_size=BLOCK, shapes=((2, 2),), dtypes=(torch.float32,), mamba_cache_mode=mode)

    def adjust(config, caches):
        caches.kv_cache_groups.append(KVCacheGroupSpec(["layers.9"], other))
        config.cache_config.use_replayssm = unserved.get("replays", False)

    return adjust


def two_groups(config, caches):
    caches.kv_cache_groups.append(copy.copy(caches.kv_cache_groups[0]))


def a_window(config, caches):
    spec = caches.kv_cache_groups[0].kv_cache_spec
    shape = {name: getattr(spec, name) for name in ("block_size", "num_kv_heads", "head_size", "dtype")}
    names = caches.kv_cache_groups[0].layer_names
    caches.kv_cache_groups[0] = KVCacheGroupSpec(names, SlidingWindowSpec(**shape, sliding_window=40))


def with_parallel(name):
    def adjust(config, caches):
        config.parallel_config = copy.copy(config.parallel_config)
        object.__setattr__(config.parallel_config, name, 2)

    return adjust


def sleeps(config, caches):
    config.model_config.enable_sleep_mode = True


REFUSED = {
    "decode_context_parallel_size > 1": with_parallel("decode_context_parallel_size"),
    "prefill_context_parallel_size > 1": with_parallel("prefill_context_parallel_size"),
    "mamba_cache_mode 'none'": with_states("none"),
    "ReplaySSM": with_states(replays=True),
}
if not hasattr(KVConnectorBase_V1, "unregister_kv_caches"):
    REFUSED["sleep mode before vLLM 0.33"] = sleeps


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_not_supported_is_refused_by_both_halves(make_daemon, make_halves, warnings_of, reason):
    daemon = make_daemon()
    halves = make_halves(daemon, REFUSED[reason])
    assert len(warnings_of()) == 2, "one a half, since they live in different processes"
    assert all(reason in line for line in warnings_of())
    assert_inert(halves)
    assert daemon.status()["instances"] == []


def two_precisions(config, caches):
    first = caches.kv_cache_groups[0]
    other = dataclasses.replace(first.kv_cache_spec, dtype=torch.float64)
    caches.kv_cache_groups.append(KVCacheGroupSpec(["layers.9"], other))


def partial_hits(config, caches):
    caches.hash_block_size = BLOCK // 2


@pytest.mark.parametrize("name", ["gpu_block_pool", "block_pool"])
def test_block_pool_of_a_scheduler_context_serves_the_engine(make_daemon, make_engine, warnings_of, monkeypatch, name):
    """vllm#53067 replaces bind_gpu_block_pool."""

    def bind(connector, pool):
        connector.bind_scheduler_context(SimpleNamespace(**{name: pool}))

    monkeypatch.setattr(KVServerConnector, "bind_gpu_block_pool", bind)
    daemon = make_daemon()
    make_engine(daemon).generate("cold", TOKENS)
    assert make_engine(daemon).generate("warm", TOKENS).external == 3 * CHUNK
    assert warnings_of() == []


@pytest.mark.parametrize("context", [None, SimpleNamespace()], ids=["no context", "a context without a pool"])
def test_without_a_pool_there_is_no_cache_and_one_warning(make_daemon, make_engine, warnings_of, monkeypatch, context):
    def bind(connector, pool):
        if context is not None:
            connector.bind_scheduler_context(context)

    monkeypatch.setattr(KVServerConnector, "bind_gpu_block_pool", bind)
    daemon = make_daemon()
    engine = make_engine(daemon)
    assert [engine.generate(name, TOKENS).external for name in ("cold", "warm")] == [0, 0]
    (line,) = warnings_of()
    assert line == (
        "kvserver: this engine runs without cache: this vLLM gave the connector no block pool, so no block can be kept from others"
    )
    assert daemon.status()["totals"]["stored_bytes"] == 0


@pytest.mark.parametrize("adjust", [two_precisions, partial_hits])
def test_blocks_that_are_written_before_all_else_of_a_step_are_served(
    make_daemon, make_halves, warnings_of, monkeypatch, adjust
):
    """Model runner V2 zeroes them or copies into them. Stores keep the blocks that they read."""

    def second_runner(config, caches):
        adjust(config, caches)
        monkeypatch.setattr(VllmConfig, "use_v2_model_runner", True)

    scheduler, worker = make_halves(make_daemon(), second_runner)
    assert warnings_of() == []
    assert scheduler.scheduler is not None
    for half in (scheduler, worker):
        half.shutdown()


@pytest.mark.parametrize(
    ("adjust", "reason"),
    [
        (two_groups, "2 KV cache groups before vLLM 0.30"),
        (a_window, "(SlidingWindowSpec, layers.0 and 1 more): vLLM before 0.30"),
    ],
)
def test_engine_before_vllm_0_30_is_refused_where_a_failed_load_cannot_fail_its_request(
    make_daemon, make_halves, warnings_of, monkeypatch, adjust, reason
):
    """Before vLLM 0.30 the failed blocks are computed in place: wrong upon null blocks, and not taken of several groups."""
    monkeypatch.setattr(support, "TransferResults", None)
    halves = make_halves(make_daemon(), adjust)
    monkeypatch.undo()  # the harness asks as vLLM 0.32 does
    assert all(reason in line for line in warnings_of())
    assert_inert(halves)


def test_a_boundary_that_a_generating_request_passes_is_kept_also_of_a_window_shorter_than_a_chunk(
    make_daemon, make_engine
):
    daemon = make_daemon()
    engine = make_engine(daemon, window=40)
    answer = engine.generate("grows", prompt(2, CHUNK), count=CHUNK + 10)
    assert answer.right
    assert engine.connector.scheduler.counters["chunks_left_by_window"] == 0
    assert daemon.status()["l1"]["chunks"] == 2, "of the prompt, and of the end"


def test_a_sliding_window_is_served(make_daemon, make_engine):
    daemon = make_daemon()
    make_engine(daemon, window=40).generate("cold", TOKENS)
    assert make_engine(daemon, window=40).generate("warm", TOKENS).external == 3 * CHUNK


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"kvserver.loadtimeout": 5}, "kvserver.loadtimeout"),
        ({"kvserver.load_timeout_ms": -1}, "load_timeout_ms"),
        ({"kvserver.load_timeout_ms": "soon"}, "load_timeout_ms"),
    ],
)
def test_a_bad_key_is_named_and_the_engine_serves(make_daemon, make_engine, caplog, extra, reason):
    engine = make_engine(make_daemon(), extra=extra, may_fail=True)
    assert engine.generate("a", TOKENS).external == 0
    assert reason in caplog.text
    assert set(engine.errors().values()) == {2}, "once a half"


def test_settings_of_other_connectors_are_ignored(make_daemon, make_engine):
    daemon = make_daemon()
    make_engine(daemon, extra={"lmcache.something": 3}).generate("a", TOKENS)
    assert make_engine(daemon).generate("b", TOKENS).external == 3 * CHUNK


def test_a_shm_that_is_too_small_is_found_before_it_is_touched(make_daemon, make_engine, monkeypatch, warnings_of):
    monkeypatch.setattr(host_memory.os, "statvfs", lambda path: SimpleNamespace(f_bavail=16, f_frsize=4096))
    daemon = make_daemon()
    engine = make_engine(daemon)
    assert engine.generate("a", TOKENS).external == 0
    (line,) = [line for line in warnings_of() if "shm" in line]
    assert "without cache: /dev/shm has 65536 bytes free" in line
    assert "--shm-size" in line
    assert len(warnings_of()) <= 2, "the scheduler half logs once that its lookups are refused"
    assert daemon.status()["instances"] == []


def test_tensors_that_are_no_blocks_are_refused(make_daemon, make_engine, warnings_of):
    engine = make_engine(make_daemon(), register=False)
    engine.worker.register_kv_caches({"layers.0": torch.zeros(3, 5)})
    (line,) = warnings_of()
    assert "shape (3, 5)" in line
    assert "100 blocks" in line
    engine.generate("a", TOKENS)


def assert_inert(halves) -> None:
    """Every method works and does nothing."""
    scheduler, worker = halves
    request = SimpleNamespace(request_id="r", num_tokens=100, block_hashes=[b"x" * 32] * 6, lora_request=None)
    blocks = SimpleNamespace(get_block_ids=lambda: ([1, 2, 3],))
    scheduler.on_new_request(request)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    scheduler.update_state_after_alloc(request, blocks, 0)
    plan = scheduler.build_connector_meta(SimpleNamespace(total_num_scheduled_tokens=5))
    assert not plan.loads
    assert not plan.stores
    assert scheduler.request_finished(request, [1, 2]) == (False, None)
    assert not scheduler.has_pending_push_work()
    assert scheduler.reset_cache() is not False
    assert list(scheduler.take_events()) == []
    scheduler.update_connector_output(SimpleNamespace(kv_connector_worker_meta=None))

    worker.register_kv_caches({"layers.0": torch.zeros(100, 2, BLOCK, 2)})
    worker.bind_connector_metadata(plan)
    worker.start_load_kv(None)
    worker.wait_for_layer_load("layers.0")
    worker.save_kv_layer("layers.0", None, None)
    worker.wait_for_save()
    assert worker.get_finished(set()) == (None, None)
    assert not worker.get_transfer_results(set()).finished_recving
    assert worker.get_block_ids_with_load_errors() == set()
    assert worker.build_connector_worker_meta() is None
    worker.clear_connector_metadata()
    for half in halves:
        assert not half.requires_kv_delivery
        assert not half.errors
        half.shutdown()


# ---- faults of our own ------------------------------------------------------------------------

FAULTS = [
    (SchedulerHalf, "new_request"),
    (SchedulerHalf, "matched_tokens"),
    (SchedulerHalf, "allocated"),
    (SchedulerHalf, "plan_step"),
    (SchedulerHalf, "worker_report"),
    (SchedulerHalf, "request_finished"),
    (WorkerHalf, "start_loads"),
    (WorkerHalf, "start_stores"),
    (WorkerHalf, "poll"),
    (LoadEnds, "take_finished"),
    (LoadEnds, "take_invalid_blocks"),
    (WorkerHalf, "take_report"),
]


@pytest.mark.parametrize(("half", "method"), FAULTS, ids=[f"{half.__name__}.{method}" for half, method in FAULTS])
def test_a_fault_once_is_counted_logged_and_survived(make_daemon, make_engine, monkeypatch, caplog, half, method):
    """Raised at its second call: right tokens, no hang, no block lost, and the cache goes on."""
    daemon = make_daemon()
    make_engine(daemon).generate("cold", TOKENS)
    engine = make_engine(
        daemon, may_fail=True, extra={"kvserver.load_timeout_ms": 300, "kvserver.store_timeout_ms": 300}
    )
    real, calls = getattr(half, method), []

    def faulty(self, *args, **kwargs):
        calls.append(method)
        if len(calls) == 2:
            raise ZeroDivisionError("a fault of ours")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(half, method, faulty)
    for i in range(3):
        engine.generate(f"r{i}", [*TOKENS, *prompt(100 + i, 2 * CHUNK)])
    engine.generate("warm", TOKENS)
    assert len(calls) >= 2, f"{method} was not called often enough"
    assert sum(engine.errors().values()) == 1
    assert caplog.text.count("a fault of ours") >= 1


def test_a_fault_before_a_load_begins_fails_that_load_and_no_other(make_daemon, make_engine, monkeypatch):
    daemon = make_daemon()
    make_engine(daemon).generate("cold", TOKENS)
    engine = make_engine(daemon, may_fail=True)
    real = WorkerHalf.start_loads
    faults = []

    def faulty(self, plan):
        if plan.loads and not faults:
            faults.append(plan.loads[0].copy_id)
            raise ZeroDivisionError("a fault of ours")
        return real(self, plan)

    monkeypatch.setattr(WorkerHalf, "start_loads", faulty)
    assert engine.generate("first", TOKENS).right
    assert len(faults) == 1
    assert engine.worker.worker.counters["load_failures"] == 1
    assert engine.generate("second", [*TOKENS[:-1], *prompt(99, 2 * CHUNK)]).right
    assert engine.worker.worker.counters["load_failures"] == 1


@pytest.mark.parametrize("method", ["new_request", "matched_tokens", "plan_step", "start_stores"])
def test_a_fault_that_stays_is_logged_once_and_the_engine_serves(make_daemon, make_engine, monkeypatch, caplog, method):
    half = WorkerHalf if method == "start_stores" else SchedulerHalf

    def faulty(self, *args, **kwargs):
        raise ZeroDivisionError("a fault of ours")

    engine = make_engine(make_daemon(), may_fail=True, extra={"kvserver.store_timeout_ms": 200})
    monkeypatch.setattr(half, method, faulty)
    for i in range(3):
        engine.generate(f"r{i}", prompt(i, 2 * CHUNK))
    assert sum(engine.errors().values()) >= 3
    assert caplog.text.count("further ones are only counted") == 1


@pytest.mark.parametrize("message", [Lookup, Retrieve, Store, EndRequest])
def test_a_fault_in_sending_is_counted_and_answered_for(make_daemon, make_engine, monkeypatch, caplog, message):
    daemon = make_daemon()
    make_engine(daemon).generate("cold", TOKENS)
    timeouts = dict.fromkeys(
        ("kvserver.lookup_timeout_ms", "kvserver.load_timeout_ms", "kvserver.store_timeout_ms"), 120_000
    )
    engine = make_engine(daemon, may_fail=True, extra=timeouts)
    send = Channel.send

    def faulty(self, request):
        if isinstance(request, message):
            raise ZeroDivisionError("a fault of ours")
        return send(self, request)

    monkeypatch.setattr(Channel, "send", faulty)
    for i in range(3):
        engine.generate(f"r{i}", [*TOKENS, *prompt(i, 2 * CHUNK)], seconds=60)  # nothing waits for its deadline
    assert len(engine.received) == len(engine.loads)
    assert sum(engine.errors().values()) >= 1
    assert caplog.text.count("further ones are only counted") == len(engine.errors())


def test_messages_that_find_no_room_use_no_state_words_up(make_daemon, make_engine, monkeypatch):
    daemon = make_daemon()
    engine = make_engine(daemon)
    engine.generate("first", TOKENS)
    (store, *_) = engine.stores
    with monkeypatch.context() as full:
        full.setattr(Channel, "send", lambda self, request: None)
        every = [dataclasses.replace(store, copy_id=10_000 + number) for number in range(WORDS + 1)]
        engine.worker.worker.start_stores(StepPlan(stores=every))
    other = prompt(7, 4 * CHUNK + 3)
    engine.generate("second", other)
    assert make_engine(daemon).generate("warm", other).external == 4 * CHUNK


def test_a_link_that_cannot_start_leaves_the_engine_without_cache(make_daemon, make_engine, monkeypatch):
    def faulty(self, seconds):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Link, "start", faulty)
    engine = make_engine(make_daemon(), may_fail=True)
    assert engine.generate("a", TOKENS).external == 0
    assert sum(engine.errors().values()) == 2


def test_the_failure_policy_is_recompute_unless_configured(make_daemon, make_engine):
    daemon = make_daemon()
    engine = make_engine(daemon)
    assert engine.scheduler.recompute_kv_load_failures
    engine = make_engine(daemon, extra={"kvserver.load_failure_policy": "fail"})
    assert not engine.scheduler.recompute_kv_load_failures
    assert not engine.scheduler.requires_kv_delivery


def test_with_policy_fail_a_failed_load_ends_its_request_and_nothing_else(make_daemon, make_engine):
    daemon = make_daemon()
    make_engine(daemon).generate("cold", TOKENS)
    engine = make_engine(daemon, extra={"kvserver.load_failure_policy": "fail"})
    engine.before_step = lambda plan: daemon.kill() if plan.loads and daemon.running() else None
    answer = engine.add("warm", TOKENS)
    engine.run()
    assert answer.finish_reason == "error"
    engine.generate("next", TOKENS)


def test_a_second_incarnation_of_one_engine_id_runs_without_cache(make_daemon, make_engine, warnings_of):
    daemon = make_daemon()
    first = make_engine(daemon, engine_id="twin")
    second = make_engine(daemon, engine_id="twin")
    first.generate("a", TOKENS)
    assert second.generate("a", TOKENS).external == 0
    assert any("twin" in line for line in warnings_of())
    assert make_engine(daemon).generate("other", TOKENS).external == 3 * CHUNK
    assert os.getpid() == daemon.status()["instances"][0]["workers"][0]["pid"]
