"""Parts of a store: its first slots count while the others are copied, if they were whole before any cancel and in time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.daemon import wait_until

from kvserver._native import Direction, Outcome, State

from .rig import L0, Device, End, Job, flat

PART = 16 << 20  # a block, a slot and a page: each slot is a part
SLOTS = 4


class Rig:
    """A store of four slots, which stands still once the first one is copied."""

    def __init__(self, folder: Path, threads: int = 1) -> None:
        self.pause, self.reached = folder / "pause", folder / "pause.reached"
        self.pause.touch()
        self.device = Device(pages=SLOTS, page_bytes=PART, threads=threads, pause_file=str(self.pause))
        self.l0 = L0(self.device, flat(SLOTS + 1, PART))
        self.job = Job(range(1, SLOTS + 1), range(SLOTS), 1, 1)
        self.ticket = 0

    def begin(self, direction: Direction = Direction.STORE, seconds: float = 600.0) -> None:
        self.l0.words.arm(0, 1)
        deadline = time.monotonic_ns() + int(seconds * 1e9)
        self.ticket = self.device.submit(
            direction, self.l0, self.job, word_memory=self.l0.mappings[-1], word_index=0, sequence=1,
            deadline_nanos=deadline,
        )  # fmt: skip
        wait_until(self.reached.exists, what="the second block is begun")

    def end(self) -> End:
        self.pause.unlink()
        return self.device.wait(self.ticket)

    def parts(self) -> list[tuple[int, int]]:
        return list(self.device.native.drain_parts())


def test_a_large_store_reports_its_first_slots_while_the_others_are_copied(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.begin()
    assert rig.parts() == [(rig.ticket, 1)]
    assert rig.l0.words.state(0) == State.RUNNING
    assert rig.end().outcome == Outcome.DONE
    assert rig.parts() == [(rig.ticket, 2), (rig.ticket, 3)], "the last slot is reported by the end"


def test_a_slot_is_reported_only_when_all_before_it_are_copied(tmp_path: Path) -> None:
    rig = Rig(tmp_path, threads=3)
    rig.begin()
    assert all(part == (rig.ticket, 1) for part in rig.parts()), "the second slot stands still"
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
    assert rig.parts() == [(rig.ticket, 1)]
    act(rig)
    assert rig.end().outcome in (Outcome.CANCELLED, Outcome.MEMORY_LOST)
    assert rig.parts() == []


def test_nothing_is_reported_after_the_deadline(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    deadline = time.monotonic() + 3
    rig.begin(seconds=3.0)
    rig.parts()
    wait_until(lambda: time.monotonic() > deadline)
    assert rig.end().outcome == Outcome.DONE, "the server judges the end itself"
    assert rig.parts() == []


def test_a_load_has_no_parts(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.begin(Direction.LOAD)
    assert rig.end().outcome == Outcome.DONE
    assert rig.parts() == []


def test_a_store_of_less_than_two_parts_has_none() -> None:
    device = Device(pages=SLOTS, page_bytes=PART // 4)
    l0 = L0(device, flat(SLOTS + 1, PART // 4))
    assert device.store(l0, Job(range(1, SLOTS + 1), range(SLOTS), 1, 1)).outcome == Outcome.DONE
    assert device.native.drain_parts() == []
