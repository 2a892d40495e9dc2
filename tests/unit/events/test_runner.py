"""A runner handles what was put, in order, and ends; one that raises or is cut off drops what is queued."""

from __future__ import annotations

import sys
import threading
import time

from support.daemon import wait_until

from kvserver.events import Runner


class Keeps:
    """Keeps the items of its runner; `gate` holds it up, "bad" makes it raise."""

    def __init__(self) -> None:
        self.items: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.idles = self.ends = 0
        self.runner: Runner[str] = Runner("keeps", self.handle, self.idle, self.end)
        self.runner.start()

    def handle(self, item: str) -> None:
        assert self.gate.wait(10)
        if item == "bad":
            raise KeyError(item)
        self.items.append(item)

    def idle(self) -> None:
        self.idles += 1

    def end(self) -> None:
        self.ends += 1


def test_runner_that_raises_handles_no_more_and_ends_once() -> None:
    keeps = Keeps()
    assert keeps.runner.put("one")
    keeps.runner.put("bad")
    wait_until(lambda: keeps.runner.reason)
    assert keeps.runner.reason == "it raised KeyError: 'bad'"
    assert not keeps.runner.put("two")
    assert not keeps.runner.put("three", always=True)
    keeps.runner.finish()
    assert keeps.runner.join(time.monotonic() + 10)
    assert (keeps.items, keeps.ends, keeps.runner.queued) == (["one"], 1, 0)


def test_a_cut_off_drops_what_is_queued_though_the_handling_hangs() -> None:
    keeps = Keeps()
    keeps.gate.clear()
    assert all(keeps.runner.put(item) for item in ("one", "two", "three"))
    keeps.runner.cut_off("late")
    keeps.runner.cut_off("later")
    assert (keeps.runner.reason, keeps.runner.queued) == ("late", 0)
    assert not keeps.runner.flush(0.1)
    keeps.runner.finish()
    keeps.gate.set()
    assert keeps.runner.join(time.monotonic() + 10)
    assert len(keeps.items) <= 1
    assert keeps.ends == 1


def test_all_that_was_put_before_the_end_is_handled_in_order() -> None:
    for count in range(50):
        keeps, items = Keeps(), [str(n) for n in range(count)]
        assert all(keeps.runner.put(item) for item in items)
        keeps.runner.finish()
        assert keeps.runner.join(time.monotonic() + 10)
        assert keeps.items == items


def test_runner_is_idle_once_a_second_with_and_without_items() -> None:
    began, keeps = time.monotonic(), Keeps()
    wait_until(lambda: keeps.idles >= 1)
    while keeps.idles < 2:
        assert keeps.runner.put("one")
        assert keeps.runner.flush(10)
    assert len(keeps.items) > 3
    assert keeps.idles <= 1 + time.monotonic() - began
    keeps.runner.finish()
    assert keeps.runner.join(time.monotonic() + 10)


def test_the_running_call_is_timed_and_a_pause_between_two_looks_counts_a_second_at_most() -> None:
    keeps = Keeps()
    assert keeps.runner.busy_seconds() == 0
    keeps.gate.clear()
    assert keeps.runner.put("one")
    busy = wait_until(keeps.runner.busy_seconds)
    time.sleep(1.2)
    assert busy < keeps.runner.busy_seconds() <= busy + 1
    keeps.gate.set()
    assert keeps.runner.flush(10)
    assert wait_until(lambda: keeps.runner.busy_seconds() == 0)
    keeps.runner.finish()
    assert keeps.runner.join(time.monotonic() + 10)


def test_handling_much_lets_another_thread_have_the_interpreter_in_between() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(100)  # a thread that wants the interpreter's lock gets it only when another one gives it up
    try:
        runner: Runner[str] = Runner("burns", lambda item: burn(0.001))
        assert all(runner.put("item") for _ in range(200))
        runner.start()
        seen = set()
        while runner.handled < 200:
            seen.add(runner.handled)
            time.sleep(0)
    finally:
        sys.setswitchinterval(interval)
    runner.finish()
    assert runner.join(time.monotonic() + 10)
    assert len(seen) > 20


def burn(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
