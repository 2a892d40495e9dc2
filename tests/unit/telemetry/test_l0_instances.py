"""Block lifetimes of several instances: apart from each other, and when one disconnects and returns."""

from __future__ import annotations

import os

import pytest
from support.block_lifetimes import Engine, accessed, allocated, cleared, evicted, exact, hold, present, released

from kvserver.engines.report_sync import MAX_POOLS
from kvserver.events import BlockReport, Bus, InstanceRegistered
from kvserver.protocol import DEPARTED_SECONDS, KVServerError
from kvserver.protocol.status import L0Status
from kvserver.telemetry import BlockLifecycle
from unit.telemetry.l0_rig import Clock, names


def test_equal_block_ids_of_two_instances_are_two_blocks(l0: BlockLifecycle) -> None:
    a, b = Engine(l0, "a"), Engine(l0, "b")
    a.did((1, allocated(5)))
    b.did((2, allocated(5)), (3, released(5)))
    a.did((4, accessed(5)))
    assert a.counts() == {"allocations": 1, "shared_accesses": 1, "active_blocks": 1, "tracked_blocks": 1}
    assert b.counts() == {"allocations": 1, "released_blocks": 1, "tracked_blocks": 1}
    assert a.seconds("reuse_gap") == (1, 3)
    assert b.seconds("reuse_gap") == (0, 0)


def test_equal_request_ids_of_two_instances_are_two_requests(l0: BlockLifecycle) -> None:
    a, b = Engine(l0, "a"), Engine(l0, "b")
    a.holds(1, hold("request", [5], [50]))
    b.holds(1, hold("request", [5], [50]))
    a.ended(2, "request")
    assert a.counts() == {"allocations": 1, "released_blocks": 1, "tracked_blocks": 1}
    assert b.counts() == {"allocations": 1, "active_blocks": 1, "tracked_blocks": 1}


def test_one_model_after_another_under_an_id_has_metrics_of_its_own(l0: BlockLifecycle) -> None:
    first = Engine(l0, "a", "small")
    first.did((1, allocated(5)))
    first.disconnect()
    second = Engine(l0, "a", "large", incarnation="second")
    second.did((2, allocated(6, 7)))
    assert first.counts() == {"allocations": 1, "lost": 1}
    assert second.counts() == {"allocations": 2, "active_blocks": 2, "tracked_blocks": 2}


def test_equal_block_ids_of_two_pools_are_two_blocks_of_one_sum(l0: BlockLifecycle) -> None:
    engine = Engine(l0)
    engine.did((1, allocated(5)))
    engine.did((2, allocated(5)), pool=1)
    engine.did((3, released(5)), (4, evicted(5)), pool=1)
    assert engine.counts() == {"allocations": 2, "evictions": 1, "active_blocks": 1, "tracked_blocks": 1}
    assert engine.seconds("lifetime") == (1, 2)


def test_a_full_state_of_one_pool_leaves_another_as_it_was(l0: BlockLifecycle) -> None:
    engine = Engine(l0)
    engine.did((1, allocated(5)))
    engine.did((2, present(6)), pool=1, full=True)
    assert engine.counts() == {"allocations": 1, "active_blocks": 1, "released_blocks": 1, "tracked_blocks": 2}


def test_a_clear_is_of_one_pool_and_instance(l0: BlockLifecycle) -> None:
    a, b = Engine(l0, "a"), Engine(l0, "b")
    a.did((1, allocated(5)))
    a.did((1, allocated(5) + released(5)), pool=1)
    b.did((1, allocated(5)))
    a.did((2, cleared()), pool=1)
    assert a.counts() == {"allocations": 2, "cleared": 1, "active_blocks": 1, "tracked_blocks": 1}
    assert b.counts() == {"allocations": 1, "active_blocks": 1, "tracked_blocks": 1}


def test_pools_are_bounded(l0: BlockLifecycle) -> None:
    engine = Engine(l0)
    for pool in range(MAX_POOLS):
        engine.did((1, allocated(5)), pool=pool)
    with pytest.raises(KVServerError, match="more than 64 block pools"):
        engine.did((1, allocated(5)), pool=MAX_POOLS)


@pytest.mark.parametrize("died", [True, False], ids=["died", "ended orderly"])
def test_an_instance_that_disconnects_loses_its_lifetimes(l0: BlockLifecycle, died: bool) -> None:
    engine = Engine(l0)
    engine.did((1, allocated(5, 6)), (2, released(5)))
    engine.disconnect(died)
    assert engine.counts() == {"allocations": 2, "lost": 2}
    assert engine.seconds("lifetime") == (0, 0)
    assert not engine.out_of_sync
    assert l0.status("engine") == L0Status()


def test_metrics_stay_for_a_while_and_then_vanish(l0: BlockLifecycle, clock: Clock) -> None:
    engine, other = Engine(l0), Engine(l0, "other")
    engine.did((1, allocated(5)))
    engine.disconnect()
    clock.advance(DEPARTED_SECONDS - 1)
    assert names(l0) == {engine.names, other.names}
    clock.advance(1)
    assert names(l0) == {other.names}


def test_an_instance_that_comes_back_in_time_goes_on_counting(l0: BlockLifecycle, clock: Clock) -> None:
    engine = Engine(l0)
    engine.did((1, allocated(5)), (2, evicted(5)))
    engine.disconnect()
    clock.advance(DEPARTED_SECONDS - 1)
    engine.restart()
    engine.did((400, present(9)), (401, allocated(5) + released(5)), (402, evicted(5)), full=True)
    clock.advance(DEPARTED_SECONDS)
    assert engine.counts() == {"allocations": 2, "evictions": 2, "released_blocks": 1, "tracked_blocks": 1}
    assert engine.seconds("lifetime") == (2, 2)


def test_an_instance_that_comes_back_late_begins_anew(l0: BlockLifecycle, clock: Clock) -> None:
    engine = Engine(l0)
    engine.did((1, allocated(5)))
    engine.disconnect()
    clock.advance(DEPARTED_SECONDS)
    engine.restart()
    engine.did((400, allocated(5)))
    assert engine.counts() == {"allocations": 1, "active_blocks": 1, "tracked_blocks": 1}
    assert not engine.out_of_sync


@pytest.mark.parametrize("has_computed", [False, True], ids=["new pool", "used pool"])
def test_a_restarted_engine_is_out_of_sync_if_it_has_computed_and_has_no_gap(
    l0: BlockLifecycle, has_computed: bool
) -> None:
    engine = Engine(l0)
    engine.did((1, allocated(5)))
    engine.did((1, allocated(6)))
    engine.restart(has_computed)  # its end was never reported
    assert engine.counts() == {"allocations": 2, "lost": 2}
    assert engine.out_of_sync == has_computed
    engine.did((2, []), full=True)
    assert not engine.out_of_sync
    assert engine.metric("report_gaps") == 0


def test_an_incarnation_that_disconnected_and_returned_is_out_of_sync(l0: BlockLifecycle) -> None:
    """Its connection ended, or its memory was away for a while: its pool is the old one."""
    engine = Engine(l0)
    engine.did((1, allocated(5)))
    engine.disconnect()
    engine.connect()
    assert engine.out_of_sync


def test_a_restarted_engine_may_have_other_blocks(l0: BlockLifecycle) -> None:
    engine = Engine(l0, num_blocks=8)
    engine.did((1, allocated(7)))
    engine.num_blocks = 100
    engine.restart()
    engine.did((2, allocated(99)))
    assert engine.counts()["active_blocks"] == 1


def test_restarted_engine_may_report_in_the_other_form(l0: BlockLifecycle) -> None:
    engine = Engine(l0)
    engine.did((1, allocated(7)))
    engine.restart()
    engine.holds(2, hold("a", [5], [50]), full=True)
    assert engine.counts() == {"allocations": 1, "lost": 1, "active_blocks": 1, "tracked_blocks": 1}


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_nothing_is_left_of_instances_that_died(l0: BlockLifecycle, clock: Clock) -> None:
    blocks = 20_000  # about 1 MB for each instance, and more for request blocks
    everything = allocated(*range(1, blocks))
    before = 0
    for n in range(50):
        exact_one, reported = Engine(l0, f"a{n}", num_blocks=blocks), Engine(l0, f"b{n}", num_blocks=blocks)
        exact_one.did((1, everything))
        reported.holds(1, hold("a", range(1, blocks)), hold("b", range(1, blocks), range(1, blocks)))
        exact_one.disconnect()
        reported.disconnect()
        clock.advance(DEPARTED_SECONDS)
        before = before or resident_bytes()
    assert names(l0) == set()
    assert resident_bytes() - before < 40_000_000


def test_a_report_of_an_unknown_instance_costs_no_other_its_metrics() -> None:
    l0 = BlockLifecycle(1.0)
    bus = Bus([l0])
    bus.start()
    bus.publish(InstanceRegistered(1, "b", "model", "first", 64))
    for id, records in (("b", allocated(5)), ("absent", allocated(5)), ("b", released(5))):
        bus.publish(BlockReport(1, id, "model", exact((1, records))))
    bus.close()
    assert bus.errors["l0"] == 1
    assert l0.status("b").released_blocks == 1
    assert not l0.status("b").unsure
