"""Plans of clusters: tiers, routers and the network, against plain models and by hand."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.properties import examples
from support.traces import lines_of

from kvserver.replay import Plan, PlanResult, Trace, read_trace, replay_cluster, replay_sizes
from kvserver.replay.routers import ROUTERS
from unit.replay.test_replay import BRANCHES, prompts_of

GB = 10**9  # of a block, so that GB/s are blocks a second


def plan(trace: Trace, blocks: int, machines: int, router: str, l2: int | None, window: float = 1.0) -> PlanResult:
    (result,) = replay_cluster(trace, [blocks], ["lru"], Plan(machines, router, l2, GB, window))
    return result


def trace_of(prompts: list[list[int]], milliseconds: int = 1000) -> Trace:
    return read_trace(lines_of(prompts, milliseconds), "t")


class PlainLru:
    """As plain_lru_hits(), for a cluster."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.resident: OrderedDict[int, None] = OrderedDict()

    def leading(self, ids: list[int]) -> int:
        return next((number for number, id in enumerate(ids) if id not in self.resident), len(ids))

    def store(self, ids: list[int]) -> int:
        """How many were not there."""
        stored = [id for id in ids[: self.blocks or None] if id not in self.resident]
        for id in reversed(ids[: self.blocks or None]):
            self.resident.pop(id, None)
            self.resident[id] = None
        while self.blocks and len(self.resident) > self.blocks:
            self.resident.popitem(last=False)
        return len(stored)


def plain_round_robin(prompts: list[list[int]], machines: int, blocks: int, l2_blocks: int) -> tuple[int, int, int]:
    """Blocks found in L1, read from L2 and written to it."""
    l1s, l2 = [PlainLru(blocks) for _ in range(machines)], PlainLru(l2_blocks)
    found = read = written = 0
    for number, ids in enumerate(prompts):
        l1 = l1s[number % machines]
        hits = l1.leading(ids)
        filled = min(l2.leading(ids[hits:]), max(0, (blocks or len(ids)) - hits))
        found, read = found + hits, read + filled
        l1.store(ids)
        written += l2.store(ids[: blocks or None])
    return found, read, written


@examples(150)
@given(BRANCHES, st.integers(1, 4), st.integers(0, 9), st.integers(0, 14))
def test_round_robin_finds_what_plain_lrus_find(
    paths: list[list[int]], machines: int, blocks: int, l2_blocks: int
) -> None:
    prompts = prompts_of(paths)
    trace = trace_of(prompts)
    result = plan(trace, blocks, machines, "round-robin", l2_blocks)
    seconds = max(trace.requests[-1].seconds, 1.0)
    counted = (
        result.l1_hit_rate * trace.blocks,
        result.l2_hit_rate * trace.blocks,
        result.write_gb_s * seconds,
    )
    assert counted == pytest.approx(plain_round_robin(prompts, machines, blocks, l2_blocks))
    assert result.read_gb_s * seconds == pytest.approx(result.l2_hit_rate * trace.blocks)
    assert result.hit_rate == pytest.approx(result.l1_hit_rate + result.l2_hit_rate)


@pytest.mark.parametrize("router", sorted(ROUTERS))
@examples(50)
@given(BRANCHES, st.integers(0, 9))
def test_one_machine_without_l2_is_the_plain_replay(router: str, paths: list[list[int]], blocks: int) -> None:
    trace = trace_of(prompts_of(paths))
    (alone,) = replay_sizes(trace, [blocks], ["lru"])
    result = plan(trace, blocks, 1, router, None)
    assert (result.hit_rate, result.l1_hit_rate, result.l2_hit_rate) == (alone.hit_rate, alone.hit_rate, 0.0)
    assert result.read_peak_gb_s == result.write_peak_gb_s == result.machine_peak_gb_s == 0.0


@pytest.mark.parametrize("router", sorted(ROUTERS))
@examples(50)
@given(BRANCHES, st.integers(1, 4))
def test_with_an_unlimited_l2_every_block_that_was_there_is_found_and_is_written_once(
    router: str, paths: list[list[int]], machines: int
) -> None:
    prompts = prompts_of(paths)
    trace = trace_of(prompts)
    result = plan(trace, 0, machines, router, 0)
    (alone,) = replay_sizes(trace, [0], ["lru"])
    assert result.hit_rate == pytest.approx(alone.hit_rate)
    seconds = max(trace.requests[-1].seconds, 1.0)
    assert result.write_gb_s * seconds == pytest.approx(trace.distinct_blocks)


def test_rates_of_l2_follow_the_timestamps_of_the_trace() -> None:
    # Round robin over two machines, a second apart: the first writes 4 blocks, the second reads them and writes 2 more, the first
    # reads those 2, and the second writes 1.
    trace = trace_of([[1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6], [7]])
    by_second = plan(trace, 0, 2, "round-robin", 0, window=1.0)
    assert (by_second.read_peak_gb_s, by_second.write_peak_gb_s, by_second.machine_peak_gb_s) == (4.0, 4.0, 4.0)
    assert (by_second.read_gb_s, by_second.write_gb_s) == pytest.approx((6 / 3, 7 / 3))
    by_two = plan(trace, 0, 2, "round-robin", 0, window=2.0)  # [4 then 2 written, 4 read], [2 read, 1 written]
    assert (by_two.read_peak_gb_s, by_two.write_peak_gb_s, by_two.machine_peak_gb_s) == (2.0, 3.0, 2.0)
    assert by_two.busiest_machine == pytest.approx(10 * 2 / 17)


def test_the_prefix_router_sends_a_prompt_where_most_of_it_is() -> None:
    # A conversation that grows, with strangers between: round robin splits it over both machines.
    prompts = [[1, 2, 3], [50], [1, 2, 3, 4], [60, 61], [70], [1, 2, 3, 4, 5]]
    trace = trace_of(prompts)
    assert plan(trace, 0, 2, "prefix", None).l1_hit_rate == 7 / trace.blocks
    assert plan(trace, 0, 2, "round-robin", None).l1_hit_rate == 3 / trace.blocks


def test_a_beginning_that_all_prompts_share_does_not_send_all_to_one_machine() -> None:
    prompts = [[0, *range(10 * number, 10 * number + 9)] for number in range(1, 21)]
    assert plan(trace_of(prompts), 0, 4, "prefix", None).busiest_machine == 1.0


def test_a_machine_whose_l1_is_too_small_for_a_prompt_reads_what_fits() -> None:
    trace = trace_of([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]])
    result = plan(trace, 2, 3, "round-robin", 0)  # each L1 has two blocks, and only these reach L2
    assert result.l2_hit_rate == 4 / 12
    assert result.write_gb_s == 2 / 2
