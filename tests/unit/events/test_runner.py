"""A runner handles what was put, in order, and ends; one that raises or is cut off drops what is queued."""

from __future__ import annotations

import threading
import time

from support.daemon import wait_until

from kvserver.events import Runner


class Keeps(Runner[str]):
    """Keeps its items; `gate` holds it up, "bad" makes it raise."""

    def __init__(self) -> None:
        super().__init__("keeps")
        self.items: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.idles = self.ends = 0
        self.start()

    def _handle(self, item: str) -> None:
        assert self.gate.wait(10)
        if item == "bad":
            raise KeyError(item)
        self.items.append(item)

    def _idle(self) -> None:
        self.idles += 1

    def _end(self) -> None:
        self.ends += 1


def test_one_that_raises_handles_no_more_and_ends_once() -> None:
    keeps = Keeps()
    assert keeps.put("one")
    keeps.put("bad")
    wait_until(lambda: keeps.reason)
    assert keeps.reason == "it raised KeyError: 'bad'"
    assert not keeps.put("two")
    assert not keeps.put("three", always=True)
    keeps.finish()
    assert keeps.join(time.monotonic() + 10)
    assert (keeps.items, keeps.ends, keeps.queued) == (["one"], 1, 0)


def test_a_cut_off_drops_what_is_queued_though_the_handling_hangs() -> None:
    keeps = Keeps()
    keeps.gate.clear()
    assert all(keeps.put(item) for item in ("one", "two", "three"))
    keeps.cut_off("late")
    keeps.cut_off("later")
    assert (keeps.reason, keeps.queued) == ("late", 0)
    assert not keeps.flush(0.1)
    keeps.finish()
    keeps.gate.set()
    assert keeps.join(time.monotonic() + 10)
    assert len(keeps.items) <= 1
    assert keeps.ends == 1


def test_all_that_was_put_before_the_end_is_handled_in_order() -> None:
    for count in range(50):
        keeps, items = Keeps(), [str(n) for n in range(count)]
        assert all(keeps.put(item) for item in items)
        keeps.finish()
        assert keeps.join(time.monotonic() + 10)
        assert keeps.items == items


def test_it_is_idle_now_and_then_without_items_too() -> None:
    keeps = Keeps()
    wait_until(lambda: keeps.idles >= 2)
    keeps.finish()
    assert keeps.join(time.monotonic() + 10)
