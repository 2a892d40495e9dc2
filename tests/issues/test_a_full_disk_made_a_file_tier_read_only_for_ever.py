"""The journal of a file tier had no space of its own. A disk that was full, for a moment even, left the tier read-only for ever,
after restarts too."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.file_tiers import NAMESPACE, PAGE, FaultyDisk, FileRig, SmallL1, keys_of, name_of, size_of

from kvserver.l2 import TierOutcome
from kvserver.l2.files.folder import journal_bytes_of

DONE = TierOutcome.DONE
SIZE = "1MiB"
JOURNALS = ("journal", "journal.new")


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture
def rig(tmp_path: Path, disk: FaultyDisk) -> Iterator[FileRig]:
    rig = FileRig(tmp_path / "tier", SIZE, l1=SmallL1(64, fragmented=False), disk=disk).opened()
    yield rig
    rig.close()


def used_bytes(folder: Path, *names: str) -> int:
    return sum(512 * (folder / name).stat().st_blocks for name in names or os.listdir(folder))


def test_the_journal_and_its_replacement_never_use_more_than_is_reserved_at_the_start(
    rig: FileRig, tmp_path: Path
) -> None:
    folder = tmp_path / "tier"
    reserved = used_bytes(folder, *JOURNALS)
    assert reserved >= 2 * journal_bytes_of(size_of(1 << 20)) > 0
    inodes = {(folder / name).stat().st_ino for name in JOURNALS}
    for number in range(2000):
        assert rig.put(name_of(number), PAGE) is DONE
        if not number % 100:
            assert used_bytes(folder, *JOURNALS) == reserved
    assert {(folder / name).stat().st_ino for name in JOURNALS} == inodes, "each keeps its space"
    rig.written().close()
    again = FileRig(folder, SIZE, l1=SmallL1(64, fragmented=False)).opened()
    assert again.get(name_of(1999), PAGE) is DONE
    assert used_bytes(folder, *JOURNALS) == reserved
    again.close()


def test_records_that_are_too_many_for_the_journal_are_evicted(
    rig: FileRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvserver.l2.files.log_writer.LogWriter.most_live_bytes", 20 * 168)
    for number in range(60):
        assert rig.put(name_of(number), PAGE) is DONE
    assert 20 <= rig.tier.status().objects <= 22


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_tier_is_ready_again_when_there_is_space_again(
    rig: FileRig, tmp_path: Path, disk: FaultyDisk, number: int
) -> None:
    for each in range(20):
        assert rig.put(name_of(each), PAGE) is DONE
    rig.written()
    used = rig.tier.status().used_bytes
    disk.errors["write"] = number
    rig.tier.drop(NAMESPACE, 0, keys_of(3))
    rig.until(lambda: rig.tier.state == "read_only")
    now_ns = time.monotonic_ns()
    for minute in range(3):
        rig.tier.tick(now_ns + minute * 61_000_000_000)
        rig.turn()
        rig.turn()
    assert rig.tier.state == "read_only"
    assert rig.tier.status().used_bytes == used, "its drop is in no journal"
    assert rig.get(name_of(1), PAGE) is DONE
    del disk.errors["write"]
    rig.tier.tick(now_ns + 4 * 61_000_000_000)
    rig.until(lambda: rig.tier.state == "ready")
    assert rig.put(name_of(30), PAGE) is DONE
    rig.until(lambda: rig.tier.status().used_bytes == used)
    rig.written().close()
    again = FileRig(tmp_path / "tier", SIZE).opened()
    assert again.holds(*range(31)) == [each for each in (*range(20), 30) if each != 3]
    again.close()


def test_an_error_that_does_not_pass_is_not_tried_again(rig: FileRig, disk: FaultyDisk) -> None:
    disk.errors["write"] = errno.EIO
    rig.put(name_of(1), PAGE)
    rig.until(lambda: rig.tier.state == "read_only")
    disk.errors.clear()
    for hour in range(1, 4):
        rig.tier.tick(time.monotonic_ns() + hour * 3_600_000_000_000)
        rig.turn()
    assert rig.tier.state == "read_only"
