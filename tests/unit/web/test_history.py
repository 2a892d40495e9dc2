"""The ring of samples: when one is taken, how many are kept, what a loop that does not answer means."""

from __future__ import annotations

from array import array
from concurrent.futures import Future

import pytest

from kvserver.web.history import SAMPLES, History


class Loop:
    """Takes samples, each with its number, when it turns."""

    def __init__(self) -> None:
        self.now = 100.0
        self.calls: list[Future[array[float]]] = []
        self.taken = 0

    def take_sample(self) -> Future[array[float]]:
        self.calls.append(Future())
        return self.calls[-1]

    def turn(self) -> None:
        for call in self.calls:
            call.set_result(array("d", [float(self.taken)]))
            self.taken += 1
        self.calls.clear()

    def run(self, history: History, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            history.tick()
            self.turn()
            self.now += 0.25


@pytest.fixture
def loop() -> Loop:
    return Loop()


def made(loop: Loop, seconds: float) -> History:
    return History(seconds, loop.take_sample, clock=lambda: loop.now)


def numbers(history: History, since: int = 0) -> tuple[int, list[float]]:
    first, rows = history.since(since)
    return first, [row[0] for row in rows]


def test_the_first_sample_is_taken_at_once_and_then_one_each_interval(loop: Loop) -> None:
    history = made(loop, 3600)
    loop.run(history, 10.5)
    assert history.interval_seconds == 5
    assert numbers(history) == (0, [0, 1, 2])


@pytest.mark.parametrize(("seconds", "kept"), [(60, 60), (3600, SAMPLES), (7 * 86400, SAMPLES)])
def test_history_keeps_a_bounded_number_of_samples(loop: Loop, seconds: float, kept: int) -> None:
    history = made(loop, seconds)
    for _ in range(SAMPLES + 10):
        history.tick()
        loop.turn()
        loop.now += history.interval_seconds
    history.tick()
    first, rows = numbers(history)
    assert len(rows) == kept
    assert (first, rows[0]) == (loop.taken - kept, loop.taken - kept)


def test_history_since_a_number_has_only_later_samples(loop: Loop) -> None:
    history = made(loop, 60)
    loop.run(history, 5)
    assert numbers(history, 3) == (3, [3, 4])
    assert numbers(history, 99) == (99, [])


def test_while_the_loop_hangs_one_sample_waits_and_none_is_added(loop: Loop) -> None:
    history = made(loop, 60)
    for _ in range(100):
        history.tick()
        loop.now += 1
    assert len(loop.calls) == 1
    assert numbers(history) == (0, [])
    loop.turn()
    history.tick()
    assert numbers(history) == (0, [0])


def test_a_sample_that_fails_is_left_out(loop: Loop) -> None:
    history = made(loop, 60)
    history.tick()
    loop.calls.pop().set_exception(RuntimeError("stopped"))
    loop.now += 1
    loop.run(history, 2)
    assert numbers(history) == (0, [0, 1])
