"""An exception while a step waited for stores skipped their cancels: the forward overwrote blocks that a running store read, and the
mixed chunk was published. Here each fenced method meets a fault in its first steps; what must happen still does.
"""

from __future__ import annotations

from collections import Counter

import pytest
from made_up_model import prompt
from support.daemon import wait_until
from vllm.v1.outputs import KVConnectorOutput

from kvserver.adapters.common.copies import Copy
from kvserver.adapters.common.hazards import PinnedStores
from kvserver.adapters.common.lookups import Lookups
from kvserver.adapters.common.send_queue import DirectSendQueue
from kvserver.adapters.common.specs import StoreSpec
from kvserver.adapters.common.steps import StepReport
from kvserver.adapters.common.worker import WorkerHalf
from kvserver.adapters.vllm.acceptance import Acceptance
from kvserver.adapters.vllm.blockpool import PoolHook
from kvserver.adapters.vllm.scheduler import SchedulerHalf

CHUNK = 64
FIRST = prompt(1, 4 * CHUNK)
OTHER = prompt(2, 4 * CHUNK + 50)
SLOW = 20_000  # microseconds a block


def faulty(*args, **kwargs):
    raise ZeroDivisionError("a fault of ours")


def test_a_fault_in_one_cancel_does_not_skip_the_others(make_daemon, make_engine, monkeypatch):
    daemon = make_daemon(pauses=True)
    # Half of the blocks stay free: a store that began alone would be cancelled for want of blocks before the other had begun.
    engine = make_engine(daemon, num_blocks=34, may_fail=True)
    real, met = Copy.cancel, []

    def first_fails(self):
        met.append(self.spec.request_id)
        return faulty() if len(met) == 1 else real(self)

    with daemon.paused_copies():
        answers = [engine.add(f"r{i}", prompt(i, 2 * CHUNK), count=1) for i in range(2)]
        engine.run(
            until=lambda: all(answer.finish_reason is not None for answer in answers) and len(engine.stores) == 2
        )
        monkeypatch.setattr(Copy, "cancel", first_fails)
        other = engine.add("other", OTHER, count=3)
        engine.run(until=lambda: other.finish_reason is not None)
    engine.run()
    assert other.right
    assert len(met) >= 2, "both stores were to be cancelled"
    monkeypatch.undo()
    (second,) = {"r0", "r1"} - {met[0]}
    assert make_engine(daemon).generate("warm", prompt(int(second[1]), 2 * CHUNK)).external == 0
    assert make_engine(daemon).generate("warm", prompt(int(met[0][1]), 2 * CHUNK)).external == 2 * CHUNK - 1


@pytest.mark.parametrize("place", [(PoolHook, "pin"), (PinnedStores, "add"), (StoreSpec, "__init__")])
def test_a_store_that_a_fault_kept_from_its_plan_leaves_no_pin(make_daemon, make_engine, monkeypatch, place):
    engine = make_engine(make_daemon(), may_fail=True)
    monkeypatch.setattr(*place, faulty)
    engine.generate("a", FIRST)  # asserts that all blocks are free
    assert engine.errors(), "the fault was not met"
    assert engine.stores == []


def test_pins_of_a_plan_that_was_lost_end_with_the_next(make_daemon, make_engine, monkeypatch):
    daemon = make_daemon()
    engine = make_engine(daemon, may_fail=True)
    monkeypatch.setattr(Acceptance, "plan", faulty)
    first = engine.add("first", FIRST, count=5)
    engine.run(until=lambda: engine.errors() != {})
    monkeypatch.undo()
    engine.run()
    assert first.right
    make_engine(daemon).generate("warm", FIRST)


def test_stores_that_a_fault_kept_from_beginning_are_not_awaited(make_daemon, make_engine, monkeypatch):
    engine = make_engine(make_daemon(), may_fail=True, extra={"kvserver.store_timeout_ms": 120_000})
    monkeypatch.setattr(WorkerHalf, "start_stores", faulty)
    engine.generate("a", FIRST, seconds=60)  # long before the stores' deadline
    assert not engine.connector.has_pending_push_work()


def test_a_load_that_cannot_be_looked_at_hides_no_other(make_daemon, make_engine, monkeypatch):
    daemon = make_daemon()
    make_engine(daemon).generate("cold", FIRST)
    engine = make_engine(daemon, may_fail=True, extra={"kvserver.load_timeout_ms": 300})
    state = Copy.state
    monkeypatch.setattr(Copy, "state", lambda self: faulty() if self.spec.request_id == "bad" else state(self))
    bad, good = engine.add("bad", FIRST), engine.add("good", FIRST)
    engine.run(until=lambda: good.finish_reason is not None)
    assert good.external == len(FIRST) - 1
    engine.run(until=lambda: bad.finish_reason is not None)
    assert good.right
    assert bad.right
    monkeypatch.undo()
    engine.run()


def test_a_link_that_fails_while_receiving_leaves_no_load_without_end(make_daemon, make_engine, monkeypatch):
    daemon = make_daemon()
    make_engine(daemon).generate("cold", FIRST)
    engine = make_engine(daemon, may_fail=True, extra={"kvserver.store_timeout_ms": 300})
    engine.before_step = lambda plan: monkeypatch.setattr(DirectSendQueue, "receive", faulty) if plan.loads else None
    assert engine.generate("warm", FIRST).external == len(FIRST) - 1
    assert engine.received == ["warm"]


def test_a_load_that_ended_is_reported_once_though_counting_it_fails(make_daemon, make_engine, monkeypatch):
    daemon = make_daemon()
    make_engine(daemon).generate("cold", FIRST)
    engine = make_engine(daemon, may_fail=True)
    monkeypatch.setattr(WorkerHalf, "count_copy", faulty)
    assert engine.generate("warm", FIRST).external == len(FIRST) - 1
    assert engine.received == ["warm"]


class Uncountable(Counter[str]):
    def __setitem__(self, name: str, count: int) -> None:
        faulty()


def test_a_load_that_failed_is_reported_as_failed_though_counting_it_fails(make_daemon, make_engine, monkeypatch):
    """Reported as ended only, its request would attend to what was never loaded."""
    daemon = make_daemon()
    make_engine(daemon).generate("cold", FIRST)
    engine = make_engine(daemon, may_fail=True)
    monkeypatch.setattr(engine.worker.worker, "counters", Uncountable())
    engine.before_step = lambda plan: daemon.kill() if plan.loads and daemon.running() else None
    engine.generate("warm", FIRST)
    assert engine.received == ["warm"]


def test_faulty_entry_of_a_report_does_not_skip_its_other_entries(make_daemon, make_engine, monkeypatch):
    daemon = make_daemon()
    make_engine(daemon).generate("cold", FIRST)
    engine = make_engine(daemon, may_fail=True)
    warm = engine.add("warm", FIRST)
    monkeypatch.setattr(PinnedStores, "ended", faulty)
    report = StepReport(ended_stores=[99], failed_loads=["warm"])
    engine.connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=report))
    monkeypatch.undo()
    engine.run()
    assert warm.right
    assert warm.external == 0, "a request whose load failed computes"


def test_a_load_whose_request_ended_is_aborted_whatever_else_fails(make_daemon, make_engine, monkeypatch):
    daemon = make_daemon(pauses=True)
    make_engine(daemon).generate("cold", FIRST, seconds=30)
    engine = make_engine(daemon, may_fail=True)
    with daemon.paused_copies():
        engine.add("warm", FIRST)
        engine.run(until=lambda: bool(engine.loads))
        monkeypatch.setattr(Lookups, "drop_question", faulty)
        engine.abort("warm")
        engine.step()
    engine.run()
    assert [plan.abort_loads for plan in engine.plans if plan.abort_loads] == [[engine.loads[0].copy_id]]


def test_sleep_waits_for_the_daemon_though_a_cancel_fails(make_daemon, make_engine, monkeypatch):
    daemon = make_daemon(copy_delay_us=SLOW)
    engine = make_engine(daemon, may_fail=True)
    first = engine.add("first", FIRST, count=1)
    engine.run(until=lambda: first.finish_reason is not None)
    monkeypatch.setattr(Copy, "cancel", faulty)
    engine.worker.unregister_kv_caches()
    wait_until(lambda: not daemon.status()["instances"], what="the worker has unregistered")


def test_a_reset_that_failed_leaves_nothing_of_former_weights_to_be_found(make_daemon, make_engine, monkeypatch):
    daemon = make_daemon()
    engine = make_engine(daemon, may_fail=True)
    engine.generate("old", FIRST)
    waiting = engine.add("waits", OTHER, count=1)
    monkeypatch.setattr(Lookups, "drop_question", faulty)
    assert engine.connector.reset_cache() is False
    monkeypatch.undo()
    engine.run(until=lambda: waiting.finish_reason is not None)
    engine.scheduler.reset_prefix_cache()
    assert engine.generate("new", FIRST).external == 0
    assert engine.stores[-1].request_id == "old"


@pytest.mark.parametrize("place", [(PoolHook, "install"), (SchedulerHalf, "bind_pool")])
def test_without_the_pools_hook_nothing_is_stored(make_daemon, make_engine, monkeypatch, place):
    """Without it the connector would not see that blocks are allocated while a store reads them."""
    daemon = make_daemon()
    monkeypatch.setattr(*place, faulty)
    engine = make_engine(daemon, may_fail=True)
    engine.generate("a", FIRST)
    assert engine.stores == []
    assert daemon.status()["l1"]["chunks"] == 0
