"""Parts of a store: its first slots count while the others are copied, if they were whole before any cancel and in time."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.daemon import wait_until

from kvserver._native import Direction, Outcome, State

from .rig import L0, Device, End, Job, flat

PART = 1 << 20  # a block, a slot, a page and a batch: each slot is a part
SLOTS = 4


class Rig:
    """A store of four slots. It stands still at the second one, and where `pause_at` is 0 at those behind it, too."""

    def __init__(self, folder: Path, threads: int = 1, pause_at: int = 0) -> None:
        self.pause, self.reached = folder / "pause", folder / "pause.reached"
        self.pause.touch()
        pause = {"pause_file": str(self.pause), "pause_at": pause_at, "part_bytes": PART}
        self.device = Device(pages=SLOTS, page_bytes=PART, threads=threads, pause=pause)
        self.l0 = L0(self.device, flat(SLOTS + 1, PART))
        self.job = Job(range(1, SLOTS + 1), range(SLOTS), 1, 1)
        self.ticket = self.deadline = 0

    def begin(self, direction: Direction = Direction.STORE, seconds: float = 600.0) -> None:
        """Begin the copy; return once it stands still and, of a store, has reported the first slot."""
        self.l0.words.arm(0, 1)
        self.deadline = time.monotonic_ns() + int(seconds * 1e9)
        self.ticket = self.device.submit(
            direction, self.l0, self.job, word_memory=self.l0.mappings[-1], word_index=0, sequence=1,
            deadline_nanos=self.deadline,
        )  # fmt: skip
        wait_until(self.reached.exists, what="the second block is begun")
        if direction == Direction.STORE:
            assert wait_until(self.parts) == [(self.ticket, 1)]

    def end(self) -> End:
        self.pause.unlink()
        return self.device.wait(self.ticket)

    def l1(self, page: int) -> bytes:
        return ctypes.string_at(self.device.region.address + page * PART, PART)

    def parts(self) -> list[tuple[int, int]]:
        return list(self.device.native.drain_parts())


@pytest.fixture(autouse=True)
def goes_on(tmp_path: Path) -> Iterator[None]:
    """Else a device of a test that failed would wait for its copy for ever."""
    yield
    (tmp_path / "pause").unlink(missing_ok=True)


def test_a_large_store_reports_its_first_slots_while_the_others_are_copied(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.begin()
    assert rig.l0.words.state(0) == State.RUNNING
    assert rig.end().outcome == Outcome.DONE
    assert rig.parts() == [(rig.ticket, 2), (rig.ticket, 3)], "the last slot is reported by the end"


def test_a_slot_is_reported_only_when_all_before_it_are_copied(tmp_path: Path) -> None:
    rig = Rig(tmp_path, threads=2, pause_at=1)
    rig.begin()
    wait_until(lambda: rig.l1(3) == rig.l0.memory.read(4), what="the last slot is copied")
    assert rig.parts() == [], "the second slot stands still"
    assert rig.end().outcome == Outcome.DONE


def cancel(rig: Rig) -> None:
    assert rig.l0.words.move(0, 1, State.RUNNING, State.CANCELLED)


def stop(rig: Rig) -> None:
    rig.device.native.cancel(rig.ticket)


def truncate(rig: Rig) -> None:
    os.ftruncate(rig.l0.memory.fds[0], PART)


@pytest.mark.parametrize("act", [cancel, stop, truncate])
def test_nothing_is_reported_that_was_copied_after_a_cancel_or_from_lost_memory(
    act: Callable[[Rig], None], tmp_path: Path
) -> None:
    rig = Rig(tmp_path)
    rig.begin()
    act(rig)
    assert rig.end().outcome in (Outcome.CANCELLED, Outcome.MEMORY_LOST)
    assert rig.parts() == []


def test_nothing_is_reported_after_the_deadline(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.begin(seconds=3.0)
    wait_until(lambda: time.monotonic_ns() > rig.deadline)
    assert rig.end().outcome == Outcome.DONE, "the server judges the end itself"
    assert rig.parts() == []


def test_a_load_has_no_parts(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.begin(Direction.LOAD)
    assert rig.end().outcome == Outcome.DONE
    assert rig.parts() == []


def test_a_store_of_less_than_a_part_has_none() -> None:
    device = Device(pages=SLOTS, page_bytes=PART)
    l0 = L0(device, flat(SLOTS + 1, PART))
    assert device.store(l0, Job(range(1, SLOTS + 1), range(SLOTS), 1, 1)).outcome == Outcome.DONE
    assert device.native.drain_parts() == []
