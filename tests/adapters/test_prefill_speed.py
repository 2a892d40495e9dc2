"""How fast the engine computes prompts: over which steps, and which end belongs to which plan."""

from __future__ import annotations

import pytest

from kvserver.adapters.common.speed import FLOOR_TOKENS, PrefillSpeed


def test_the_speed_is_that_of_the_latest_steps_smoothed():
    now = 100.0
    speed = PrefillSpeed(lambda: now)
    for seconds, tokens in [(1.0, 1000), (1.0, FLOOR_TOKENS - 1), (0.5, 1000)]:
        speed.planned(tokens)
        now += seconds
        speed.ended()
    assert speed.tokens_per_second == pytest.approx(1000 + 0.2 * 1000)


def test_steps_that_overlap_end_in_the_order_of_their_plans():
    now = 0.0
    speed = PrefillSpeed(lambda: now)
    speed.planned(1000)
    now = 1.0
    speed.planned(4)
    now = 2.0
    speed.ended()
    assert speed.tokens_per_second == 500
    now = 9.0
    speed.ended()
    speed.ended()
    assert speed.tokens_per_second == 500
