"""What the cache brought an instance: each number by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.properties import examples

from kvserver.engines.counts import Counts
from kvserver.protocol.status import RequestsStatus
from kvserver.server.status import requests_status
from kvserver.telemetry import MOST, Benefit, LoadWaits
from kvserver.telemetry.benefit import RATIO_BUCKETS, SOURCES

SECOND = 1_000_000_000


def shown(benefit: Benefit) -> RequestsStatus:
    return requests_status(Counts(benefit=benefit))


@given(requests=st.lists(st.tuples(*[st.integers(0, 5000)] * 3).filter(any)))
@examples(50)
def test_the_sources_add_up_to_the_prompts(requests: list[tuple[int, int, int]]) -> None:
    benefit = Benefit()
    for local, loaded, computed in requests:
        benefit.request_ended(local + loaded + computed, local, loaded, 0, 0)
    tokens = shown(benefit).prompt_tokens
    assert tuple(tokens) == SOURCES
    local, loaded, computed = map(sum, zip((0, 0, 0), *requests, strict=True))
    assert tokens == {"l0": local, "l1": loaded, "l2": 0, "computed": computed}
    assert sum(shown(benefit).hit_ratio.counts) == len(requests)


def test_a_request_of_an_unknown_prompt_has_no_hit_ratio_but_loads() -> None:
    benefit = Benefit()
    benefit.request_ended(0, 0, 0, 3, 1)
    status = shown(benefit)
    assert sum(status.hit_ratio.counts) == sum(status.prompt_tokens.values()) == 0
    assert status.request_loads == {"done": 2, "failed": 1}


@pytest.mark.parametrize(
    ("local", "loaded", "bound"), [(0, 0, 0.0), (5, 5, 0.1), (50, 1, 0.6), (0, 99, 0.99), (100, 0, 1.0)]
)
def test_the_hit_ratio_is_what_was_not_computed(local: int, loaded: int, bound: float) -> None:
    benefit = Benefit()
    benefit.request_ended(100, local, loaded, 1, 0)
    ratios = shown(benefit).hit_ratio
    assert ratios.counts[RATIO_BUCKETS.index(bound)] == 1
    assert ratios.sum == pytest.approx((local + loaded) / 100)


def test_totals_stay_in_64_bits() -> None:
    benefit = Benefit()
    benefit.request_ended(MOST, 0, MOST, 0, 0)
    benefit.request_ended(MOST, 0, MOST, 0, 0)
    assert shown(benefit).prompt_tokens["l1"] == MOST


@pytest.mark.parametrize(
    ("tokens", "waited", "speed", "gained", "lost"),
    [
        (1000, 0.25, 1000.0, 0.75, 0.0),
        (1000, 3.0, 1000.0, 0.0, 2.0),  # slower than computing
        (0, 3.0, 1000.0, 0.0, 3.0),  # it failed
        (0, 3.0, 0.0, 0.0, 3.0),
        (1000, 3.0, 0.0, 0.0, 0.0),  # the speed of computing is unknown
    ],
)
def test_net_seconds_are_split_by_their_sign(
    tokens: int, waited: float, speed: float, gained: float, lost: float
) -> None:
    benefit = Benefit()
    benefit.load_ended(tokens, waited, speed)
    status = shown(benefit)
    assert (status.prefill_seconds_gained, status.prefill_seconds_lost) == (gained, lost)


def test_a_copy_is_queued_for_as_long_as_it_is_not_copied() -> None:
    benefit = Benefit()
    benefit.copied("load", 2.0, 0.5)
    benefit.copied("store", 0.1, 0.2)  # two threads measured the whole and the copy
    status = shown(benefit)
    assert (status.load_duration["queue"].sum, status.load_duration["copy"].sum) == (1.5, 0.5)
    assert (status.store_duration["queue"].sum, status.store_duration["copy"].sum) == (0.0, 0.2)


def test_two_instances_add_up_and_stay_what_they_were() -> None:
    one, other = Benefit(), Benefit()
    for benefit, prompt in ((one, 100), (other, 50)):
        benefit.request_ended(prompt, 10, 20, 2, 1)
        benefit.load_ended(100, 1.0, 10.0)
        benefit.copied("load", 2.0, 0.5)
    both = shown(one + other)
    assert both.prompt_tokens == {"l0": 20, "l1": 40, "l2": 0, "computed": 90}
    assert both.request_loads == {"done": 2, "failed": 2}
    assert both.prefill_seconds_gained == 18.0
    assert sum(both.hit_ratio.counts) == sum(both.load_duration["copy"].counts) == 2
    assert sum(shown(one).prompt_tokens.values()) == 100


def test_a_request_waits_for_its_slowest_rank() -> None:
    waits = LoadWaits()
    assert waits.ended("r", (1, 0), 3, 1 * SECOND, 9 * SECOND, 64) is None
    assert waits.ended("other", (0, 0), 3, 1 * SECOND, 2 * SECOND, 64) is None
    assert waits.ended("r", (0, 0), 3, 2 * SECOND, 4 * SECOND, 64) is None
    assert waits.ended("r", (2, 0), 3, 3 * SECOND, 5 * SECOND, 64) == (64, 8.0)


def test_a_load_that_failed_on_one_rank_brought_nothing() -> None:
    waits = LoadWaits()
    waits.ended("r", (0, 0), 2, 0, SECOND, 64)
    assert waits.ended("r", (1, 0), 2, 0, SECOND, 0) == (0, 1.0)


def test_a_rank_that_never_began_does_not_mix_with_the_next_load() -> None:
    waits = LoadWaits()
    assert waits.ended("r", (0, 0), 2, 0, SECOND, 64) is None
    assert waits.ended("r", (0, 0), 2, 50 * SECOND, 51 * SECOND, 64) is None
    assert waits.ended("r", (1, 0), 2, 50 * SECOND, 52 * SECOND, 64) == (64, 2.0)


def test_loads_that_never_end_on_all_ranks_are_forgotten() -> None:
    waits = LoadWaits()
    for number in range(2000):
        assert waits.ended(f"r{number}", (0, 0), 2, 0, SECOND, 64) is None
    assert waits.ended("r1999", (1, 0), 2, 0, SECOND, 64) == (64, 1.0)
    assert waits.ended("r0", (1, 0), 2, 0, SECOND, 64) is None


def test_of_loads_without_a_name_rank_0s_is_taken_for_all() -> None:
    waits = LoadWaits()
    assert waits.ended("", (1, 0), 2, 0, 9 * SECOND, 64) is None
    assert waits.ended("", (0, 0), 2, 0, 2 * SECOND, 64) == (64, 2.0)
