"""Gaps in an instance's reports: when it is out of sync, and what brings it back."""

from __future__ import annotations

import pytest
from support.block_lifetimes import HISTOGRAMS, Engine, accessed, allocated, evicted, hold, owned, present, released

from kvserver.protocol import KVServerError
from kvserver.telemetry import BlockLifecycle


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


def test_repeated_report_counts_as_a_gap(l0: BlockLifecycle) -> None:
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
def test_events_that_the_bus_dropped_count_as_a_gap(l0: BlockLifecycle, end: bool) -> None:
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
