"""Block lifetimes by what the engine's pool did, record by record."""

from __future__ import annotations

from array import array

import pytest
from support.block_lifetimes import (
    HISTOGRAMS,
    Engine,
    accessed,
    allocated,
    cleared,
    evicted,
    ns,
    owned,
    present,
    released,
)

from kvserver._native import BlockLifetimes, LifetimeMetrics, check_records
from kvserver.protocol import MARK, RECORD_OPERATION_SHIFT, RECORD_OWNED, RESIDENCY_SECONDS
from kvserver.telemetry import BlockLifecycle


@pytest.fixture
def engine() -> Engine:
    return Engine(BlockLifecycle(1.0))


def test_an_allocated_block_is_active(engine: Engine) -> None:
    engine.did((1, allocated(5, 6)))
    assert engine.counts() == {"allocations": 2, "active_blocks": 2, "tracked_blocks": 2}


def test_a_released_block_stays_tracked(engine: Engine) -> None:
    engine.did((1, allocated(5, 6)), (2, released(5)))
    assert engine.counts() == {"allocations": 2, "active_blocks": 1, "released_blocks": 1, "tracked_blocks": 2}
    assert all(engine.seconds(name) == (0, 0) for name in HISTOGRAMS)


def test_an_eviction_ends_the_lifetime(engine: Engine) -> None:
    engine.did((1, allocated(5)), (3, released(5)), (10, evicted(5)))
    assert engine.counts() == {"allocations": 1, "evictions": 1}
    assert engine.seconds("lifetime") == (1, 9)


def test_idle_is_counted_from_the_release_not_from_the_start_of_the_last_use(engine: Engine) -> None:
    engine.did((1, allocated(5)), (2, released(5)), (3, accessed(5)), (8, released(5)), (10, evicted(5)))
    assert engine.seconds("idle_before_evict") == (1, 2)
    assert engine.seconds("since_last_access") == (1, 7)


def test_idle_begins_when_the_last_owner_leaves(engine: Engine) -> None:
    engine.did((1, allocated(5)), (2, accessed(5)), (3, released(5)), (6, released(5)), (10, evicted(5)))
    assert engine.seconds("idle_before_evict") == (1, 4)


def test_a_block_never_accessed_again_is_idle_since_its_allocation_by_vllms_rule(engine: Engine) -> None:
    engine.did((1, allocated(5)), (2, released(5)), (10, evicted(5)))
    assert engine.seconds("since_last_access") == (1, 9)


def test_an_access_of_a_released_block_is_a_reuse(engine: Engine) -> None:
    engine.did((1, allocated(5)), (2, released(5)), (4, accessed(5)))
    assert engine.counts() == {"allocations": 1, "reuses": 1, "active_blocks": 1, "tracked_blocks": 1}


def test_an_access_of_an_owned_block_is_a_shared_access(engine: Engine) -> None:
    engine.did((1, allocated(5)), (4, accessed(5)))
    assert engine.counts() == {"allocations": 1, "shared_accesses": 1, "active_blocks": 1, "tracked_blocks": 1}


def test_the_first_gap_is_from_the_allocation(engine: Engine) -> None:
    engine.did((1, allocated(5)), (4, accessed(5)))
    assert engine.seconds("reuse_gap") == (1, 3)


def test_each_gap_counts_when_it_happens_however_many_there_are(engine: Engine) -> None:
    engine.did((1, allocated(5)), *((1 + n, accessed(5)) for n in range(1, 11)))
    assert engine.seconds("reuse_gap") == (10, 10)


def test_a_block_with_two_owners_is_active_until_both_left(engine: Engine) -> None:
    engine.did((1, allocated(5)), (2, accessed(5)), (3, released(5)))
    assert engine.metric("active_blocks") == 1
    engine.did((4, released(5)))
    assert engine.metric("released_blocks") == 1


def test_a_block_allocated_again_without_eviction_is_recycled(engine: Engine) -> None:
    engine.did((1, allocated(5)), (3, released(5)), (10, allocated(5)))
    assert engine.counts() == {"allocations": 2, "recycled": 1, "active_blocks": 1, "tracked_blocks": 1}
    assert engine.seconds("lifetime") == (1, 9)
    assert engine.seconds("idle_before_evict") == (1, 7)
    assert engine.seconds("since_last_access") == (1, 9)


def test_a_block_allocated_again_after_its_eviction_is_not_recycled(engine: Engine) -> None:
    engine.did((1, allocated(5)), (3, released(5)), (10, evicted(5) + allocated(5)))
    assert engine.counts() == {"allocations": 2, "evictions": 1, "active_blocks": 1, "tracked_blocks": 1}


def test_a_new_lifetime_has_a_history_of_its_own(engine: Engine) -> None:
    engine.did((1, allocated(5)), (2, accessed(5)), (3, released(5, 5)), (4, evicted(5)))
    before = engine.seconds("reuse_gap")
    engine.did((10, allocated(5)), (11, accessed(5)), (12, released(5, 5)), (14, evicted(5)))
    assert engine.seconds("reuse_gap") == (before[0] + 1, before[1] + 1)
    assert engine.seconds("lifetime") == (2, 3 + 4)
    assert engine.seconds("idle_before_evict") == (2, 1 + 2)


def test_a_block_evicted_while_owned_was_idle_for_no_time(engine: Engine) -> None:
    engine.did((1, allocated(5)), (4, evicted(5)))
    assert engine.seconds("idle_before_evict") == (1, 0)
    assert engine.seconds("lifetime") == (1, 3)
    assert engine.counts() == {"allocations": 1, "evictions": 1, "active_blocks": 1, "tracked_blocks": 1}


def test_owners_of_a_block_without_a_lifetime_leave_it_one_by_one(engine: Engine) -> None:
    engine.did((1, allocated(5)), (2, accessed(5)), (3, evicted(5)), (4, released(5)))
    assert engine.metric("active_blocks") == 1
    engine.did((5, released(5)))
    assert engine.counts() == {"allocations": 1, "shared_accesses": 1, "evictions": 1}


@pytest.mark.parametrize("record", [accessed(5), released(5), evicted(5)])
def test_nothing_is_observed_of_a_block_without_a_lifetime(engine: Engine, record: list[int]) -> None:
    engine.did((1, record), (2, released(5)), (3, evicted(5)))
    assert engine.counts() == {}
    assert all(engine.seconds(name) == (0, 0) for name in HISTOGRAMS)


def test_an_owner_of_a_block_without_a_lifetime_makes_it_active(engine: Engine) -> None:
    engine.did((1, accessed(5)))
    assert engine.counts() == {"active_blocks": 1, "tracked_blocks": 1}


def test_a_release_too_many_changes_nothing(engine: Engine) -> None:
    engine.did((1, allocated(5)), (2, released(5)), (8, released(5)), (9, evicted(5)))
    assert engine.seconds("idle_before_evict") == (1, 7)
    assert engine.metric("tracked_blocks") == 0


def test_second_eviction_of_a_block_is_not_counted(engine: Engine) -> None:
    engine.did((1, allocated(5)), (2, evicted(5)), (3, evicted(5)))
    assert engine.metric("evictions") == 1


def test_a_clear_ends_all_lifetimes_without_evictions_or_observations(engine: Engine) -> None:
    engine.did((1, allocated(5, 6, 7)), (2, released(5, 6)), (9, cleared()))
    counts = engine.counts()
    assert counts == {"allocations": 3, "cleared": 3, "active_blocks": 1, "tracked_blocks": 1}, "7 is still owned"
    assert all(engine.seconds(name) == (0, 0) for name in HISTOGRAMS)


def test_what_a_clear_ended_is_not_recycled_later(engine: Engine) -> None:
    engine.did((1, allocated(5)), (2, released(5)), (3, cleared()), (4, allocated(5)))
    assert engine.counts() == {"allocations": 2, "cleared": 1, "active_blocks": 1, "tracked_blocks": 1}


def test_the_null_block_has_no_lifetime(engine: Engine) -> None:
    engine.did((1, allocated(0) + accessed(0) + released(0) + evicted(0) + present(0) + owned(0)))
    assert engine.counts() == {}


# ---- full state -----------------------------------------------------------------------------------


def test_a_full_state_is_no_allocation(engine: Engine) -> None:
    engine.did((1, present(5) + owned(5, 5) + present(6)), full=True)
    assert engine.counts() == {"active_blocks": 1, "released_blocks": 1, "tracked_blocks": 2}
    engine.did((2, released(5)))
    assert engine.metric("active_blocks") == 1
    engine.did((3, released(5)))
    assert engine.metric("released_blocks") == 2


def test_a_lifetime_that_began_unseen_has_no_length_but_is_counted(engine: Engine) -> None:
    engine.did((1, present(5)), full=True)
    engine.did((9, evicted(5)))
    assert engine.counts() == {"evictions": 1}
    assert all(engine.seconds(name) == (0, 0) for name in HISTOGRAMS)


def test_a_lifetime_that_began_unseen_has_no_first_gap_but_a_second_one(engine: Engine) -> None:
    engine.did((1, present(5)), full=True)
    engine.did((3, accessed(5)))
    assert engine.seconds("reuse_gap") == (0, 0)
    assert engine.metric("reuses") == 1
    engine.did((7, accessed(5)))
    assert engine.seconds("reuse_gap") == (1, 4)


def test_of_a_lifetime_that_began_unseen_idle_is_known_from_its_release(engine: Engine) -> None:
    engine.did((1, present(5) + owned(5)), full=True)
    engine.did((3, released(5)), (7, evicted(5)))
    assert engine.seconds("idle_before_evict") == (1, 4)
    assert engine.seconds("since_last_access") == (0, 0)
    assert engine.seconds("lifetime") == (0, 0)


def test_of_a_lifetime_that_began_unseen_the_time_since_an_access_is_known_from_the_first_one_seen(
    engine: Engine,
) -> None:
    engine.did((1, present(5) + owned(5)), full=True)
    engine.did((3, accessed(5)), (7, evicted(5)))
    assert engine.seconds("since_last_access") == (1, 4)
    assert engine.seconds("idle_before_evict") == (1, 0), "it is owned"


def test_a_full_state_replaces_what_was_known(engine: Engine) -> None:
    engine.did((1, allocated(5, 6, 7)))
    engine.did((2, present(6) + owned(6)), full=True)
    assert engine.counts() == {"allocations": 3, "lost": 3, "active_blocks": 1, "tracked_blocks": 1}
    assert engine.seconds("lifetime") == (0, 0)


def test_records_behind_a_full_state_in_its_report_are_observed(engine: Engine) -> None:
    engine.did((1, present(5)), (2, allocated(6)), (5, evicted(6)), full=True)
    assert engine.seconds("lifetime") == (1, 3)


def test_a_full_state_may_come_in_several_reports(engine: Engine) -> None:
    engine.did((1, present(5)), full=True)
    engine.did((1, present(6) + owned(6)))
    assert engine.counts() == {"active_blocks": 1, "released_blocks": 1, "tracked_blocks": 2}


# ---- times ----------------------------------------------------------------------------------------


def test_each_mark_is_the_time_of_the_records_up_to_the_next(engine: Engine) -> None:
    engine.did((1, allocated(5, 6)), (2, evicted(5)), (4, evicted(6)))
    assert engine.seconds("lifetime") == (2, 1 + 3)


def test_span_that_would_be_negative_is_observed_as_zero(engine: Engine) -> None:
    engine.did((5, allocated(5)))
    engine.did((4, accessed(5)), (6, evicted(5)))
    assert engine.seconds("reuse_gap") == (1, 0)
    assert engine.seconds("since_last_access") == (1, 2)


def test_what_happened_at_an_unknown_time_is_counted_and_not_observed(engine: Engine) -> None:
    engine.did((0, allocated(5) + accessed(5)))
    engine.did((9, evicted(5)))
    assert engine.counts() == {
        "allocations": 1,
        "shared_accesses": 1,
        "evictions": 1,
        "active_blocks": 1,
        "tracked_blocks": 1,
    }
    assert engine.seconds("lifetime") == (0, 0)
    assert engine.seconds("since_last_access") == (0, 0)


def test_value_equal_to_a_bound_counts_in_the_bucket_of_the_bound(engine: Engine) -> None:
    for block, seconds in enumerate(RESIDENCY_SECONDS, start=1):
        engine.did((1, allocated(block)))
        engine.did((1 + seconds, evicted(block)))
    engine.did((1, allocated(40)), (2000, evicted(40)))
    (family,) = [f for f in engine.l0.families() if f.name == "kvserver_l0_block_lifetime_seconds"]
    assert family.bounds == RESIDENCY_SECONDS
    assert family.points[0][1].counts == [1] * (len(RESIDENCY_SECONDS) + 1)


# ---- what is refused ------------------------------------------------------------------------------


def words(*numbers: int) -> bytes:
    return array("I", numbers).tobytes()


def marks(*numbers: int) -> bytes:
    return b"".join(MARK.pack(number, ns(1 + at)) for at, number in enumerate(numbers))


WRONG = {
    "half a record": (b"\1\0", marks(0), "2 bytes are no whole number of records"),
    "half a mark": (words(1), marks(0)[:8], "8 bytes are no whole number of marks"),
    "no mark": (words(1), b"", "without a mark"),
    "an unknown operation": (words(1, RECORD_OWNED + 1 << RECORD_OPERATION_SHIFT), marks(0), "record 1: operation 7"),
    "a block out of range": (words(*allocated(1, 2, 64)), marks(0), "record 2: block 64 is not below 64"),
    "the largest block": (words(*owned((1 << RECORD_OPERATION_SHIFT) - 1)), marks(0), "record 0: block 536870911"),
    "a first mark that is late": (words(1, 2), marks(1), "mark 0 is not of record 0"),
    "a mark twice": (words(1, 2), marks(0, 0), "mark 1 is not of a later record"),
    "marks that go back": (words(1, 2, 3), marks(0, 2, 1), "mark 2 is not of a later record"),
    "a mark beyond the end": (words(1, 2), marks(0, 2), "mark 1 is beyond the records"),
    "a mark of nothing": (b"", marks(0, 1), "mark 1 is beyond the records"),
    "time that goes back": (words(1, 2), MARK.pack(0, 9) + MARK.pack(1, 8), "mark 1 is earlier"),
}


@pytest.mark.parametrize(("records", "when", "why"), WRONG.values(), ids=WRONG)
def test_wrong_records_are_refused_and_do_no_harm_unchecked(records: bytes, when: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_records(records, when, 64)
    metrics = LifetimeMetrics([1.0])
    BlockLifetimes(metrics, 64, 1.0, 0).apply(records, when)
    found = metrics.read()
    assert (found.active_blocks, found.released_blocks) == (0, 0), "the pool ended"
    assert found.allocations == found.lost + found.recycled + found.evictions


RIGHT = {
    "nothing": (b"", b""),
    "nothing at a time": (b"", marks(0)),
    "all operations on the last block": (words(*(n << RECORD_OPERATION_SHIFT | 63 for n in range(7))), marks(0, 3, 6)),
    "a clear of any block": (words(cleared()[0] | 1000), marks(0)),
    "marks of the same time": (words(1, 2), MARK.pack(0, 9) + MARK.pack(1, 9)),
}


@pytest.mark.parametrize(("records", "when"), RIGHT.values(), ids=RIGHT)
def test_valid_records_are_accepted(records: bytes, when: bytes) -> None:
    check_records(records, when, 64)
    BlockLifetimes(LifetimeMetrics([1.0]), 64, 1.0, 0).apply(records, when)


def test_a_pool_of_no_blocks_takes_no_block() -> None:
    with pytest.raises(ValueError, match="block 0 is not below 0"):
        check_records(words(0), marks(0), 0)
    metrics = LifetimeMetrics([])
    BlockLifetimes(metrics, 0, 1.0, 0).apply(words(*allocated(0, 1)), marks(0))
    assert metrics.read().allocations == 0


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_a_sample_rate_is_a_probability(rate: float) -> None:
    with pytest.raises(ValueError, match="0 to 1"):
        BlockLifetimes(LifetimeMetrics([1.0]), 8, rate, 0)


@pytest.mark.parametrize("bounds", [[2.0, 1.0], [1.0, 1.0], [float("nan")]])
def test_bounds_of_buckets_ascend(bounds: list[float]) -> None:
    with pytest.raises(ValueError, match="ascend"):
        LifetimeMetrics(bounds)


# ---- metrics and pools ----------------------------------------------------------------------------


def test_a_block_uses_at_most_64_bytes() -> None:
    assert BlockLifetimes.bytes_per_block <= 64


def test_pools_with_the_same_metrics_are_counted_together() -> None:
    metrics = LifetimeMetrics([1.0])
    pools = [BlockLifetimes(metrics, 8, 1.0, seed) for seed in range(2)]
    for pool in pools:
        pool.apply(words(*allocated(1, 2), *released(2)), marks(0))
    found = metrics.read()
    assert (found.allocations, found.active_blocks, found.released_blocks) == (4, 2, 2)


def test_lifetimes_of_a_deleted_pool_count_as_lost() -> None:
    metrics = LifetimeMetrics([1.0])
    lifetimes = BlockLifetimes(metrics, 8, 1.0, 0)
    lifetimes.apply(words(*allocated(1, 2), *released(2)), marks(0))
    del lifetimes
    found = metrics.read()
    assert (found.lost, found.active_blocks, found.released_blocks) == (2, 0, 0)


def test_metrics_that_were_read_do_not_change() -> None:
    metrics = LifetimeMetrics([1.0])
    lifetimes = BlockLifetimes(metrics, 8, 1.0, 0)
    before = metrics.read()
    lifetimes.apply(words(*allocated(1), *evicted(1)), marks(0, 1))
    assert (before.allocations, before.lifetime.counts, before.lifetime.sum) == (0, [0, 0], 0)
    assert (metrics.read().allocations, metrics.read().lifetime.counts) == (1, [1, 0])
