"""One object on a bad sector, or whose store never answers, stayed promised: each request with its prefix waited for it, for ever.

The newly computed one was never written: its put answered that the tier has it.
"""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from support.file_tiers import FaultyDisk, FileRig, SmallL1, name_of

from kvserver.l2 import ObjectName, TierOutcome
from kvserver.l2.failures import FIRST_SECONDS, MOST_OBJECTS, ObjectFailures
from kvserver.protocol import KEY_BYTES

SECOND = 10**9
SIZE = 5000


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture
def rig(tmp_path: Path, disk: FaultyDisk, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvserver.l2.failures.FIRST_SECONDS", 0.2)
    made = FileRig(tmp_path / "tier", disk=disk, l1=SmallL1(256)).opened()
    yield made
    made.close()


def fail_to_read(rig: FileRig, disk: FaultyDisk, number: int) -> None:
    disk.file.reads.error = errno.EIO
    assert rig.get(name_of(number), SIZE) is TierOutcome.UNAVAILABLE
    disk.file.reads.error = 0


def test_unreadable_object_is_not_promised_for_a_while_and_others_are(rig: FileRig, disk: FaultyDisk) -> None:
    for number in range(2):
        rig.put(name_of(number), SIZE)
    fail_to_read(rig, disk, 0)
    assert rig.holds(0, 1) == [1]
    rig.until(lambda: rig.holds(0, 1) == [0, 1])
    assert rig.get(name_of(0), SIZE) is TierOutcome.DONE


def test_recomputed_object_is_written_to_other_pages_than_the_unreadable_one(rig: FileRig, disk: FaultyDisk) -> None:
    empty = rig.tier.status().used_bytes
    rig.put(name_of(0), SIZE)
    record = rig.tier.status().used_bytes - empty
    fail_to_read(rig, disk, 0)
    rig.put(name_of(0), SIZE)
    rig.written()
    status = rig.tier.status()
    assert status.written_objects == 2
    assert status.used_bytes == empty + 2 * record, "the bad pages are free again"
    rig.until(lambda: rig.holds(0) == [0])
    assert rig.get(name_of(0), SIZE) is TierOutcome.DONE
    assert rig.tier.state == "ready"


def test_recomputed_object_is_not_written_a_second_time(rig: FileRig, disk: FaultyDisk) -> None:
    rig.put(name_of(0), SIZE)
    fail_to_read(rig, disk, 0)
    rig.put(name_of(0), SIZE)
    used = rig.written().tier.status().used_bytes
    rig.put(name_of(0), SIZE)
    assert (rig.tier.status().written_objects, rig.written().tier.status().used_bytes) == (2, used)


def test_object_unreadable_twice_is_dropped_and_a_restart_reuses_its_pages(
    tmp_path: Path, rig: FileRig, disk: FaultyDisk
) -> None:
    empty = rig.tier.status().used_bytes
    rig.put(name_of(0), SIZE)
    for _ in range(2):
        rig.until(lambda: rig.holds(0) == [0])
        fail_to_read(rig, disk, 0)
    rig.written()
    assert rig.tier.status().objects == 0
    assert rig.tier.status().used_bytes > empty, "its pages are used again before a restart"
    rig.close()
    again = FileRig(tmp_path / "tier", l1=SmallL1(256)).opened()
    assert again.tier.status().used_bytes == empty
    again.close()


def test_time_without_promise_doubles_with_each_failure_until_a_read_succeeds() -> None:
    failures, name = ObjectFailures(), ObjectName(b"n" * 32, 0, b"k" * KEY_BYTES)

    def shown(seconds: float) -> int:
        return failures.shown(1, name.namespace, 0, name.key, int(seconds * SECOND))

    assert failures.note(name, 0) == 1
    assert (shown(FIRST_SECONDS - 1), shown(FIRST_SECONDS)) == (0, 1)
    assert failures.note(name, 0) == 2
    assert (shown(2 * FIRST_SECONDS - 1), shown(2 * FIRST_SECONDS)) == (0, 1)
    failures.forget(name)
    assert failures.note(name, 0) == 1


def test_a_tier_that_fails_as_a_whole_blames_none_of_its_objects() -> None:
    failures = ObjectFailures()
    ill, well = (ObjectName(b"n" * 32, 0, bytes([number]) * KEY_BYTES) for number in range(2))
    failures.note(ill, 0)
    failures.answered()
    failures.note(well, 0)
    failures.blame_tier()
    assert failures.shown(0b11, b"n" * 32, 0, ill.key + well.key, 0) == 0b10


def test_number_of_remembered_unreadable_objects_is_bounded() -> None:
    failures = ObjectFailures()
    names = [ObjectName(b"n" * 32, 0, number.to_bytes(KEY_BYTES, "big")) for number in range(MOST_OBJECTS + 1)]
    for name in names:
        failures.note(name, 0)
    assert sum(name in failures for name in names) == MOST_OBJECTS
    assert names[0] not in failures
