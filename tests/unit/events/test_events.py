"""The bus: order, bounds, and subscribers that misbehave."""

from __future__ import annotations

import ast
import inspect
import textwrap
import threading
import time
from typing import Any

import msgspec
import pytest
from support.daemon import wait_until

from kvserver.events import NAMES, BlockReport, Bus, ErrorSent, Event, L1Cleared, Subscriber, WorkerDisconnected
from kvserver.events.types import TYPES
from kvserver.kv_events import Hub
from kvserver.protocol import ExactRecords
from kvserver.protocol.status import SubscriberStatus
from kvserver.replay import Recorder
from kvserver.telemetry import BlockLifecycle, ChunkLifecycle, Explain, ResidentAges, WhatIfCurve
from kvserver.telemetry.tracing import Traces


class Collects(Subscriber):
    """A subscriber that keeps what it is given; `gate` holds it up."""

    def __init__(self, name: str = "collects", log: list[str] | None = None) -> None:
        self.name = name
        self.events: list[Event] = []
        self.gate = threading.Event()
        self.gate.set()
        self._log = log if log is not None else []

    def handle(self, event: Event) -> None:
        assert self.gate.wait(10)
        self.events.append(event)

    def close(self) -> None:
        self._log.append(self.name)


class Raises(Collects):
    def handle(self, event: Event) -> None:
        super().handle(event)
        raise ValueError(f"cannot take {type(event).__name__}")


class Dies(Collects):
    def handle(self, event: Event) -> None:
        raise SystemExit("not an Exception")


def error(number: int = 0) -> ErrorSent:
    return ErrorSent(time.monotonic_ns(), "Lookup", f"code{number}")


@pytest.fixture
def make_bus() -> Any:
    made: list[Bus] = []

    def make(*subscribers: Any, **options: Any) -> Bus:
        made.append(Bus(subscribers, **options))
        made[-1].start()
        return made[-1]

    yield make
    for bus in made:
        bus.close()


def test_events_are_frozen_and_of_one_union() -> None:
    for event_type in TYPES:
        assert issubclass(event_type, msgspec.Struct)
        assert event_type.__struct_config__.frozen, event_type
        assert event_type.__struct_fields__[0] == "time_ns"
    with pytest.raises(AttributeError):
        error().code = "other"  # type: ignore[misc]


def test_every_subscriber_gets_every_event_in_order(make_bus: Any) -> None:
    first, second = Collects("first"), Collects("second")
    bus = make_bus(first, second)
    events = [error(n) for n in range(1000)]
    for event in events:
        assert bus.publish(event)
    assert bus.flush()
    assert first.events == events == second.events
    assert bus.published["ErrorSent"] == 1000
    assert bus.published["L1Cleared"] == 0


def test_without_subscribers_nothing_is_queued(make_bus: Any) -> None:
    bus = make_bus()
    assert bus.publish(error())
    assert bus.status().published == bus.status().queue_depth == 0


def test_a_full_queue_drops_and_counts_by_type_and_publish_does_not_wait(make_bus: Any) -> None:
    slow = Collects()
    slow.gate.clear()
    bus = make_bus(slow, limit=10)
    taken = [bus.publish(error(n)) for n in range(25)]
    assert taken == [True] * 10 + [False] * 15
    assert not bus.publish(L1Cleared(time.monotonic_ns(), b""))
    assert bus.dropped["ErrorSent"] == 15
    assert bus.dropped["L1Cleared"] == 1
    assert bus.status().queue_depth == 10
    disconnected = WorkerDisconnected(time.monotonic_ns(), "i", "m", 0)
    assert bus.publish(disconnected), "the end of a connection is never dropped"
    slow.gate.set()
    assert bus.flush()
    assert [event.code for event in slow.events[:-1]] == [f"code{n}" for n in range(10)]  # type: ignore[union-attr]
    assert slow.events[-1] is disconnected
    assert bus.publish(error())


def test_events_that_carry_bytes_fill_the_queue_sooner(make_bus: Any) -> None:
    slow = Collects()
    slow.gate.clear()
    bus = make_bus(slow, limit=100)
    report = BlockReport(time.monotonic_ns(), "i", "m", ExactRecords(records=bytes(1 << 18), marks=b""))
    assert bus.publish(report, 1 << 18)
    assert not bus.publish(report, 1 << 18)
    slow.gate.set()


def test_a_subscriber_that_raises_is_counted_and_named_and_harms_no_other(make_bus: Any) -> None:
    before, raises, after = Collects("before"), Raises("raises"), Collects("after")
    bus = make_bus(before, raises, after)
    for n in range(3):
        bus.publish(error(n))
    assert bus.flush()
    assert len(before.events) == len(after.events) == len(raises.events) == 3
    rows = {row.name: row for row in bus.status().subscribers}
    assert rows["raises"] == SubscriberStatus(name="raises", errors=3, last_error="ValueError: cannot take ErrorSent")
    assert rows["before"].errors == rows["after"].errors == 0
    assert bus.failure == ""


def test_the_end_of_the_thread_is_reported(make_bus: Any) -> None:
    bus = make_bus(Dies())
    assert bus.failure == ""
    bus.publish(error())
    assert "SystemExit" in wait_until(lambda: bus.failure)
    assert not bus.flush(0.2)


def test_subscribers_close_in_reverse_order_after_the_last_event() -> None:
    log: list[str] = []
    subscribers = [Collects(name, log) for name in ("first", "second", "third")]
    bus = Bus(subscribers)
    bus.start()
    for n in range(50):
        bus.publish(error(n))
    bus.close()
    assert log == ["third", "second", "first"]
    assert all(len(s.events) == 50 for s in subscribers)


def test_a_subscriber_that_hangs_delays_the_end_only_so_long() -> None:
    hangs = Collects()
    hangs.gate.clear()
    bus = Bus([hangs])
    bus.start()
    bus.publish(error())
    rescue = threading.Timer(9, hangs.gate.set)
    rescue.start()
    bus.close(0.2)
    assert not hangs.gate.is_set(), "the end waited until the subscriber was done"
    rescue.cancel()
    hangs.gate.set()


def test_the_lag_is_from_the_events_time_until_it_was_taken(make_bus: Any) -> None:
    bus = make_bus(Collects())
    bus.publish(WorkerDisconnected(time.monotonic_ns() - 3_000_000_000, "i", "m", 0))
    assert bus.flush()
    assert 3.0 <= wait_until(lambda: bus.lag_seconds) < 30


def test_the_wait_of_every_event_is_counted(make_bus: Any) -> None:
    bus = make_bus(Collects())
    bus.publish(WorkerDisconnected(time.monotonic_ns() - 3_000_000_000, "i", "m", 0))
    bus.publish(error())
    assert bus.flush()
    waits = bus.status().waits
    assert sum(waits.counts) == 2
    assert 3.0 <= waits.sum < 30


@pytest.mark.parametrize(
    "subscriber",
    [BlockLifecycle, ChunkLifecycle, Explain, Hub, Recorder, ResidentAges, Traces, WhatIfCurve],
    ids=lambda subscriber: subscriber.name,
)
def test_a_subscriber_declares_the_types_that_its_handle_names(subscriber: type[Subscriber]) -> None:
    """A type that `handle` has an arm for and the class does not declare would never arrive."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(subscriber.handle)))
    named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & {kind.__name__ for kind in NAMES}
    assert named
    assert {kind.__name__ for kind in subscriber.handles} == named


def test_a_subscriber_receives_only_the_types_that_it_declares(make_bus: Any) -> None:
    class OnlyErrors(Collects):
        handles = frozenset({ErrorSent})

    errors, everything = OnlyErrors(), Collects()
    bus = make_bus(errors, everything)
    bus.publish(error())
    bus.publish(L1Cleared(1, b""))
    assert bus.flush()
    assert [type(event) for event in errors.events] == [ErrorSent]
    assert [type(event) for event in everything.events] == [ErrorSent, L1Cleared]
