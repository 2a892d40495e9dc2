"""Which probes a request waits for: those that cost less than the prefill which they are expected to save."""

from __future__ import annotations

import pytest

from kvserver.tiering.probes import ProbeWorth

SPEED = 10_000.0  # tokens a second


def after(*probes: tuple[float, float]) -> ProbeWorth:
    """`probes`: the seconds of each, and which share of 100 unknown chunks it found."""
    worth = ProbeWorth()
    for seconds, share in probes:
        worth.note(seconds, round(share * 100), 100)
    return worth


def test_first_probes_of_a_tier_are_waited_for() -> None:
    assert after((0.6, 0.0), (0.6, 0.0)).is_waited_for(256, SPEED)


@pytest.mark.parametrize("speed", [0.0, SPEED])
def test_a_fast_probe_is_waited_for_though_none_found_anything(speed: float) -> None:
    assert after(*[(0.005, 0.0)] * 100).is_waited_for(256, speed)
    assert not after(*[(0.6, 0.0)] * 100).is_waited_for(256, speed)


def test_one_fast_probe_among_the_last_shows_that_the_store_is_fast() -> None:
    assert after(*[(0.6, 0.0)] * 100, (0.005, 0.0), (0.6, 0.0)).is_waited_for(256, SPEED)


def test_a_slow_probe_is_waited_for_by_prompts_whose_prefill_it_saves() -> None:
    worth = after(*[(0.6, 0.5)] * 100)
    assert worth.is_waited_for(13_000, SPEED), "half of 1.3 s"
    assert not worth.is_waited_for(11_000, SPEED), "half of 1.1 s"


def test_a_slow_probe_that_is_a_small_share_of_the_prefill_is_waited_for() -> None:
    worth = after(*[(0.6, 0.0)] * 100)
    assert worth.is_waited_for(200_000, SPEED)
    assert not worth.is_waited_for(180_000, SPEED)


def test_a_tier_that_has_had_nothing_is_worth_waiting_for_again_once_it_has_something() -> None:
    worth = after(*[(0.6, 0.0)] * 100)
    assert not worth.is_waited_for(64_000, SPEED)
    worth.note(0.6, 100, 100)
    assert worth.is_waited_for(64_000, SPEED)


def test_probes_of_a_few_new_chunks_weigh_little() -> None:
    worth = ProbeWorth()
    for _ in range(20):
        worth.note(0.6, 400, 400)
        for _ in range(4):
            worth.note(0.6, 0, 2)
    assert worth.is_waited_for(6_500, SPEED)


def test_without_a_known_speed_a_slow_probe_is_waited_for_while_probes_find_something() -> None:
    assert after(*[(0.6, 0.0)] * 100, (0.6, 1.0)).is_waited_for(256, 0.0)
