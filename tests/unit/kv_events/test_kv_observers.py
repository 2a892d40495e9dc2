"""An observer has a thread and a queue of its own, or none; one that misbehaves is cut off, and no other notices."""

from __future__ import annotations

import importlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.daemon import wait_until
from support.kv_chunks import Prompt, scheduler
from support.kv_feed import chunk, named
from support.observers import install

from kvserver.config import Settings
from kvserver.events import ChunksStored
from kvserver.kv_events import Hub, ObserverContext, Observers, make_lines
from kvserver.kv_events.types import KeysStored, KVChunk, KVRemoved, KVStored, ReaderConnected, ReaderDisconnected, Tier
from kvserver.protocol import ConfigError
from kvserver.protocol.kv_status import KVEventsStatus
from kvserver.protocol.status import DaemonStatus
from kvserver.telemetry import Rpc, all_families

HERE = b"n" * 32
OWN = {"mine", "direct"}
Make = Callable[..., Observers]


def stored(number: int, chunks: tuple[KVChunk, ...] = (chunk("a", "b"),)) -> KVStored:
    return KVStored(number, time.monotonic_ns(), Tier.L1, HERE, chunks)


def made(name: str) -> Any:
    """The observer that the factory of that name made."""
    return sys.modules["observers_of_a_test"].MADE[name]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Observers with these installed, started; the daemon's own are `mine` and, if there is one, `direct`."""
    monkeypatch.syspath_prepend(tmp_path)
    begun: list[Observers] = []

    def make(*names: str, setting: str = "all", start: bool = True, direct: str = "", **options: Any) -> Observers:
        install(tmp_path, *names)
        module: Any = importlib.import_module("observers_of_a_test")
        context = ObserverContext(Settings(kv_event_observers=setting), "boot", 1)
        directly = {"direct": getattr(module, direct)(context)} if direct else {}
        begun.append(Observers(context, {"mine": module.Keeps("mine"), "none": None}, directly, **options))
        if start:
            begun[-1].start()
        return begun[-1]

    yield make
    for observer in sys.modules["observers_of_a_test"].MADE.values() if begun else ():
        observer.gate.set()
    for observers in begun:
        observers.close()
    sys.modules.pop("observers_of_a_test", None)


def row(observers: Observers, name: str) -> dict[str, Any]:
    return next(row for row in observers.status() if row["name"] == name)


def kept(name: str = "keeps") -> list[Any]:
    found: list[Any] = made(name).events
    return found


def up(observers: Observers) -> dict[str, float | Any]:
    status = DaemonStatus(kv_events=KVEventsStatus(observers=observers.status()))
    families = {family.name: family for family in all_families(status, Rpc().snapshot())}
    points = families["kvserver_kv_event_observer_up"].points
    return {labels[0]: value for labels, value in points if labels[0] not in OWN}


def test_every_event_is_handed_over_in_order_in_one_thread_of_the_observer(make: Make) -> None:
    observers = make("keeps")
    events = [stored(number) for number in range(1, 2000)]
    for event in events:
        observers.hand_over(event)
    wait_until(lambda: len(kept()) == len(events))
    assert kept() == events
    observers.close()
    keeps = made("keeps")
    assert keeps.closed.is_set()
    assert [thread.name for thread in keeps.threads] == ["kv events: keeps"]
    assert row(observers, "keeps")["handled"] == len(events)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("raises", "ValueError: cannot take KVStored"),
        ("exits", "SystemExit: 3"),
        ("strange", "TypeError"),
        ("listed", "TypeError"),
    ],
)
def test_observer_that_raises_is_cut_off_and_the_others_go_on(make: Make, name: str, reason: str) -> None:
    observers = make(name, "keeps")
    observers.hand_over(stored(1))
    wait_until(lambda: row(observers, name)["state"] == "cut off")
    observers.hand_over(stored(2))
    wait_until(lambda: len(kept()) == 2)
    assert reason in row(observers, name)["reason"]
    assert len(kept(name)) <= 1
    assert row(observers, "keeps")["state"] == "running"
    assert up(observers) == {name: 0, "keeps": 1}


@pytest.mark.parametrize("name", ["stalls", "status_stalls"])
def test_observer_that_stalls_is_cut_off_and_the_others_go_on(make: Make, name: str) -> None:
    observers = make(name, "keeps", stall_seconds=0.2)
    number = 0

    def hand_over_next() -> bool:
        nonlocal number
        number += 1
        observers.hand_over(stored(number))
        observers.tick()
        return bool(row(observers, name)["state"] == "cut off")

    wait_until(hand_over_next)
    assert "one call took more than 0.2 s" in row(observers, name)["reason"]
    assert row(observers, name)["queue_depth"] == 0
    wait_until(lambda: len(kept()) == number)
    made(name).gate.set()
    observers.hand_over(stored(number + 1))
    wait_until(lambda: len(kept()) == number + 1)
    assert len(kept(name)) < number, "it receives no more after its stall ends"


def test_observer_whose_queue_overflows_is_cut_off_and_the_others_go_on(make: Make) -> None:
    observers = make("stalls", "keeps", limit=20)
    for number in range(1, 51):
        observers.hand_over(stored(number))
        wait_until(lambda number=number: len(kept()) == number)
    assert row(observers, "stalls")["reason"] == "it did not keep up: its queue was full"
    assert row(observers, "stalls")["queue_depth"] == 0
    assert row(observers, "keeps")["state"] == "running"


def test_events_with_descriptions_fill_the_queue_sooner(make: Make) -> None:
    observers = make("stalls", limit=20)
    hub = Hub(1 << 30, observers.hand_over)
    long = Prompt(range(64 * 1024), chunk_blocks=1024)
    hub.handle(long.described(HERE))
    hub.handle(ChunksStored(1, "i", "m", HERE, b"".join(long.keys)))
    assert row(observers, "stalls")["state"] == "cut off", "the 16 chunks of one event carry 800 KB"


def test_keys_alone_reach_direct_observers_only(make: Make) -> None:
    observers = make("keeps", direct="other_keeps")
    keys, event = KeysStored(Tier.L1, HERE, [b"k" * 32]), stored(1)
    observers.hand_over(keys)
    observers.hand_over(event)
    wait_until(lambda: kept() == [event])
    assert made("other_keeps").events == [keys, event]


def test_the_own_status_of_observers_is_shown_but_never_replaces_the_daemons_fields(make: Make) -> None:
    observers = make("keeps")
    observers.hand_over(stored(1))
    wait_until(lambda: row(observers, "keeps").get("kept") == 1)
    assert row(observers, "keeps") == {
        "name": "keeps",
        "state": "running",
        "reason": "",
        "handled": 1,
        "queue_depth": 0,
        "kept": 1,
    }


def test_queued_events_are_handed_over_before_the_end_and_each_observer_is_closed(make: Make) -> None:
    observers = make("keeps", "close_raises", "raises")
    for number in range(1, 500):
        observers.hand_over(stored(number))
    observers.close()
    assert len(kept()) == len(kept("close_raises")) == 499
    for name in ("keeps", "close_raises", "raises"):
        assert made(name).closed.is_set(), name


def test_observer_that_hangs_delays_the_end_for_a_bounded_time(make: Make) -> None:
    observers = make("stalls", "keeps", close_seconds=0.3)
    observers.hand_over(stored(1))
    observers.close()
    assert "at the daemon's end" in row(observers, "stalls")["reason"]
    assert len(kept()) == 1


def test_observers_that_were_never_started_are_closed(make: Make) -> None:
    observers = make("keeps", start=False)
    observers.close()
    assert made("keeps").closed.is_set()


@pytest.mark.parametrize("factory", ["keeps", "raises"])
def test_direct_observer_is_called_by_the_thread_that_hands_over_and_cut_off_alike(make: Make, factory: str) -> None:
    observers = make(direct=factory)
    observers.hand_over(stored(1))
    observers.hand_over(stored(2))
    observers.tick()
    assert made(factory).threads == {threading.current_thread()}
    assert not made(factory).closed.is_set()
    observers.close()
    assert made(factory).closed.is_set()
    found = row(observers, "direct")
    if factory == "keeps":
        assert (found["state"], found["handled"], found["kept"]) == ("running", 2, 2)
    else:
        assert observers.cut_off_reason("direct") == found["reason"] == "it raised ValueError: cannot take KVStored"
        assert len(kept("raises")) == 1


# ---- which there are --------------------------------------------------------------------------


def names(observers: Observers) -> set[str]:
    return {row["name"] for row in observers.status()} - OWN


@pytest.mark.parametrize(
    ("setting", "found"),
    [("all", {"keeps", "other"}), ("none", set()), ("other", {"other"}), ("other, keeps", {"keeps", "other"})],
)
def test_setting_chooses_among_installed_observers(make: Make, setting: str, found: set[str]) -> None:
    observers = make("keeps", "other=keeps", "declines", setting=setting)
    assert names(observers) == found
    assert observers.foreign == bool(found)
    assert row(observers, "mine")["state"] == "running", "what the daemon brings itself stays"


def test_observer_that_is_named_and_not_installed_is_a_bad_setting(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"--kv-event-observers keeps,absent: no observer 'absent'.*declines, keeps"):
        make("keeps", "declines", setting="keeps,absent")


def test_observer_that_cannot_be_made_is_reported_and_left_out(make: Make) -> None:
    observers = make("breaks", "wrong=nothing", "mine=keeps", "keeps")
    assert row(observers, "breaks") == {"name": "breaks", "state": "failed", "reason": "RuntimeError: no such host"}
    assert "AttributeError" in row(observers, "wrong")["reason"]
    assert [each["state"] for each in observers.status() if each["name"] == "mine"] == ["running", "failed"]
    assert {name for name, value in up(observers).items() if value} == {"keeps"}


def test_observers_of_the_daemon_are_made_once_and_no_setting_names_them(make: Make) -> None:
    observers = make("keeps")
    assert [each["name"] for each in observers.status()].count("mine") == 1
    with pytest.raises(ConfigError, match="no observer 'mine'"):
        Observers(ObserverContext(Settings(kv_event_observers="mine"), "boot", 1), {"mine": made("mine")}, {})


# ---- the file of lines ------------------------------------------------------------------------


def writes_lines(path: str) -> Observers:
    context = ObserverContext(Settings(kv_events_file=path, kv_event_observers="none"), "boot", 1)
    observers = Observers(context, {"lines": make_lines(context)}, {})
    observers.start()
    return observers


def test_each_event_is_a_line_without_tokens(tmp_path: Path) -> None:
    path = tmp_path / "events"
    observers = writes_lines(str(path))
    hub = Hub(1 << 30, observers.hand_over)
    one = Prompt(range(16))
    hub.handle(one.described(HERE))
    hub.handle(ChunksStored(time.monotonic_ns(), "i", "m", HERE, b"".join(one.keys)))
    observers.hand_over(KVRemoved(2, time.monotonic_ns(), Tier.L2, HERE, (chunk("a", "b"),)))
    observers.hand_over(ReaderConnected(3, time.monotonic_ns(), scheduler(), HERE, 2, 4))
    observers.hand_over(ReaderDisconnected(4, time.monotonic_ns(), "engine", "m"))
    observers.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(abs(line.pop("time") - time.time()) < 60 for line in lines)
    assert lines == [
        {"number": 1, "type": "stored", "instance_id": "i", "tier": "CPU", "namespace": HERE.hex(), "chunks": [
            {"key": key.hex(), "blocks": 2, "tokens": 8} for key in one.keys]},
        {"number": 2, "type": "removed", "tier": "STORAGE", "namespace": HERE.hex(), "chunks": [
            {"key": named("b").hex(), "blocks": 2, "tokens": 32}]},
        {"number": 3, "type": "reader_came", "instance_id": "engine", "model_name": "m", "hash_form": "bytes",
         "reach": HERE.hex()},
        {"number": 4, "type": "reader_gone", "instance_id": "engine", "model_name": "m"},
    ]  # fmt: skip


def test_a_file_that_cannot_be_opened_is_a_bad_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--kv-events-file .*No such file"):
        writes_lines(str(tmp_path / "none" / "events"))


def test_a_full_disk_cuts_the_file_off() -> None:
    observers = writes_lines("/dev/full")
    observers.hand_over(stored(1))
    wait_until(lambda: row(observers, "lines")["state"] == "cut off")
    assert "No space left" in row(observers, "lines")["reason"]
    observers.close()
