"""Bounds of the time that SGLang's scheduler waits for a load."""

from __future__ import annotations

import pytest

from kvserver.adapters.sglang.budget import Budget

PAGE = 64


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def budget(clock: Clock, pages_copied: float, tokens_computed: int) -> Budget:
    """Rates of so many a second."""
    made = Budget(1.0, 0.25, PAGE, clock)
    made.batch_begins()
    made.computed(tokens_computed // PAGE)
    clock.now += 1
    made.pass_ends()
    made.copied(int(pages_copied), 1.0)
    return made


def test_a_load_may_take_a_quarter_of_the_time_of_computing_and_a_second_at_most(clock: Clock) -> None:
    made = budget(clock, pages_copied=1000, tokens_computed=6400)
    assert made.seconds(100) == pytest.approx(0.25)
    assert made.seconds(10_000) == 1.0


def test_pages_are_affordable_that_are_copied_within_a_second(clock: Clock) -> None:
    made = budget(clock, pages_copied=1000, tokens_computed=6400)
    assert made.affordable(700) == 700
    assert made.affordable(5000) == 1000


def test_little_is_loaded_where_copying_takes_more_than_its_share(clock: Clock) -> None:
    made = budget(clock, pages_copied=1000, tokens_computed=640_000)
    assert made.affordable(700) == 20


def test_all_is_affordable_before_anything_was_measured(clock: Clock) -> None:
    made = Budget(1.0, 0.25, PAGE, clock)
    assert made.affordable(5000) == 5000
    assert made.seconds(1) == 1.0


def test_one_slow_load_is_forgotten_so_that_hits_begin_again(clock: Clock) -> None:
    made = budget(clock, pages_copied=0.0, tokens_computed=20_000)
    made.copied(32, 1000.0)
    assert made.affordable(1000) == 0
    clock.now += 11
    assert made.affordable(1000) == 1000


def test_time_in_which_nothing_was_computed_is_no_time_of_prefill(clock: Clock) -> None:
    made = budget(clock, pages_copied=1000, tokens_computed=6400)
    before = made.seconds(100)
    made.batch_begins()
    clock.now += 60
    made.pass_ends()
    made.batch_begins()
    made.computed(100)
    clock.now += 1
    made.pass_ends()
    assert made.seconds(100) == pytest.approx(before)
