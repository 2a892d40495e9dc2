"""What the hook in a real vLLM block pool records: what, in which order, when; and the full state that a daemon can begin with."""

from __future__ import annotations

import pytest
from hypothesis import given
from replay import Churn, Replay, timed, unpack
from support.properties import Dice, examples, walks

from kvserver.adapters.common.hazards import PinnedStores
from kvserver.adapters.vllm.blockpool import MARK_NS, MAX_RECORDS
from kvserver.protocol import (
    RECORD_ACCESSED,
    RECORD_ALLOCATED,
    RECORD_CLEARED,
    RECORD_EVICTED,
    RECORD_OWNED,
    RECORD_PRESENT,
    RECORD_RELEASED,
)

NAMES = {
    RECORD_ALLOCATED: "allocated",
    RECORD_ACCESSED: "accessed",
    RECORD_RELEASED: "released",
    RECORD_EVICTED: "evicted",
    RECORD_CLEARED: "cleared",
    RECORD_PRESENT: "present",
    RECORD_OWNED: "owned",
}


class Clock:
    """Moves when a test moves it."""

    def __init__(self) -> None:
        self.now = 5_000_000_000

    def __call__(self) -> int:
        return self.now


def words(records: bytes) -> list[str]:
    return [f"{NAMES[operation]} {block}" for operation, block in unpack(records)]


def test_records_come_in_the_order_of_events():
    churn = Churn()
    first = churn.begin(family=1, length=2)
    second = churn.begin(family=1, length=3)
    churn.end(first)
    churn.end(second)
    assert words(churn.drain_records().records) == [
        *["allocated 1", "allocated 2"],
        *["accessed 1", "accessed 2", "allocated 3"],
        *["released 2", "released 1"],
        *["released 3", "released 2", "released 1"],
    ]


def test_a_mark_is_made_when_the_time_has_moved_by_more_than_its_share():
    clock = Clock()
    churn = Churn(clock=clock)
    start = clock.now
    churn.begin(1, 2)
    clock.now += MARK_NS - 1
    churn.begin(2, 1)
    clock.now += 1
    churn.begin(3, 2)
    taken = churn.drain_records()
    assert list(timed(taken.records, taken.marks)) == [
        (start, RECORD_ALLOCATED, 1),
        (start, RECORD_ALLOCATED, 2),
        (start, RECORD_ALLOCATED, 3),
        (start + MARK_NS, RECORD_ALLOCATED, 4),
        (start + MARK_NS, RECORD_ALLOCATED, 5),
    ]
    assert len(taken.marks) == 2 * 16


def test_first_record_after_a_drain_has_a_time_though_the_clock_stood_still():
    clock = Clock()
    churn = Churn(clock=clock)
    churn.begin(1, 1)
    churn.drain_records()
    churn.begin(2, 1)
    taken = churn.drain_records()
    assert list(timed(taken.records, taken.marks)) == [(clock.now, RECORD_ALLOCATED, 2)]


def test_every_kind_of_event_has_its_time():
    clock = Clock()
    churn = Churn(blocks=4, clock=clock)
    blocks = churn.begin(1, 3)
    for step in (
        lambda: churn.end(blocks),
        lambda: churn.begin(1, 3),
        lambda: churn.pool.evict_blocks({1}),
        lambda: churn.end(churn.running[0]),
        lambda: churn.pool.reset_prefix_cache(),
    ):
        clock.now += MARK_NS
        step()
    taken = churn.drain_records()
    start = clock.now - 5 * MARK_NS
    times = {(time - start) // MARK_NS: NAMES[operation] for time, operation, _ in timed(taken.records, taken.marks)}
    assert times == {0: "allocated", 1: "released", 2: "accessed", 3: "evicted", 4: "released", 5: "cleared"}


def test_a_block_that_was_never_cached_is_recycled_not_evicted():
    churn = Churn(blocks=5)
    churn.end(churn.begin(1, 4, cached=2))
    churn.drain_records()
    churn.begin(2, 4)
    assert sorted(words(churn.drain_records().records)) == sorted(
        ["evicted 1", "evicted 2", *(f"allocated {block}" for block in (1, 2, 3, 4))]
    )


def test_a_pool_without_prefix_caching_recycles():
    churn = Churn(blocks=3, caching=False)
    churn.end(churn.begin(1, 2))
    churn.begin(1, 2)
    assert [word.split()[0] for word in words(churn.drain_records().records)] == ["allocated"] * 2 + [
        "released"
    ] * 2 + ["allocated"] * 2


def test_evict_blocks_evicts_what_has_content_owned_or_not():
    churn = Churn()
    churn.begin(1, 3, cached=2)
    churn.drain_records()
    churn.pool.evict_blocks({1, 2, 3, 7})
    assert sorted(words(churn.drain_records().records)) == ["evicted 1", "evicted 2"]


def test_null_block_is_in_no_record():
    """Where a window moved on, tables name it; vLLM touches and frees it with the others."""
    churn = Churn()
    blocks = churn.begin(1, 2)
    churn.drain_records()
    churn.pool.touch([churn.pool.null_block, blocks[0]])
    churn.pool.free_blocks([churn.pool.null_block, blocks[0]])
    assert words(churn.drain_records().records) == ["accessed 1", "released 1"]


def test_release_of_no_block_makes_no_record():
    clock = Clock()
    churn = Churn(clock=clock)
    blocks = churn.begin(1, 1)
    for released in ([], [churn.pool.null_block], blocks, []):
        clock.now += MARK_NS
        churn.pool.free_blocks(released)
    taken = churn.drain_records()
    assert list(timed(taken.records, taken.marks)) == [
        (clock.now - 4 * MARK_NS, RECORD_ALLOCATED, 1),
        (clock.now - MARK_NS, RECORD_RELEASED, 1),
    ]


def test_blocks_of_another_pool_are_that_pools_to_release():
    mine, other = Churn(), Churn()
    blocks = mine.begin(1, 2)
    foreign = other.begin(1, 3)
    mine.drain_records()
    other.drain_records()
    mine.pool.free_blocks([*blocks, *foreign])
    assert words(mine.drain_records().records) == ["released 1", "released 2"]
    assert words(other.drain_records().records) == ["released 1", "released 2", "released 3"]


def test_a_pin_is_no_access_and_no_owner():
    churn = Churn()
    blocks = churn.begin(1, 3, cached=2)
    churn.drain_records()
    churn.hook.pin([1, 2, 3])
    churn.end(blocks)
    assert words(churn.drain_records().records) == ["released 3", "released 2", "released 1"]
    (state,) = churn.hook.drain_full_state()
    assert words(state.records) == ["present 1", "present 2"], "3 has no content, and 1 and 2 no owner"
    churn.hook.unpin([1, 2, 3])
    assert not churn.drain_records().records


def test_a_pinned_block_never_has_as_many_references_as_requests_share_it():
    """vLLM with cascade attention takes such blocks for a prefix of all requests."""
    churn = Churn()
    block = churn.begin(1, 1)[0]
    churn.hook.pin([block.block_id])
    assert block.ref_cnt > 100_000


def test_of_a_prefix_that_a_store_kept_the_end_is_evicted_first():
    churn = Churn(blocks=5)
    stores = PinnedStores(churn.hook, ranks=1, seconds=10)
    blocks = churn.begin(1, 4)
    stores.add(1, [block.block_id for block in blocks])
    churn.end(blocks)
    assert churn.pool.get_num_free_blocks() == 0
    stores.ended(1)
    assert churn.pool.get_new_blocks(4) == blocks[::-1]


def test_a_full_state_names_every_owner():
    churn = Churn()
    first = churn.begin(1, 2)
    churn.begin(1, 3, cached=2)
    churn.end(churn.begin(2, 2, cached=1))
    churn.drain_records()
    (state,) = churn.hook.drain_full_state()
    assert words(state.records) == [
        *["present 1", "owned 1", "owned 1", "present 2", "owned 2", "owned 2", "present 3", "owned 3", "present 4"]
    ]
    churn.end(first)
    assert words(churn.drain_records().records) == ["released 2", "released 1"], "what follows counts from the state"


def test_a_full_state_of_a_pool_never_used_is_empty():
    (state,) = Churn().hook.drain_full_state()
    assert state.records == b""


def test_the_first_full_state_is_the_pools_whole_history():
    """So the first blocks' lifetimes are known from their beginning, though the engine starts before the first report."""
    clock = Clock()
    churn = Churn(clock=clock)
    churn.end(churn.begin(1, 2))
    clock.now += 10 * MARK_NS
    churn.begin(2, 1)
    (state,) = churn.hook.drain_full_state()
    assert words(state.records) == ["allocated 1", "allocated 2", "released 2", "released 1", "allocated 3"]
    assert len(state.marks) == 2 * 16
    (again,) = churn.hook.drain_full_state()
    assert words(again.records) == ["present 1", "present 2", "present 3", "owned 3"]


def test_a_full_state_drops_the_records_not_yet_drained():
    churn = Churn()
    churn.drain_records()
    churn.begin(1, 1)
    churn.hook.drain_full_state()
    assert not churn.drain_records().records


def test_a_hook_in_a_pool_at_work_begins_with_its_state():
    churn = Churn()
    churn.begin(1, 2)
    moved = type(churn.hook)()
    moved.install(churn.pool)
    churn.begin(2, 1)
    (state,) = moved.drain_full_state()
    assert words(state.records) == ["present 1", "owned 1", "present 2", "owned 2", "present 3", "owned 3"]


def test_records_that_are_not_drained_are_bounded():
    churn = Churn()
    blocks = churn.pool.get_new_blocks(30)
    for _ in range(2 * MAX_RECORDS // 30):
        churn.pool.touch(blocks)
        churn.pool.free_blocks(blocks)
    assert churn.hook.lost
    churn.pool.touch(blocks[:1])
    (state,) = churn.hook.drain_full_state()
    assert not churn.hook.lost
    replay = Replay().apply(state.records)
    assert churn.agrees(replay)
    assert replay.owners[blocks[0].block_id] == 2


def test_a_large_full_state_comes_in_parts():
    churn = Churn(blocks=MAX_RECORDS)
    churn.pool.get_new_blocks(MAX_RECORDS - 1)
    churn.drain_records()
    parts = churn.hook.drain_full_state()
    assert [len(part.records) for part in parts] == [4 * MAX_RECORDS, 4 * (MAX_RECORDS - 2)]
    replay = Replay()
    for part in parts:
        assert len(part.marks) == 16
        replay.apply(part.records)
    assert churn.agrees(replay)


@pytest.mark.hypothesis
@pytest.mark.parametrize("caching", [True, False])
def test_records_from_the_start_give_the_pools_own_state_and_so_does_a_full_state(caching):
    clears = 0

    @given(steps=walks(300))
    @examples(10)
    def walk(steps: list[Dice]) -> None:
        nonlocal clears
        churn, replay = Churn(caching=caching), Replay()
        for dice in steps:
            churn.act(dice)
            if dice.random() > 0.15:
                continue
            taken = churn.drain_records()
            assert len(list(timed(taken.records, taken.marks))) == len(taken.records) // 4
            assert churn.agrees(replay.apply(taken.records))
            if dice.random() > 0.15:
                continue
            (state,) = churn.hook.drain_full_state()
            full = Replay().apply(state.records)
            assert churn.agrees(full)
            assert full.owners == +replay.owners
            owned_or_cached = {b.block_id for b in churn.pool.blocks[1:] if b.block_hash is not None} | set(full.owners)
            assert full.live == owned_or_cached
            replay.live |= full.live  # what was evicted while owned: a state names it, for its owner's sake
        clears += churn.hook.clears

    walk()
    assert clears, "no pool was ever cleared: nothing of that was tried"


def test_the_earlier_collector_receives_everything_but_pins():
    class Collector:
        def __init__(self) -> None:
            self.received: list[str] = []

        def on_block_allocated(self, block):
            self.received.append(f"allocated {block.block_id}")

        def on_block_accessed(self, block):
            self.received.append(f"accessed {block.block_id}")

        def on_block_evicted(self, block):
            self.received.append(f"evicted {block.block_id}")

        def reset(self):
            self.received.append("reset")

        def drain_events(self):
            return ["an event"]

    churn = Churn()
    collector = Collector()
    churn.pool.metrics_collector = collector
    hook = type(churn.hook)()
    hook.install(churn.pool)
    blocks = churn.begin(1, 1)
    churn.pool.touch(blocks)
    hook.pin([1])
    hook.unpin([1])
    churn.pool.free_blocks(blocks * 2)
    churn.pool.reset_prefix_cache()
    assert collector.received == ["evicted 1", "allocated 1", "accessed 1", "reset"]
    assert churn.pool.metrics_collector.drain_events() == ["an event"]
