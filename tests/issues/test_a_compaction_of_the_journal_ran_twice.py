"""A second compaction of a file tier's journal began before the first one had ended, and its fsync made the tier unavailable."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.file_tiers import NAMESPACE, PAGE, FaultyDisk, FileRig, SmallL1, name_of

from kvserver.l2 import READABLE, TierOutcome
from kvserver.l2.files import journal


class Counting(FaultyDisk):
    """Counts compactions, and the most bytes of a new journal that one sync had to write."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = self.switched = self.unsynced = self.most_unsynced = 0
        self.sync_seconds = 0.0
        self.next_fd = -1

    def open(self, name: str, flags: int, folder: int) -> int:
        fd = super().open(name, flags, folder)
        if name == "journal.new":
            self.next_fd, self.unsynced = fd, 0
        return fd

    def write(self, fd: int, data: bytes, offset: int) -> None:
        self.begun += offset == 0 and data.startswith(b"KVSL2JNL")
        self.unsynced += len(data) if fd == self.next_fd else 0
        super().write(fd, data, offset)

    def sync(self, fd: int) -> None:
        if fd == self.next_fd:
            self.most_unsynced, self.unsynced = max(self.most_unsynced, self.unsynced), 0
        time.sleep(self.sync_seconds)
        super().sync(fd)

    def exchange(self, name: str, new_name: str, folder: int) -> None:
        super().exchange(name, new_name, folder)
        self.switched += 1
        self.next_fd = -1


@pytest.fixture
def disk() -> Iterator[Counting]:
    disk = Counting()
    yield disk
    disk.hang_syncs(False)


@pytest.fixture
def rig(tmp_path: Path, disk: Counting, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileRig]:
    monkeypatch.setattr("kvserver.l2.files.log_writer._SPARE_BYTES", 4096)
    monkeypatch.setattr("kvserver.l2.files.log_writer._PER_SLICE", 16)
    monkeypatch.setattr("kvserver.l2.files.tier._STALLED_SECONDS", 0.1)
    rig = FileRig(tmp_path / "tier", "1MiB", "&timeout=10ms", l1=SmallL1(64, fragmented=False), disk=disk).opened()
    yield rig
    disk.hang_syncs(False)
    rig.close()


def test_one_crossing_of_the_threshold_is_one_compaction_however_slow_the_sync(rig: FileRig, disk: Counting) -> None:
    disk.sync_seconds, before = 0.05, disk.begun
    number = 0
    while disk.switched == before:
        rig.put(name_of(number), PAGE)
        number += 1
        assert number < 600, "no compaction ends"
    for more in range(5):
        rig.put(name_of(number + more), PAGE)
    rig.written()
    assert (disk.begun, disk.switched) == (before + 1, before + 1)


def test_slices_of_a_compaction_are_synced_as_they_are_written(
    rig: FileRig, disk: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "_SYNC_BYTES", 4096)
    for number in range(100):
        rig.put(name_of(number), PAGE)
    rig.written()
    before = disk.switched
    for _ in range(400):
        rig.put(name_of(number := number + 1), PAGE)
        if disk.switched > before:
            break
    assert disk.switched > before
    assert 0 < disk.most_unsynced < 4096 + 3 * 16 * 168, (
        "a slice more than is synced at once, and what changed meanwhile"
    )


def test_a_journal_whose_sync_hangs_stops_puts_and_clears_and_never_gets(rig: FileRig, disk: Counting) -> None:
    assert rig.put(name_of(0), PAGE) is TierOutcome.DONE
    rig.written()
    states = set[str]()
    disk.hang_syncs(True)
    ticket = rig.tier.clear(b"other")

    def stalled() -> bool:
        rig.tier.tick(time.monotonic_ns())
        states.add(rig.tier.state)
        return rig.tier.state != "ready"

    rig.until(stalled)
    assert states <= {"ready", "read_only"}
    assert set(READABLE) >= states, "a tier that was unreadable meanwhile would be resynced"
    assert "has not ended" in rig.tier.failure
    assert rig.holds(0) == [0]
    assert rig.get(name_of(0), PAGE) is TierOutcome.DONE
    assert rig.put(name_of(1), PAGE) is TierOutcome.UNAVAILABLE
    assert not rig.ended(ticket)
    threading.Timer(0.05, disk.hang_syncs, (False,)).start()
    assert rig.end(ticket).outcome is TierOutcome.DONE
    rig.until(lambda: not stalled())
    assert rig.put(name_of(1), PAGE) is TierOutcome.DONE
    assert rig.holds(1, namespace=NAMESPACE) == [1]
