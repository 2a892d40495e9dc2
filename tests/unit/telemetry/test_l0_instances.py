"""Which instance's metrics a report changes, when they are in sync, and when they vanish."""

from __future__ import annotations

import os
import threading
import time

import pytest
from support.block_lifetimes import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    SECOND,
    Engine,
    accessed,
    allocated,
    cleared,
    evicted,
    exact,
    hold,
    owned,
    present,
    released,
)

from kvserver.events import BlockReport, Bus, InstanceDisconnected, InstanceRegistered
from kvserver.protocol import DEPARTED_SECONDS, MOST_DEPARTED, KVServerError
from kvserver.protocol.status import L0Status
from kvserver.server.report_sync import MAX_POOLS
from kvserver.telemetry import BlockLifecycle, Kind


class Clock:
    def __init__(self) -> None:
        self.ns = SECOND

    def __call__(self) -> int:
        return self.ns

    def advance(self, seconds: float) -> None:
        self.ns += int(seconds * SECOND)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def l0(clock: Clock) -> BlockLifecycle:
    return BlockLifecycle(1.0, clock=clock)


def names(l0: BlockLifecycle) -> set[tuple[str, ...]]:
    return {labels for family in l0.families() for labels, _ in family.points}


# ---- apart from each other ------------------------------------------------------------------------


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


# ---- gaps -----------------------------------------------------------------------------------------


def test_the_first_report_may_have_any_number(l0: BlockLifecycle) -> None:
    engine = Engine(l0)
    engine.sequence = 57
    engine.did((1, allocated(5)))
    assert engine.metric("report_gaps") == 0
    assert not engine.out_of_sync
    engine.did((2, released(5)))
    assert engine.metric("report_gaps") == 0


def test_a_missing_report_ends_all_lifetimes_as_lost(l0: BlockLifecycle) -> None:
    engine, other = Engine(l0), Engine(l0, "other")
    engine.did((1, allocated(5, 6)))
    other.did((1, allocated(5)))
    engine.sequence += 1
    engine.did((9, evicted(5)))
    assert engine.counts() == {"allocations": 2, "lost": 2}
    assert engine.metric("report_gaps") == 1
    assert all(engine.seconds(name) == (0, 0) for name in HISTOGRAMS)
    assert other.counts() == {"allocations": 1, "active_blocks": 1, "tracked_blocks": 1}
    assert (engine.out_of_sync, other.out_of_sync) == (True, False)


def test_a_report_that_comes_again_is_a_gap(l0: BlockLifecycle) -> None:
    engine = Engine(l0)
    engine.did((1, allocated(5)))
    engine.sequence -= 1
    engine.did((1, allocated(5)))
    assert engine.metric("report_gaps") == 1


def test_an_instance_is_out_of_sync_until_its_full_state_arrives(l0: BlockLifecycle) -> None:
    engine = Engine(l0)
    engine.did((1, allocated(5)))
    engine.sequence += 3
    engine.did((2, released(5)))
    engine.did((3, accessed(5)))
    assert engine.out_of_sync
    assert engine.metric("unsure") == 1
    engine.did((4, present(5) + owned(5)), full=True)
    assert not engine.out_of_sync
    assert engine.metric("unsure") == 0
    assert engine.counts() == {"allocations": 1, "lost": 1, "active_blocks": 1, "tracked_blocks": 1}
    assert engine.metric("report_gaps") == 1, "once"


def test_a_full_state_that_comes_after_a_gap_is_enough(l0: BlockLifecycle) -> None:
    engine = Engine(l0)
    engine.did((1, allocated(5)))
    engine.sequence += 1
    engine.did((4, present(5) + owned(5)), full=True)
    assert engine.metric("report_gaps") == 1
    assert not engine.out_of_sync


def test_every_pool_must_be_reported_after_a_gap(l0: BlockLifecycle) -> None:
    engine = Engine(l0)
    engine.did((1, allocated(5)))
    engine.did((1, allocated(5)), pool=1)
    engine.sequence += 1
    engine.did((2, present(5)), full=True)
    assert engine.out_of_sync
    engine.did((2, present(5)), full=True, pool=1)
    assert not engine.out_of_sync


def test_a_lifetime_that_began_after_the_gap_is_observed(l0: BlockLifecycle) -> None:
    engine = Engine(l0)
    engine.did((1, allocated(5)))
    engine.sequence += 1
    engine.did((2, allocated(6)), (4, evicted(5)), (5, evicted(6)))
    assert engine.seconds("lifetime") == (1, 3)


def test_ends_of_requests_are_counted_in_the_sequence_of_an_exact_engine(l0: BlockLifecycle) -> None:
    engine = Engine(l0)
    engine.did((1, allocated(5)))
    engine.ended(2, "a")
    engine.did((3, released(5)))
    assert engine.metric("report_gaps") == 0
    engine.sequence += 1
    engine.ended(4, "b")
    assert engine.metric("report_gaps") == 1
    assert engine.out_of_sync


def test_a_gap_makes_no_request_an_owner(l0: BlockLifecycle) -> None:
    engine = Engine(l0)
    engine.holds(1, hold("a", [5], [50]))
    engine.sequence += 1
    engine.holds(2, hold("b", [5], [50]))
    engine.ended(3, "b")
    assert engine.counts() == {"allocations": 2, "lost": 1, "released_blocks": 1, "tracked_blocks": 1}


@pytest.mark.parametrize("end", [False, True], ids=["a report", "an end"])
def test_what_the_bus_dropped_is_a_gap(l0: BlockLifecycle, end: bool) -> None:
    engine = Engine(l0)
    engine.did((1, allocated(1, 2)), full=True)
    engine.drops = True
    for _ in range(2):
        engine.ended(2, "a") if end else engine.did((2, allocated(3)))
    assert not engine.out_of_sync
    engine.drops = False
    engine.did((3, allocated(5)))
    assert engine.out_of_sync
    assert (engine.metric("report_gaps"), engine.metric("lost")) == (1, 2)
    assert engine.demands > 0
    engine.did((4, present(1)), full=True)
    assert (engine.out_of_sync, engine.metric("report_gaps")) == (False, 1)


def test_a_full_state_that_the_bus_dropped_is_requested_again(l0: BlockLifecycle) -> None:
    engine = Engine(l0)
    engine.did((1, allocated(1)), full=True)
    engine.drops = True
    engine.did((2, present(1)), full=True)
    engine.drops = False
    engine.did((3, released(1)))
    assert (engine.out_of_sync, engine.demands) == (True, 1)


# ---- connects and disconnects ---------------------------------------------------------------------


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


def test_a_restarted_engine_may_report_otherwise(l0: BlockLifecycle) -> None:
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


# ---- what must not happen -------------------------------------------------------------------------


def test_exact_and_reported_are_never_mixed(l0: BlockLifecycle) -> None:
    engine = Engine(l0)
    engine.did((1, allocated(5)))
    with pytest.raises(KVServerError, match="sent exact records before; these are reported"):
        engine.holds(2, hold("a", [6], [60]))
    assert engine.counts() == {"allocations": 1, "active_blocks": 1, "tracked_blocks": 1}


def test_wrong_records_bring_the_instance_out_of_sync(l0: BlockLifecycle) -> None:
    engine = Engine(l0)
    engine.did((1, allocated(5)))
    with pytest.raises(KVServerError, match="block 64 is not below 64"):
        engine.did((2, evicted(5) + allocated(64)))
    assert engine.counts() == {"allocations": 1, "active_blocks": 1, "tracked_blocks": 1}, "nothing is applied"
    engine.did((2, released(5)))
    assert engine.counts() == {"allocations": 1, "lost": 1}
    assert engine.out_of_sync
    engine.did((3, present(5)), full=True)
    assert not engine.out_of_sync


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


# ---- what is read ---------------------------------------------------------------------------------


def test_every_family_is_there_before_the_first_report(l0: BlockLifecycle) -> None:
    families = {family.name: family for family in l0.families()}
    assert set(families) == {
        *(f"kvserver_l0_{name}" for name in (*COUNTERS, *GAUGES, "report_gaps", "records", "unsure")),
        *(f"kvserver_l0_block_{name}_seconds" for name in HISTOGRAMS),
    }
    for name, family in families.items():
        short = name.removeprefix("kvserver_l0_")
        kind = Kind.GAUGE if short in (*GAUGES, "unsure") else Kind.COUNTER
        assert family.kind is (Kind.HISTOGRAM if name.endswith("_seconds") else kind), name
        assert bool(family.bounds) == (family.kind is Kind.HISTOGRAM)
        assert family.labels == ("instance_id", "model_name")
        assert family.points == []
        assert family.help.endswith(".")


def test_a_registered_instance_has_all_its_points(l0: BlockLifecycle) -> None:
    engine = Engine(l0)
    assert all([labels for labels, _ in family.points] == [engine.names] for family in l0.families())


def test_events_are_counted_in_both_forms(l0: BlockLifecycle) -> None:
    a, b = Engine(l0, "a"), Engine(l0, "b")
    a.did((1, allocated(1, 2) + released(1)))
    a.did((1, []), full=True)
    b.holds(1, hold("a", [5, 6]), hold("b", [7]))
    b.ended(2, "a")
    assert (a.metric("records"), b.metric("records")) == (3, 3)


def test_status_shows_how_an_instance_reports_and_its_counts(l0: BlockLifecycle) -> None:
    engine = Engine(l0)
    engine.did((1, allocated(5, 6)), (2, released(5)))
    assert l0.status("engine") == L0Status(
        records=3, allocations=2, active_blocks=1, released_blocks=1, tracked_blocks=2
    )
    assert l0.status("absent") == L0Status()


def test_closing_changes_no_metric(l0: BlockLifecycle) -> None:
    engine = Engine(l0)
    engine.did((1, allocated(5)))
    l0.close()
    assert engine.counts() == {"allocations": 1, "active_blocks": 1, "tracked_blocks": 1}


def test_metrics_read_while_reports_are_applied_are_of_one_moment() -> None:
    l0 = BlockLifecycle(1.0)
    engine = Engine(l0, num_blocks=2000)
    everything = range(1, 2000)
    batch = exact((1, allocated(*everything)), (2, released(*everything)), (3, evicted(*everything)))
    stop, wrong, reads = threading.Event(), [], 0

    def read() -> None:
        nonlocal reads
        while not stop.is_set():
            found = l0.status("engine")
            if found.allocations != found.evictions or found.tracked_blocks:
                wrong.append(found)
            l0.families()
            reads += 1

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    deadline = time.monotonic() + 60
    while reads < 20 and time.monotonic() < deadline:
        engine.report(batch)
    stop.set()
    for reader in readers:
        reader.join()
    assert reads >= 20
    assert not wrong
    assert engine.metric("allocations") == engine.sequence * len(everything)


def test_any_number_of_instances_has_series_within_bounds(l0: BlockLifecycle, clock: Clock) -> None:
    l0.handle(InstanceRegistered(clock.ns, "stays", "m", "x", 8))
    for number in range(3 * MOST_DEPARTED):
        clock.advance(0.001)
        l0.handle(InstanceRegistered(clock.ns, f"i{number}", f"m{number}", "x", 8))
        l0.handle(InstanceDisconnected(clock.ns, f"i{number}", f"m{number}", True))
    for family in l0.families():
        names = {labels[0] for labels, _ in family.points}
        assert len(family.points) == len(names) == MOST_DEPARTED + 1, family.name
        assert {"stays", f"i{3 * MOST_DEPARTED - 1}"} <= names
