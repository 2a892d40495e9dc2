"""The file tier over disks that fail: values, never wrong bytes, and gets go on as long as they can."""

from __future__ import annotations

import errno
import os
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.file_tiers import NAMESPACE, PAGE, FaultyDisk, FileRig, SmallL1, keys_of, name_of, tier_url

from kvserver._native import HostRegion
from kvserver.l2 import TierOutcome, make_tier
from kvserver.protocol import ConfigError

SIZES = (3 * PAGE + 17, 2 * PAGE, 1)
DONE, MISSING, CORRUPT = TierOutcome.DONE, TierOutcome.MISSING, TierOutcome.CORRUPT
UNAVAILABLE = TierOutcome.UNAVAILABLE
MakeRig = Callable[..., FileRig]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "tier"


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture
def make_rig(folder: Path, disk: FaultyDisk) -> Iterator[MakeRig]:
    rigs: list[FileRig] = []

    def make(**options: Any) -> FileRig:
        rigs.append(FileRig(folder, **{"disk": disk, **options}))
        return rigs[-1].opened()

    yield make
    disk.file.hang(False)
    for rig in rigs:
        rig.close()


def filled(rig: FileRig, count: int = 12) -> FileRig:
    for number in range(count):
        assert rig.put(name_of(number), *SIZES) is DONE
    return rig.written()


def flip(path: Path, at: int, mask: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ mask]))


class TestRecords:
    @pytest.mark.parametrize("number", [errno.EIO, errno.EBADF])
    def test_a_read_error_is_counted_and_the_record_stays(
        self, make_rig: MakeRig, disk: FaultyDisk, number: int
    ) -> None:
        rig = filled(make_rig())
        disk.file.reads.error = number
        assert rig.get(name_of(1), *SIZES) is UNAVAILABLE
        assert rig.tier.status().errors == 1
        disk.file.reads.error = 0
        assert rig.get(name_of(1), *SIZES) is DONE

    @pytest.mark.parametrize(
        ("number", "outcome"),
        [(errno.EIO, UNAVAILABLE), (errno.ENOSPC, TierOutcome.FULL), (errno.EDQUOT, TierOutcome.FULL)],
    )
    def test_a_write_error_leaves_no_record_and_no_page(
        self, make_rig: MakeRig, disk: FaultyDisk, number: int, outcome: TierOutcome
    ) -> None:
        rig = filled(make_rig())
        used = rig.tier.status().used_bytes
        disk.file.writes.error = number
        assert rig.put(name_of(99), *SIZES) is outcome
        assert rig.holds(99) == []
        assert rig.tier.status().used_bytes == used
        disk.file.writes.error = 0
        assert rig.put(name_of(99), *SIZES) is DONE

    @pytest.mark.parametrize("most", [1, 511, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE])
    def test_calls_that_move_less_are_continued(self, make_rig: MakeRig, disk: FaultyDisk, most: int) -> None:
        rig = make_rig()
        disk.file.writes.most_bytes = max(most, PAGE)
        assert rig.put(name_of(1), *SIZES) is DONE
        disk.file.writes.most_bytes = 0
        disk.file.reads.most_bytes = most
        assert rig.get(name_of(1), *SIZES) is (
            DONE if most >= PAGE else CORRUPT
        )  # less than a page is the end of a file

    @pytest.mark.parametrize("way", ["reads", "writes"])
    def test_a_flipped_bit_on_the_way_is_corrupt_and_the_record_is_dropped(
        self, make_rig: MakeRig, disk: FaultyDisk, way: str
    ) -> None:
        rig = make_rig()
        faults = getattr(disk.file, way)
        if way == "writes":
            faults.flip_every = 1
        assert rig.put(name_of(1), *SIZES) is DONE
        faults.flip_every = 1
        assert rig.get(name_of(1), *SIZES) is CORRUPT
        assert (rig.holds(1), rig.tier.status().corrupt) == ([], 1)
        faults.flip_every = 0
        assert rig.put(name_of(1), *SIZES) is DONE
        assert rig.get(name_of(1), *SIZES) is DONE

    def test_eight_corrupt_in_a_row_close_the_tier(self, make_rig: MakeRig, disk: FaultyDisk) -> None:
        rig = filled(make_rig(), 20)
        disk.file.reads.flip_every = 1
        assert {rig.get(name_of(number), *SIZES) for number in range(7)} == {CORRUPT}
        disk.file.reads.flip_every = 0
        assert rig.get(name_of(10), *SIZES) is DONE, "this ends the row"
        disk.file.reads.flip_every = 1
        assert {rig.get(name_of(number), *SIZES) for number in range(11, 19)} == {CORRUPT}
        assert rig.tier.state == "closed"
        assert "8 objects in a row were corrupt" in rig.tier.failure
        assert rig.holds(19) == []
        assert rig.get(name_of(19), *SIZES) is rig.put(name_of(1), *SIZES) is rig.clear() is UNAVAILABLE

    def test_a_disk_that_hangs_makes_the_tier_unavailable_until_it_answers(
        self, make_rig: MakeRig, disk: FaultyDisk, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvserver.l2.files.tier._STALLED_SECONDS", 0.05)
        rig = filled(make_rig(parameters="&timeout=10ms"))
        disk.file.hang(True)
        ticket = rig.tier.get(name_of(1), rig.l1.memory(*SIZES), 0)
        rig.until(lambda: (rig.tier.tick(0), rig.tier.state == "unavailable")[1])
        assert "has not ended" in rig.tier.failure
        assert rig.holds(1) == []
        assert rig.get(name_of(2), *SIZES) is rig.put(name_of(50), *SIZES) is UNAVAILABLE
        disk.file.hang(False)
        assert rig.end(ticket).outcome is DONE
        rig.until(lambda: (rig.tier.tick(0), rig.tier.state == "ready")[1])
        assert rig.get(name_of(2), *SIZES) is DONE

    def test_a_tier_whose_disk_hangs_can_be_closed(self, make_rig: MakeRig, disk: FaultyDisk) -> None:
        rig = filled(make_rig())
        disk.file.hang(True)
        rig.tier.get(name_of(1), rig.l1.memory(*SIZES), 0)
        rig.until(lambda: disk.file.hanging == 1)
        rig.tier.close(0)
        rig._closed = True
        disk.file.hang(False)


class TestJournal:
    @pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
    def test_a_journal_that_cannot_be_written_makes_the_tier_read_only(
        self, make_rig: MakeRig, disk: FaultyDisk, number: int
    ) -> None:
        rig = filled(make_rig())
        disk.errors["write"] = number
        rig.put(name_of(50), *SIZES)
        rig.until(lambda: rig.tier.state == "read_only")
        assert os.strerror(number) in rig.tier.failure
        assert rig.put(name_of(51), *SIZES) is UNAVAILABLE
        assert rig.get(name_of(1), *SIZES) is DONE
        disk.errors.clear()
        rig.close()
        rig = make_rig()
        assert rig.tier.state == "ready"
        assert rig.holds(*range(12)) == list(range(12))

    def test_no_page_is_used_again_whose_drop_could_not_be_written(self, make_rig: MakeRig) -> None:
        class Slow(FaultyDisk):
            armed, released = False, threading.Event()

            def write(self, fd: int, data: bytes, offset: int) -> None:
                if self.armed:
                    self.released.wait(20)
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                super().write(fd, data, offset)

        disk = Slow()
        rig = filled(make_rig(size="1MiB", disk=disk), 31)
        used, calls = rig.tier.status().used_bytes, disk.file.writes.calls
        disk.armed = True
        put, _ = rig.begin_put(name_of(100), *SIZES)  # evicts one
        for _ in range(5):
            rig.turn()
        assert (rig.ended(put), disk.file.writes.calls) == (False, calls), "its drop is not in the journal"
        disk.released.set()
        rig.until(lambda: rig.tier.state == "read_only")
        assert rig.end(put).outcome is UNAVAILABLE
        assert rig.tier.status().used_bytes == used
        disk.armed = False
        rig.close()
        rig = make_rig(size="1MiB")
        assert rig.holds(*range(31)) == list(range(31)), "its drop is not in the journal, and its bytes are untouched"
        assert all(rig.get(name_of(number), *SIZES) is DONE for number in range(31))

    @pytest.mark.parametrize("fitting", [0, 1, 100, 200, 1000])
    def test_a_part_of_an_entry_is_cut_off_before_more_is_appended(
        self, make_rig: MakeRig, disk: FaultyDisk, fitting: int
    ) -> None:
        rig = filled(make_rig())
        disk.most_written = fitting
        for number in range(50, 60):
            rig.put(name_of(number), *SIZES)
        rig.until(lambda: rig.tier.state == "read_only")
        disk.most_written = -1
        rig.close()
        rig = make_rig()
        there = rig.holds(*range(60))
        assert there[:12] == list(range(12))
        rig.put(name_of(70), *SIZES)
        rig.close()
        assert make_rig().holds(*range(80)) == [*there, 70]

    @pytest.mark.parametrize("call", ["open", "sync", "replace"])
    def test_a_clear_that_is_not_durable_states_so_and_is_tried_again(
        self, make_rig: MakeRig, disk: FaultyDisk, call: str
    ) -> None:
        rig = filled(make_rig())
        used = rig.tier.status().used_bytes
        disk.errors[call] = errno.EIO
        assert rig.clear(NAMESPACE) is UNAVAILABLE
        assert rig.holds(*range(12)) == []
        for _ in range(5):
            rig.turn()
        assert rig.tier.status().used_bytes == used, "a crash now would bring the records back"
        disk.errors.clear()
        rig.tier.tick(0)
        rig.until(lambda: rig.tier.status().used_bytes == PAGE)
        rig.close()
        assert make_rig().holds(*range(12)) == []

    @pytest.mark.parametrize("call", ["open", "sync", "replace", "write"])
    def test_a_compaction_that_fails_loses_nothing(self, make_rig: MakeRig, call: str) -> None:
        class NoNewJournal(FaultyDisk):
            on, new = False, -1

            def open(self, name: str, flags: int, folder: int) -> int:
                fd = super().open(name, flags, folder)
                if name == "journal.new" and self.on:
                    self.new = fd
                    if call != "write":
                        self.errors[call] = errno.EIO
                return fd

            def write(self, fd: int, data: bytes, offset: int) -> None:
                if fd == self.new and call == "write" and self.on:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                super().write(fd, data, offset)

        disk = NoNewJournal()
        rig = filled(make_rig(l1=SmallL1(64), disk=disk))
        disk.on = True
        if call == "open":
            disk.errors["open"] = errno.EIO
        for turn in range(20_000):
            if rig.tier.state == "read_only":
                break
            rig.put(name_of(1000 + turn % 2), 1)
            rig.tier.drop(NAMESPACE, 0, keys_of(1000, 1001))
        assert rig.tier.state == "read_only"
        assert rig.get(name_of(3), *SIZES) is DONE
        rig.close()
        rig = make_rig()
        assert rig.holds(*range(12)) == list(range(12))
        assert rig.get(name_of(3), *SIZES) is DONE


class TestFiles:
    """What other hands did to the files while no daemon ran."""

    @pytest.mark.parametrize("kept", [0, 1, 39, 40, 41, 300, 1000])
    def test_a_journal_that_ends_early_loses_its_end_only(self, make_rig: MakeRig, folder: Path, kept: int) -> None:
        filled(make_rig()).close()
        size = (folder / "journal").stat().st_size
        os.truncate(folder / "journal", kept)
        rig = make_rig()
        there = rig.holds(*range(12))
        assert there == list(range(max(0, (kept - 40) // ((size - 40) // 12))))
        assert all(rig.get(name_of(number), *SIZES) is DONE for number in there)
        rig.put(name_of(50), *SIZES)
        rig.close()
        assert make_rig().holds(*range(60)) == [*there, 50]

    def test_a_bit_anywhere_in_the_journal_loses_what_follows_and_gives_no_wrong_bytes(
        self, make_rig: MakeRig, folder: Path
    ) -> None:
        filled(make_rig()).close()
        whole = (folder / "journal").read_bytes()
        for at in range(0, len(whole), 37):
            (folder / "journal").write_bytes(whole)
            flip(folder / "journal", at, 1 << at % 8)
            try:
                rig = make_rig()
            except ConfigError:
                continue
            if rig.tier.state == "closed":
                assert "format" in rig.tier.failure
            else:
                there = rig.holds(*range(12))
                assert there == list(range(len(there)))
                assert len(there) <= max(0, at - 40) * 12 // (len(whole) - 40)
                assert all(rig.get(name_of(number), *SIZES) is DONE for number in there)
            rig.close()

    def test_entries_behind_a_bad_one_do_not_count_after_more_was_appended(
        self, make_rig: MakeRig, folder: Path
    ) -> None:
        filled(make_rig()).close()
        entry = ((folder / "journal").stat().st_size - 40) // 12
        flip(folder / "journal", 40 + 5 * entry + 100)
        rig = make_rig()
        rig.put(name_of(50), *SIZES)  # an entry of the same length, in the place of the bad one
        rig.close()
        rig = make_rig()
        assert rig.holds(*range(60)) == [*range(5), 50]
        assert all(rig.get(name_of(number), *SIZES) is DONE for number in (*range(5), 50))

    def test_a_bit_anywhere_in_the_data_is_one_corrupt_record_at_most(self, make_rig: MakeRig, folder: Path) -> None:
        filled(make_rig()).close()
        for at in range(PAGE, 96 * PAGE, 8 * PAGE + 1001):
            flip(folder / "data", at, 1 << at % 8)
            rig = make_rig()
            assert [rig.get(name_of(number), *SIZES) for number in range(12)].count(CORRUPT) <= 1
            flip(folder / "data", at, 1 << at % 8)
            rig.close()

    def test_a_bit_in_both_files_of_generations_loses_all_and_brings_nothing_back(
        self, make_rig: MakeRig, folder: Path
    ) -> None:
        rig = filled(make_rig())
        assert rig.clear(NAMESPACE) is DONE
        rig.put(name_of(20), *SIZES)
        rig.close()
        whole = (folder / "generations").read_bytes()
        for at in range(len(whole)):
            for name in ("generations", "generations.copy"):
                (folder / name).write_bytes(whole)
                flip(folder / name, at, 1 << at % 8)
            rig = make_rig()
            assert rig.holds(*range(21)) == []
            assert rig.tier.state == "ready" or "format" in rig.tier.failure
            rig.close()

    @pytest.mark.parametrize("name", ["journal", "generations*", "data"])
    def test_a_file_that_is_not_there_is_an_empty_tier(self, make_rig: MakeRig, folder: Path, name: str) -> None:
        filled(make_rig()).close()
        for path in folder.glob(name):
            path.unlink()
        rig = make_rig()
        assert rig.holds(*range(12)) == []
        rig.put(name_of(20), *SIZES)
        rig.close()
        assert make_rig().holds(*range(30)) == [20]

    def test_data_that_ends_early_is_corrupt_where_it_is_missing(self, make_rig: MakeRig, folder: Path) -> None:
        rig = filled(make_rig())
        os.truncate(folder / "data", 50 * PAGE)
        found = [rig.get(name_of(number), *SIZES) for number in range(12)]
        assert set(found) == {DONE, CORRUPT}
        rig.close()
        os.truncate(folder / "data", 30 * PAGE)
        rig = make_rig()
        assert {rig.get(name_of(number), *SIZES) for number in range(12)} <= {DONE, CORRUPT, MISSING}

    def test_data_of_another_folder_has_none_of_the_journals_records(
        self, make_rig: MakeRig, folder: Path, tmp_path: Path
    ) -> None:
        filled(make_rig()).close()
        other = FileRig(tmp_path / "other").opened()
        other.put(name_of(1), *SIZES, version=5)
        other.close()
        (tmp_path / "other/data").replace(folder / "data")
        assert make_rig().holds(*range(12)) == []

    @pytest.mark.parametrize(
        ("name", "known"), [("journal", 2), ("generations", 2), ("generations.copy", 2), ("data", 1)]
    )
    def test_files_of_a_later_version_are_left_as_they_are(
        self, make_rig: MakeRig, folder: Path, name: str, known: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        filled(make_rig()).close()
        with (folder / name).open("r+b") as file:
            file.seek(8)
            file.write(struct.pack("<I", known + 1))
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        if name == "data":
            with pytest.raises(ConfigError, match="its data file has format 2"):
                make_rig()
        else:
            rig = make_rig()
            assert rig.tier.state == "closed"
            assert f"{name} has format {known + 1}, and this version knows {known}" in rig.tier.failure
            assert rig.put(name_of(1), *SIZES) is rig.get(name_of(1), *SIZES) is UNAVAILABLE
            rig.close()
            assert not [record for record in caplog.records if record.exc_info], "it is no bug of this version"
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before

    def test_a_record_of_another_object_at_its_place_is_not_read_as_it(self, make_rig: MakeRig, folder: Path) -> None:
        """As a stale index would have it: each record is replaced by one that is right in all but its name."""
        rig = make_rig()
        for group in (0, 1):
            rig.put(name_of(1, group=group), *SIZES)
        rig.put(name_of(1, namespace=b"m" * 32), *SIZES)
        rig.put(name_of(2), *SIZES)
        rig.close()
        raw = (folder / "data").read_bytes()
        starts = [at for at in range(PAGE, len(raw), PAGE) if raw[at : at + 8] == b"KVSL2REC"]
        assert len(starts) == 4
        moved = bytearray(raw)
        for at, source in zip(starts, starts[1:] + starts[:1], strict=True):
            moved[at : at + 8 * PAGE] = raw[source : source + 8 * PAGE]
        (folder / "data").write_bytes(moved)
        rig = make_rig()
        names = [name_of(1), name_of(1, group=1), name_of(1, namespace=b"m" * 32), name_of(2)]
        assert [rig.get(name, *SIZES) for name in names] == [CORRUPT] * 4

    def test_records_found_at_the_start_may_be_corrupt_without_closing_the_tier(
        self, make_rig: MakeRig, folder: Path
    ) -> None:
        filled(make_rig()).close()
        for at in range(PAGE + 5000, 97 * PAGE, 8 * PAGE):
            flip(folder / "data", at)
        rig = make_rig()
        assert [rig.get(name_of(number), *SIZES) for number in range(12)] == [CORRUPT] * 12
        assert rig.tier.state == "ready"


class TestReadOnly:
    @pytest.mark.parametrize("configured", [True, False])
    def test_a_read_only_folder_is_read(
        self, make_rig: MakeRig, folder: Path, disk: FaultyDisk, configured: bool
    ) -> None:
        filled(make_rig()).close()
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        if not configured:
            disk.errors["open"] = errno.EROFS
        rig = make_rig(parameters="&read_only=true" if configured else "")
        assert (rig.tier.state, "read-only" in rig.tier.failure) == ("read_only", True)
        assert rig.get(name_of(1), *SIZES) is DONE
        assert rig.put(name_of(50), *SIZES) is UNAVAILABLE
        rig.tier.drop(NAMESPACE, 0, keys_of(1))
        assert rig.holds(1, 2) == [2]
        assert rig.clear() is UNAVAILABLE, "it would come back"
        assert rig.holds(2) == []
        rig.close()
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
        disk.errors.clear()
        assert make_rig().holds(*range(12)) == list(range(12))

    def test_a_read_only_folder_without_records_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "tier").mkdir(0o700)
        with pytest.raises(ConfigError):
            make_tier(tier_url(tmp_path / "tier", "1MiB", "&read_only=true"), HostRegion(1 << 20), PAGE)

    def test_a_new_folder_on_a_read_only_file_system_is_refused_for_that_reason(
        self, make_rig: MakeRig, disk: FaultyDisk
    ) -> None:
        disk.errors["open"] = errno.EROFS
        with pytest.raises(ConfigError, match="Read-only file system"):
            make_rig()

    def test_an_error_of_the_replay_closes_the_tier(self, make_rig: MakeRig, folder: Path, disk: FaultyDisk) -> None:
        filled(make_rig()).close()
        before = {path.name: path.read_bytes() for path in folder.iterdir()}

        class Unreadable(FaultyDisk):
            def read(self, fd: int, size: int, offset: int) -> bytes:
                if size > 1 << 20:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                return super().read(fd, size, offset)

        rig = make_rig(disk=Unreadable())
        assert (rig.tier.state, os.strerror(errno.EIO) in rig.tier.failure) == ("closed", True)
        rig.close()
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
