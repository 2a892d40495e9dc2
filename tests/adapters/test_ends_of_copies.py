"""How copies end where only state words and block ids show it: no other copy's word, no block twice, none too early."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from made_up_model import BLOCK, HEADS, WIDTH, prompt
from support.daemon import Daemon, wait_until
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import KVCacheGroupSpec

from kvserver._native import pack_blocks
from kvserver.adapters.common.copies import Copy
from kvserver.adapters.common.hazards import Quarantine
from kvserver.adapters.common.send_queue import DirectSendQueue
from kvserver.adapters.common.specs import LoadSpec, StoreSpec
from kvserver.adapters.common.steps import StepPlan, StepReport
from kvserver.adapters.vllm import KVServerConnector
from kvserver.adapters.vllm.blockpool import PoolHook

CHUNK = 64


def test_a_store_is_cancelled_at_its_deadline(make_daemon, make_engine):
    """The daemon is not left to copy, for seconds, what it would not publish."""
    daemon = make_daemon(copy_delay_us=200_000)
    engine = make_engine(daemon, extra={"kvserver.store_timeout_ms": 200})
    engine.generate("r", prompt(1, 16 * CHUNK), count=1)  # 64 blocks, by two threads: 6.4 s
    daemon.wait_for_accounting(seconds=3, tickets=0)
    assert daemon.status()["l1"]["chunks"] == 0


def test_stores_in_a_new_session_have_words_of_their_own(make_daemon, make_engine):
    """The store that died with the daemon before has one that is another's by now."""
    daemon = make_daemon(pauses=True)
    engine = make_engine(daemon)
    with daemon.paused_copies():
        answer = engine.add("lost", prompt(0, 4 * CHUNK), count=1)
        engine.run(until=lambda: answer.finish_reason is not None)
        assert engine.connector.has_pending_push_work()
        daemon.kill()
    daemon.start()
    wait_until(lambda: any(instance["namespace"] for instance in daemon.status()["instances"]), what="it registers")
    seeds = itertools.count(100)  # the scheduler half finds out by what it is answered
    wait_until(
        lambda: engine.generate(f"r{(n := next(seeds))}", prompt(n, CHUNK + 5)) and daemon.status()["l1"]["chunks"]
    )
    prompts = [prompt(i, 2 * CHUNK + 5) for i in range(1, 4)]
    answers = [engine.add(f"together{i}", tokens, count=1) for i, tokens in enumerate(prompts)]
    engine.run()
    assert all(answer.right for answer in answers)
    for tokens in prompts:
        assert make_engine(daemon).generate("warm", tokens).external == 2 * CHUNK


def test_an_idle_step_waits_for_the_oldest_load_by_its_state_words(make_daemon, make_engine, monkeypatch):
    """All copies of it, a millisecond at most together; a reply takes longer."""
    waits: list[list[float]] = []  # seconds, by step
    replies: list[float] = []
    wait: Callable[[Copy, float], None] = Copy.wait

    def recorded(copy: Copy, seconds: float) -> None:
        waits[-1].append(seconds)
        wait(copy, seconds)

    daemon = make_daemon(tails="on", copy_delay_us=20_000)  # else a load may be over before the first idle step
    tokens = prompt(1, 2 * CHUNK + 2 * BLOCK + 5)
    make_engine(daemon).generate("cold", tokens)
    engine = make_engine(daemon)
    monkeypatch.setattr(Copy, "wait", recorded)
    monkeypatch.setattr(DirectSendQueue, "wait", lambda queue, seconds: replies.append(seconds))
    engine.after_step = lambda plan: waits.append([])
    waits.append([])
    answer = engine.add("warm", tokens)
    engine.run(until=lambda: answer.finish_reason is not None)
    assert answer.right
    assert answer.external == 2 * CHUNK + 2 * BLOCK
    assert max(len(step) for step in waits) == 2, "one of chunks, one of single blocks"
    assert max(seconds for step in waits for seconds in step) <= 0.001
    assert not replies


def test_quarantine_ends_with_the_last_ranks_word():
    pool = BlockPool(10, True, BLOCK)
    hook = PoolHook()
    hook.install(pool)
    quarantine = Quarantine(hook)
    blocks = pool.get_new_blocks(3)
    ids = [block.block_id for block in blocks]
    assert [quarantine.add(7, ids) for _ in range(3)] == [True, False, False], "the first rank's pins them"
    pool.free_blocks(blocks)  # as vLLM does with a request that failed
    for _ in range(2):
        quarantine.release(7)
        assert pool.get_num_free_blocks() == 6, "a rank may still write"
    quarantine.release(7)
    assert pool.get_num_free_blocks() == 9
    quarantine.release(7)
    assert pool.get_num_free_blocks() == 9


def two_groups(config, caches):
    spec = caches.kv_cache_groups[0].kv_cache_spec
    caches.kv_cache_groups[:] = [KVCacheGroupSpec([f"layers.{group}"], spec) for group in range(2)]
    config.kv_transfer_config.kv_connector_extra_config["kvserver.load_timeout_ms"] = 800


@dataclass
class Steps:
    """A worker half whose plans the test makes."""

    connector: KVServerConnector
    reports: list[StepReport] = field(default_factory=list)

    def step(self, plan: StepPlan) -> set[str]:
        """The requests whose loads have failed."""
        self.connector.bind_connector_metadata(plan)
        failed = self.connector.get_transfer_results(set()).failed_recving
        if (report := self.connector.build_connector_worker_meta()) is not None:
            self.reports.append(report)
        self.connector.clear_connector_metadata()
        return failed

    def idle(self) -> set[str]:
        return self.step(StepPlan(idle=True))


@pytest.fixture
def steps(make_daemon, make_halves):
    daemon = make_daemon(pauses=True)
    scheduler, worker = make_halves(daemon, two_groups)
    yield Steps(worker), daemon
    daemon.thaw()
    for half in (scheduler, worker):
        half.shutdown()
        assert half.errors == {}


def test_an_idle_step_waits_for_a_load_that_is_being_cancelled(steps):
    worker, daemon = steps
    begin_load(worker, daemon, targets=[9, 10, 11, 12, 13, 14, 15, 16])
    count, began = 1, time.monotonic()
    while "warm" not in worker.idle():
        count += 1
    assert count < 2000 * (time.monotonic() - began), "a step is a millisecond, until the load is late and after that"


def test_the_null_block_is_not_quarantined(steps):
    """No request owns it: pinned and freed once more, vLLM would hand it to a request."""
    worker, daemon = steps
    begin_load(worker, daemon, targets=[9, 0, 10, 0, 11, 12, 13, 14])  # a window's group lacks two
    wait_until(lambda: "warm" in worker.idle(), what="the load is given up")
    assert [report.quarantined for report in worker.reports if report.quarantined] == [[(2, [9, 10, 11, 12, 13, 14])]]
    daemon.thaw()
    wait_until(lambda: worker.idle() or worker.reports[-1].released, what="the blocks are free again")
    assert worker.reports[-1].released == [2]


def begin_load(worker: Steps, daemon: Daemon, targets: list[int]) -> None:
    """Of a chunk that is stored first; the daemon hangs when it has written a block."""
    storage = torch.randint(1, 1 << 60, (2, 100, HEADS, BLOCK, WIDTH), dtype=torch.int64).share_memory_()
    caches = {f"layers.{i}": layer for i, layer in enumerate(storage.unbind(0))}
    worker.connector.register_kv_caches(caches)
    key = random.Random(1).randbytes(32)
    worker.step(StepPlan(stores=[StoreSpec(1, "cold", "", 4, key, pack_blocks(list(range(1, 9))))]))
    wait_until(lambda: worker.idle() or worker.reports)
    before = caches["layers.0"][9].clone()
    with daemon.paused_copies():
        worker.step(StepPlan(loads=[LoadSpec(2, "warm", "", 4, key, pack_blocks(targets), 0)]))
        wait_until(lambda: not torch.equal(caches["layers.0"][9], before), what="the load's first bytes")
        daemon.freeze()
