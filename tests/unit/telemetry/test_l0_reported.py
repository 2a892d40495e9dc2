"""Block lifetimes by which request holds which block with what content."""

from __future__ import annotations

import pytest
from support.block_lifetimes import HISTOGRAMS, Engine, hold, release

from kvserver._native import BlockLifetimes, LifetimeMetrics, pack_blocks
from kvserver.protocol import KVServerError, Owned, Released
from kvserver.telemetry import BlockLifecycle
from kvserver.telemetry.request_blocks import MAX_REQUESTS


@pytest.fixture
def engine() -> Engine:
    return Engine(BlockLifecycle(1.0))


def test_a_block_seen_first_is_allocated(engine: Engine) -> None:
    engine.holds(1, hold("a", [5, 6], [50, 60]))
    assert engine.counts() == {"allocations": 2, "active_blocks": 2, "tracked_blocks": 2}


def test_repeated_report_of_a_block_is_neither_an_allocation_nor_a_reuse(engine: Engine) -> None:
    engine.holds(1, hold("a", [5], [50]))
    engine.holds(2, hold("a", [5], [50]))
    assert engine.counts() == {"allocations": 1, "active_blocks": 1, "tracked_blocks": 1}
    assert engine.seconds("reuse_gap") == (0, 0)


def test_another_request_with_the_same_content_shares_the_block(engine: Engine) -> None:
    engine.holds(1, hold("a", [5], [50]))
    engine.holds(3, hold("b", [5], [50]))
    assert engine.counts() == {"allocations": 1, "shared_accesses": 1, "active_blocks": 1, "tracked_blocks": 1}
    assert engine.seconds("reuse_gap") == (1, 2)


def test_one_request_that_ends_does_not_release_what_another_holds(engine: Engine) -> None:
    engine.holds(1, hold("a", [5], [50]), hold("b", [5], [50]), hold("c", [5], [50]))
    engine.ended(2, "a")
    engine.ended(3, "c")
    assert engine.counts()["active_blocks"] == 1
    engine.ended(6, "b")
    assert engine.counts()["released_blocks"] == 1
    engine.holds(10, hold("d", [5], [51]))
    assert engine.seconds("idle_before_evict") == (1, 4), "from the end of the last owner"


def test_a_request_that_ends_releases_all_its_blocks(engine: Engine) -> None:
    engine.holds(1, hold("a", [5, 6], [50, 60]), hold("a", [7], group=1))
    engine.ended(2, "a")
    assert engine.counts() == {"allocations": 3, "released_blocks": 3, "tracked_blocks": 3}


def test_a_released_block_with_the_same_content_is_reused(engine: Engine) -> None:
    engine.holds(1, hold("a", [5], [50]))
    engine.ended(2, "a")
    engine.holds(4, hold("b", [5], [50]))
    assert engine.counts() == {"allocations": 1, "reuses": 1, "active_blocks": 1, "tracked_blocks": 1}
    assert engine.seconds("reuse_gap") == (1, 3)


def test_reused_block_evicted_while_active_was_idle_for_no_time(engine: Engine) -> None:
    engine.holds(1, hold("a", [5], [50]))
    engine.ended(2, "a")
    engine.holds(4, hold("b", [5], [50]))
    engine.holds(9, hold("c", [5], [51]))
    assert engine.seconds("idle_before_evict") == (1, 0), "request b had not ended"


def test_other_content_in_a_released_block_is_an_eviction_and_a_fresh_start(engine: Engine) -> None:
    engine.holds(1, hold("a", [5], [50]))
    engine.ended(3, "a")
    engine.holds(10, hold("b", [5], [51]))
    assert engine.counts() == {"allocations": 2, "evictions": 1, "active_blocks": 1, "tracked_blocks": 1}
    assert engine.seconds("lifetime") == (1, 9)
    assert engine.seconds("idle_before_evict") == (1, 7)
    assert engine.seconds("since_last_access") == (1, 9)
    engine.holds(12, hold("c", [5], [51]))
    assert engine.seconds("reuse_gap") == (1, 2), "from the second allocation"


def test_other_content_in_a_block_that_never_was_full_is_a_recycling(engine: Engine) -> None:
    engine.holds(1, hold("a", [5]))
    engine.ended(3, "a")
    engine.holds(10, hold("b", [5], [51]))
    assert engine.counts() == {"allocations": 2, "recycled": 1, "active_blocks": 1, "tracked_blocks": 1}
    assert engine.seconds("lifetime") == (1, 9)


def test_other_content_while_active_leaves_one_owner_only(engine: Engine) -> None:
    engine.holds(1, hold("a", [5], [50]), hold("b", [5], [50]))
    engine.holds(2, hold("c", [5], [51]))
    assert engine.metric("evictions") == 1
    engine.ended(3, "a")
    engine.ended(4, "b")
    assert engine.metric("active_blocks") == 1
    engine.ended(5, "c")
    assert engine.metric("released_blocks") == 1


def test_a_partial_block_that_fills_is_the_same_lifetime(engine: Engine) -> None:
    engine.holds(1, hold("a", [5, 6], [50]))
    engine.holds(2, hold("a", [6, 7], [60], first=1))
    assert engine.counts() == {"allocations": 3, "active_blocks": 3, "tracked_blocks": 3}
    engine.ended(3, "a")
    engine.holds(9, hold("b", [6], [61]))
    assert engine.metric("evictions") == 1, "it was full"
    assert engine.seconds("lifetime") == (1, 8)


def test_a_partial_block_that_stays_partial_is_the_same_lifetime(engine: Engine) -> None:
    engine.holds(1, hold("a", [5]))
    engine.holds(2, hold("a", [5]))
    assert engine.counts() == {"allocations": 1, "active_blocks": 1, "tracked_blocks": 1}


def test_a_partial_block_of_another_request_is_another_lifetime(engine: Engine) -> None:
    engine.holds(1, hold("a", [5]))
    engine.holds(2, hold("b", [5]))
    assert engine.counts() == {"allocations": 2, "recycled": 1, "active_blocks": 1, "tracked_blocks": 1}


def test_a_partial_block_that_its_request_let_go_is_another_lifetime(engine: Engine) -> None:
    engine.holds(1, hold("a", [5]), release("a", [5]))
    engine.holds(2, hold("a", [5], [50]))
    assert engine.counts() == {"allocations": 2, "recycled": 1, "active_blocks": 1, "tracked_blocks": 1}


def test_a_preempted_request_releases_only_what_it_names(engine: Engine) -> None:
    engine.holds(1, hold("a", [5, 6], [50, 60]), hold("b", [5], [50]))
    engine.holds(2, release("a", [5, 6, 7]))
    assert engine.counts()["active_blocks"] == 1
    assert engine.counts()["released_blocks"] == 1
    engine.ended(4, "a")
    assert engine.counts()["active_blocks"] == 1, "b holds 5"


def test_releases_and_ends_of_unknown_requests_change_nothing(engine: Engine) -> None:
    engine.holds(1, hold("a", [5], [50]), release("z", [5]))
    engine.ended(2, "y")
    assert engine.counts() == {"allocations": 1, "active_blocks": 1, "tracked_blocks": 1}


def test_a_request_that_holds_and_lets_go_many_times_ends_cleanly(engine: Engine) -> None:
    for n in range(500):
        engine.holds(n, hold("a", [5], [50]), release("a", [5]))
    engine.holds(500, hold("a", [5, 6], [50, 60]))
    assert engine.metric("reuses") == 500
    engine.ended(501, "a")
    assert engine.counts() == {"allocations": 2, "reuses": 500, "released_blocks": 2, "tracked_blocks": 2}


def test_equal_contents_of_two_groups_are_not_the_same(engine: Engine) -> None:
    engine.holds(1, hold("a", [5], [50]), hold("a", [6], [50], group=1))
    engine.ended(2, "a")
    engine.holds(3, hold("b", [5], [50], group=1))
    assert engine.metric("evictions") == 1
    engine.holds(3, hold("b", [6], [50], group=1))
    assert engine.metric("reuses") == 1


def test_the_null_block_is_passed_over(engine: Engine) -> None:
    engine.holds(1, hold("a", [0, 5, 0], [1, 50]), release("a", [0]))
    assert engine.counts() == {"allocations": 1, "active_blocks": 1, "tracked_blocks": 1}


# ---- full state -----------------------------------------------------------------------------------


def test_a_full_state_is_no_allocation_and_its_lifetimes_began_unseen(engine: Engine) -> None:
    engine.holds(1, hold("a", [5], [50]), hold("b", [5], [50]), full=True)
    assert engine.counts() == {"active_blocks": 1, "tracked_blocks": 1}
    engine.ended(2, "a")
    engine.ended(3, "b")
    engine.holds(7, hold("c", [5], [51]))
    assert engine.metric("evictions") == 1
    assert engine.seconds("idle_before_evict") == (1, 4)
    assert engine.seconds("lifetime") == (0, 0)
    assert engine.seconds("reuse_gap") == (0, 0)


def test_a_full_state_replaces_what_was_known(engine: Engine) -> None:
    engine.holds(1, hold("a", [5, 6], [50, 60]))
    engine.holds(2, hold("a", [6], [60]), full=True)
    assert engine.counts() == {"allocations": 2, "lost": 2, "active_blocks": 1, "tracked_blocks": 1}
    assert all(engine.seconds(name) == (0, 0) for name in HISTOGRAMS)


# ---- contents by tokens ---------------------------------------------------------------------------

TOKENS = [*range(100, 112)]  # three blocks of four


def test_equal_tokens_after_equal_tokens_are_the_same_content(engine: Engine) -> None:
    engine.holds(1, hold("a", [5, 6, 7], tokens=TOKENS))
    engine.ended(2, "a")
    engine.holds(3, hold("b", [5, 6, 7], tokens=TOKENS))
    assert engine.counts() == {"allocations": 3, "reuses": 3, "active_blocks": 3, "tracked_blocks": 3}


def test_equal_tokens_after_other_tokens_are_other_content(engine: Engine) -> None:
    engine.holds(1, hold("a", [5, 6], tokens=TOKENS[:8]))
    engine.ended(2, "a")
    engine.holds(3, hold("b", [5, 6], tokens=[1, *TOKENS[1:8]]))
    assert engine.metric("evictions") == 2


def test_tokens_may_come_in_parts(engine: Engine) -> None:
    engine.holds(1, hold("a", [5, 6], tokens=TOKENS[:6]))  # the second block is partial
    engine.holds(2, hold("a", [6, 7], tokens=TOKENS[4:], first=1))
    assert engine.counts() == {"allocations": 3, "active_blocks": 3, "tracked_blocks": 3}
    engine.holds(3, hold("b", [5, 6, 7], tokens=TOKENS))
    assert engine.metric("shared_accesses") == 3


def test_tokens_that_were_reported_before_are_the_same_content(engine: Engine) -> None:
    engine.holds(1, hold("a", [5, 6, 7], tokens=TOKENS))
    engine.holds(2, hold("a", [6], tokens=TOKENS[4:8], first=1))
    assert engine.counts() == {"allocations": 3, "active_blocks": 3, "tracked_blocks": 3}
    engine.holds(3, hold("a", [7], tokens=TOKENS[8:], first=2))
    assert engine.metric("evictions") == 0


def test_positions_that_were_left_out_are_named_by_where_they_begin(engine: Engine) -> None:
    engine.holds(1, hold("a", [5], tokens=TOKENS[:4]), hold("a", [7], tokens=TOKENS[8:], first=2))
    engine.ended(2, "a")
    engine.holds(3, hold("b", [7], tokens=TOKENS[8:], first=2))
    assert engine.metric("reuses") == 1, "the same tokens at the same position"
    engine.ended(4, "b")
    engine.holds(5, hold("c", [7], tokens=TOKENS[8:], first=3))
    assert engine.metric("evictions") == 1, "the same tokens at another position"


def test_each_group_has_a_chain_of_its_own(engine: Engine) -> None:
    engine.holds(1, hold("a", [5], tokens=TOKENS[:4]), hold("a", [6], tokens=TOKENS[4:8], group=1))
    engine.holds(2, hold("a", [7], tokens=TOKENS[4:8], first=1))
    engine.ended(3, "a")
    engine.holds(4, hold("b", [5, 7], tokens=TOKENS[:8]), hold("b", [6], tokens=TOKENS[4:8], group=1))
    assert engine.metric("reuses") == 3


# ---- what is refused ------------------------------------------------------------------------------

ids = pack_blocks([5, 6])
WRONG = {
    "a block out of range": (hold("a", [5, 64]), "block id 64 of an engine with 64 blocks"),
    "a release out of range": (release("a", [64]), "block id 64 of an engine with 64 blocks"),
    "fewer blocks than announced": (Owned("a", 0, 0, ids, 3), "2 block ids where 3"),
    "more blocks than announced": (Released("a", ids, 1), "more than 1 ids"),
    "half a content": (Owned("a", 0, 0, ids, 2, b"1234"), "contents of 4 bytes: 8 for each full block"),
    "more contents than blocks": (
        Owned("a", 0, 0, ids, 2, bytes(24)),
        "contents of 24 bytes: 8 for each full block, at most 16",
    ),
    "more tokens than blocks": (Owned("a", 0, 0, ids, 2, b"", bytes(36)), "tokens of 36 bytes: 4 for each, at most 32"),
    "no ids at all": (Owned("a", 0, 0, b"\2\2", 2), "neither"),
}


@pytest.mark.parametrize(("record", "why"), WRONG.values(), ids=WRONG)
def test_a_report_with_a_wrong_record_is_refused_whole_and_is_a_gap(record: Owned | Released, why: str) -> None:
    l0 = BlockLifecycle(1.0)
    engine, other = Engine(l0), Engine(l0, "other")
    for each in (engine, other):
        each.holds(1, hold("a", [1], [10]))
    with pytest.raises(KVServerError, match=why):
        engine.holds(2, hold("a", [2], [20]), record)
    assert engine.counts() == {"allocations": 1, "active_blocks": 1, "tracked_blocks": 1}
    engine.holds(3, hold("a", [2], [20]))
    assert (engine.metric("lost"), engine.out_of_sync) == (1, True)
    assert other.counts() == {"allocations": 1, "active_blocks": 1, "tracked_blocks": 1}
    engine.holds(4, hold("a", [1], [10]), full=True)
    assert (engine.out_of_sync, engine.metric("report_gaps")) == (False, 1)


def test_requests_that_never_end_are_bounded(engine: Engine) -> None:
    for first in range(0, MAX_REQUESTS, 4096):
        engine.holds(1, *(hold(str(n), [1 + n % 60], [10]) for n in range(first, first + 4096)))
    assert (engine.errors, engine.out_of_sync) == ([], False)
    engine.holds(2, hold("one more", [1], [10]))
    (error,) = engine.errors
    assert "none of them ends" in str(error)
    assert (engine.metric("active_blocks"), engine.out_of_sync) == (0, True)


def test_the_full_state_is_requested_after_a_report_that_could_not_be_applied(engine: Engine) -> None:
    engine.holds(1, full=True)
    for first in range(0, MAX_REQUESTS + 1, 4096):
        engine.holds(1, *(hold(str(n), [1 + n % 60], [10]) for n in range(first, first + 4096)))
    demands = engine.demands
    engine.holds(2, hold("one more", [1], [10]))
    assert (engine.demands, engine.out_of_sync) == (demands + 1, True)
    engine.holds(3, hold("one more", [1], [10]), full=True)
    engine.holds(4, hold("one more", [2], [20]))
    assert (engine.demands, engine.out_of_sync, engine.metric("report_gaps")) == (demands + 1, False, 0)
    assert engine.metric("active_blocks") == 2


def test_requests_without_blocks_are_forgotten() -> None:
    lifetimes = BlockLifetimes(LifetimeMetrics([1.0]), 8, 1.0, 0)
    block = b"\5\0\0\0"
    for request in range(100):
        lifetimes.own_blocks(request, 0, block, bytes([1] * 8), 1)
    assert lifetimes.requests == 100
    for request in range(50):
        lifetimes.release_blocks(request, block, 2)
    for request in range(50, 99):
        lifetimes.end_request(request, 2)
    assert lifetimes.requests == 1
    lifetimes.end_all()
    assert lifetimes.requests == 0
