"""Tickets of the file tier end once, and its threads give way to others."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest
from support.file_tiers import FaultyDisk, name_of

from kvserver.l2 import TierOutcome
from kvserver.l2.files.tier import THREADS
from unit.l2.file_rigs import DONE, SIZES, MakeRig


class TestTickets:
    def test_a_waiting_ticket_ends_at_its_cancel(self, make_rig: MakeRig) -> None:
        disk = FaultyDisk()
        rig = make_rig(disk=disk)
        rig.put(name_of(1), *SIZES)
        disk.file.hang(True)
        gets = [rig.tier.get(name_of(1), rig.l1.memory(*SIZES), 0) for _ in range(8)]
        rig.until(lambda: disk.file.hanging == THREADS)
        rig.tier.cancel(gets[-1])
        assert rig.end(gets[-1]).outcome is TierOutcome.CANCELLED
        rig.tier.cancel(gets[0])
        rig.turn()
        assert not rig.ended(gets[0]), "a thread uses its memory"
        disk.file.hang(False)
        assert {rig.end(ticket).outcome for ticket in gets[1:-1]} == {DONE}
        assert rig.end(gets[0]).outcome in (DONE, TierOutcome.CANCELLED)
        rig.tier.cancel(gets[0])

    def test_a_read_that_hangs_keeps_its_ticket_open_and_ends_as_timeout(self, make_rig: MakeRig) -> None:
        disk = FaultyDisk()
        rig = make_rig(disk=disk)
        rig.put(name_of(1), *SIZES)
        disk.file.hang(True)
        soon = time.monotonic_ns() + 3_000_000_000  # the threads, of a low priority, have begun by then
        gets = [rig.tier.get(name_of(1), rig.l1.memory(*SIZES), soon) for _ in range(THREADS + 2)]
        rig.until(lambda: disk.file.hanging == THREADS)
        rig.until(lambda: time.monotonic_ns() > soon)
        rig.tier.tick(time.monotonic_ns())
        assert [rig.end(ticket).outcome for ticket in gets[THREADS:]] == [TierOutcome.TIMEOUT] * 2, (
            "those that wait end in time"
        )
        assert not any(map(rig.ended, gets[:THREADS]))
        disk.file.hang(False)
        assert {rig.end(ticket).outcome for ticket in gets} == {TierOutcome.TIMEOUT}
        assert rig.get(name_of(1), *SIZES) is DONE, "a slow disk is no reason to drop it"

    def test_a_get_waits_for_no_put(self, make_rig: MakeRig) -> None:
        disk = FaultyDisk()
        rig = make_rig(disk=disk)
        rig.put(name_of(0), *SIZES)
        disk.file.hang(True)
        puts = [rig.begin_put(name_of(number), *SIZES)[0] for number in range(1, 9)]
        rig.until(lambda: disk.file.hanging == THREADS)  # all that write
        reads = disk.file.reads.calls
        get = rig.tier.get(name_of(0), rig.l1.memory(*SIZES), 0)
        rig.until(lambda: disk.file.hanging == THREADS + 1)
        assert disk.file.reads.calls == reads + 1
        disk.file.hang(False)
        assert {rig.end(ticket).outcome for ticket in (*puts, get)} == {DONE}


def threads_of_nice(nice: int) -> set[str]:
    """Threads of this process with that priority."""
    found = set()
    for path in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            if int(path.read_text().rpartition(")")[2].split()[16]) == nice:
                found.add(path.parent.name)
    return found


@pytest.mark.parametrize("nice", [5, 19])
def test_threads_that_read_give_way_to_l1_and_those_that_write_to_all_others(make_rig: MakeRig, nice: int) -> None:
    """A store took 1.35 of its time while a fill ran at nice 0, and reads 12 times as long at nice 19 beside busy processes."""
    before = threads_of_nice(nice)
    rig = make_rig()
    rig.until(lambda: len(threads_of_nice(nice) - before) == THREADS)
