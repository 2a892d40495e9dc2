"""Neighbours of a chain share a unit of the file tier: one write, one entry of the journal. Each is an object of its own."""

from __future__ import annotations

import errno
import struct
import threading
import time
from pathlib import Path

import pytest
from support.file_tiers import NAMESPACE, FaultyDisk, FileRig, SmallL1, key_of, keys_of, name_of

from kvserver._native import checksum
from kvserver.l2 import TierOutcome
from unit.l2.file_rigs import DONE, SIZES, MakeRig, data_pages

ENTRY = 128 + len(NAMESPACE)  # bytes of the journal's entry, without extents


def begin_chain(rig: FileRig, *numbers: int) -> list[int]:
    """Put them in one turn, each the parent of the next one."""
    after = [b"", *map(key_of, numbers)]
    return [rig.begin_put(name_of(each), *SIZES, parent=after[place])[0] for place, each in enumerate(numbers)]


def outcomes(rig: FileRig, tickets: list[int]) -> list[TierOutcome]:
    return [rig.end(ticket).outcome for ticket in tickets]


def all_there(rig: FileRig, *numbers: int) -> None:
    assert rig.holds(*range(40)) == list(numbers)
    assert {rig.get(name_of(number), *SIZES) for number in numbers} <= {DONE}
    assert data_pages(rig) == 8 * len(numbers)


def entries_bytes(folder: Path) -> int:
    return (folder / "tier/journal").stat().st_size - 40


class TestUnits:
    @pytest.mark.parametrize("count", [2, 8])
    def test_neighbours_of_one_turn_share_an_entry_and_are_found_again(
        self, make_rig: MakeRig, tmp_path: Path, count: int
    ) -> None:
        rig = make_rig()
        assert outcomes(rig, begin_chain(rig, *range(count))) == [DONE] * count
        all_there(rig, *range(count))
        rig.close()
        assert entries_bytes(tmp_path) == ENTRY + 8 + 32 * (count - 1)
        all_there(make_rig(), *range(count))

    @pytest.mark.parametrize("different", ["parent", "size", "group"])
    def test_objects_that_are_no_neighbours_have_entries_of_their_own(
        self, make_rig: MakeRig, tmp_path: Path, different: str
    ) -> None:
        rig = make_rig()
        first, _ = rig.begin_put(name_of(1), *SIZES)
        sizes = (SIZES[0] - 1, *SIZES[1:]) if different == "size" else SIZES
        name = name_of(2, group=int(different == "group"))
        second, _ = rig.begin_put(name, *sizes, parent=b"" if different == "parent" else key_of(1))
        assert outcomes(rig, [first, second]) == [DONE, DONE]
        rig.close()
        assert entries_bytes(tmp_path) == 2 * (ENTRY + 8)

    @pytest.mark.parametrize("gone", [0, 2, 3])
    def test_one_that_was_dropped_while_it_was_written_leaves_the_others(
        self, make_rig: MakeRig, tmp_path: Path, gone: int
    ) -> None:
        disk = FaultyDisk()
        rig = make_rig(disk=disk)
        disk.file.hang(True)
        tickets = begin_chain(rig, 0, 1, 2, 3)
        rig.until(lambda: disk.file.hanging == 1)
        rig.tier.drop(NAMESPACE, 0, keys_of(gone))
        disk.file.hang(False)
        expected = [TierOutcome.CANCELLED if number == gone else DONE for number in range(4)]
        assert outcomes(rig, tickets) == expected
        left = [number for number in range(4) if number != gone]
        all_there(rig, *left)
        rig.close()
        all_there(make_rig(), *left)

    def test_a_cancelled_put_leaves_its_neighbours(self, make_rig: MakeRig) -> None:
        disk = FaultyDisk()
        rig = make_rig(disk=disk)
        disk.file.hang(True)
        tickets = begin_chain(rig, 0, 1, 2)
        rig.until(lambda: disk.file.hanging == 1)
        rig.tier.cancel(tickets[0])
        disk.file.hang(False)
        assert outcomes(rig, tickets) == [TierOutcome.CANCELLED, DONE, DONE]
        all_there(rig, 1, 2)

    def test_a_write_that_fails_ends_each_put_and_no_page_is_lost(self, make_rig: MakeRig) -> None:
        disk = FaultyDisk()
        rig = make_rig(disk=disk)
        disk.file.writes.error = errno.ENOSPC
        assert outcomes(rig, begin_chain(rig, *range(5))) == [TierOutcome.FULL] * 5
        all_there(rig)
        disk.file.writes.error = 0
        assert outcomes(rig, begin_chain(rig, *range(5))) == [DONE] * 5
        all_there(rig, *range(5))

    def test_what_is_removed_from_the_middle_gives_its_pages_once(self, make_rig: MakeRig) -> None:
        rig = make_rig()
        outcomes(rig, begin_chain(rig, *range(6)))
        rig.tier.drop(NAMESPACE, 0, keys_of(2, 3))
        rig.written()
        all_there(rig, 0, 1, 4, 5)
        assert rig.put(name_of(3), *SIZES, parent=key_of(1), version=7) is DONE
        rig.close()
        rig = make_rig()
        assert rig.get(name_of(3), *SIZES, version=7) is DONE
        rig.tier.drop(NAMESPACE, 0, keys_of(*range(6)))
        rig.written()
        all_there(rig)

    def test_a_full_tier_evicts_a_units_end_first(self, make_rig: MakeRig) -> None:
        rig = make_rig(size="1MiB", l1=SmallL1(1024))  # of 256 pages: units of two
        for first in range(0, 40, 2):
            assert set(outcomes(rig, begin_chain(rig, first, first + 1))) == {DONE}
            there = rig.holds(*range(first + 2))
            assert all(number in there for number in range(0, first, 2) if number + 1 in there)
        assert rig.tier.status().evictions > 0

    def test_a_clear_takes_whole_units_and_what_is_being_written(self, make_rig: MakeRig) -> None:
        disk = FaultyDisk()
        rig = make_rig(disk=disk)
        assert outcomes(rig, begin_chain(rig, *range(5))) == [DONE] * 5
        disk.file.hang(True)
        tickets = begin_chain(rig, *range(10, 14))
        rig.until(lambda: disk.file.hanging == 1)
        assert rig.clear(NAMESPACE) is DONE
        disk.file.hang(False)
        assert outcomes(rig, tickets) == [TierOutcome.CANCELLED] * 4
        rig.written()
        all_there(rig)

    def test_a_unit_behind_another_enters_with_what_is_left_of_that(self, make_rig: MakeRig) -> None:
        disk = FaultyDisk()
        rig = make_rig(disk=disk)
        disk.file.hang(True)
        first = begin_chain(rig, *range(3))
        rig.until(lambda: disk.file.hanging == 1)
        second = [rig.begin_put(name_of(n), *SIZES, parent=key_of(n - 1))[0] for n in (3, 4)]
        rig.until(lambda: disk.file.hanging == 2)
        rig.tier.cancel(first[0])
        disk.file.hang(False)
        assert outcomes(rig, [*first, *second]) == [TierOutcome.CANCELLED, DONE, DONE, DONE, DONE]
        all_there(rig, 1, 2, 3, 4)

    def test_keys_that_are_each_others_parents_end(self, make_rig: MakeRig) -> None:
        rig = make_rig()
        pairs = [(1, 2), (2, 1), (1, 1), (3, 1), (1, 3)]
        tickets = [rig.begin_put(name_of(number), *SIZES, parent=key_of(parent))[0] for number, parent in pairs]
        assert set(outcomes(rig, tickets)) == {DONE}
        rig.written()
        all_there(rig, 1, 2, 3)

    def test_a_read_of_one_object_keeps_its_pages_only(self, make_rig: MakeRig) -> None:
        disk = FaultyDisk()
        rig = make_rig(disk=disk)
        outcomes(rig, begin_chain(rig, *range(4)))
        disk.file.hang(True)
        get = rig.tier.get(name_of(1), rig.l1.memory(*SIZES), 0)
        rig.until(lambda: disk.file.hanging == 1)
        rig.tier.drop(NAMESPACE, 0, keys_of(*range(4)))
        rig.until(lambda: data_pages(rig) == 8)
        disk.file.hang(False)
        assert rig.end(get).outcome is TierOutcome.CANCELLED
        rig.until(lambda: data_pages(rig) == 0)

    def test_an_object_that_cannot_be_read_leaves_its_unit_alone(self, make_rig: MakeRig) -> None:
        disk = FaultyDisk()
        rig = make_rig(disk=disk)
        outcomes(rig, begin_chain(rig, *range(4)))
        disk.file.reads.error = errno.EIO
        assert {rig.get(name_of(1), *SIZES) for _ in range(2)} == {TierOutcome.UNAVAILABLE}
        disk.file.reads.error = 0
        assert rig.holds(*range(4)) == [0, 2, 3]
        assert rig.put(name_of(1), *SIZES, parent=key_of(0)) is DONE
        assert {rig.get(name_of(number), *SIZES) for number in range(4)} == {DONE}
        assert data_pages(rig) == 5 * 8, "the pages that cannot be read are used no more"


class TestEarlierFormat:
    """A journal of format 1 has an entry for each record: kinds 1, 2 and 3."""

    @staticmethod
    def kinds(folder: Path) -> list[int]:
        """Kinds of the entries in a journal that has no units."""
        raw, at, found = (folder / "tier/journal").read_bytes(), 40, []
        while at < len(raw):
            extents, namespace_bytes, kind = struct.unpack_from("<III", raw, at + 52)
            found.append(kind)
            at += 128 + -(-namespace_bytes // 8) * 8 + 8 * extents
        return found

    def make_format_1(self, folder: Path) -> None:
        """Change the head. REQUIRES: entries of single records, which are the same in both formats."""
        assert set(self.kinds(folder)) <= {1, 2, 3}
        path = folder / "tier/journal"
        raw = path.read_bytes()
        head = struct.pack("<8sII16s", raw[:8], 1, 40, raw[16:32])
        path.write_bytes(head + struct.pack("<Q", checksum(head)) + raw[40:])

    @staticmethod
    def format_of(folder: Path) -> int:
        return int.from_bytes((folder / "tier/journal").read_bytes()[8:12], "little")

    def test_all_of_it_is_found_and_it_is_replaced_before_units_are_written(
        self, make_rig: MakeRig, tmp_path: Path
    ) -> None:
        rig = make_rig()
        for number in range(6):
            rig.put(name_of(number), *SIZES, parent=key_of(number - 1) if number else b"")
        rig.tier.drop(NAMESPACE, 0, keys_of(4))
        rig.close()
        self.make_format_1(tmp_path)
        rig = make_rig()
        all_there(rig, 0, 1, 2, 3, 5)
        assert outcomes(rig, begin_chain(rig, 10, 11, 12)) == [DONE] * 3
        rig.until(lambda: self.format_of(tmp_path) == 2)
        rig.written()
        assert outcomes(rig, begin_chain(rig, 20, 21, 22)) == [DONE] * 3
        rig.close()
        all_there(make_rig(), 0, 1, 2, 3, 5, 10, 11, 12, 20, 21, 22)

    def test_no_unit_is_appended_to_it(self, make_rig: MakeRig, tmp_path: Path) -> None:
        class SlowReplacement(FaultyDisk):
            """The replacement of the journal waits, and fails at last."""

            opened, go_on_opening = 0, threading.Event()

            def open(self, name: str, flags: int, folder: int) -> int:
                self.opened += name == "journal.new"
                if self.opened > 1:  # the first one reserves its space
                    self.go_on_opening.wait(20)
                return super().open(name, flags, folder)

        disk = SlowReplacement()
        rig = make_rig()
        rig.put(name_of(0), *SIZES)
        rig.close()
        self.make_format_1(tmp_path)
        rig = make_rig(disk=disk)
        rig.until(lambda: disk.opened == 2)
        assert outcomes(rig, begin_chain(rig, 1, 2, 3)) == [DONE] * 3
        disk.errors["replace"] = errno.EIO
        disk.go_on_opening.set()
        rig.until(lambda: rig.tier.state == "read_only")
        rig.close()
        assert (self.format_of(tmp_path), self.kinds(tmp_path)) == (1, [1, 1, 3, 3])
        all_there(make_rig(), 0, 1, 2, 3)


class TestRoom:
    def test_a_chain_of_more_than_a_small_tier_has_room_for_is_written_to_its_end(self, make_rig: MakeRig) -> None:
        rig = make_rig(size="4MiB", l1=SmallL1(4096))  # 126 objects of 8 pages
        assert outcomes(rig, begin_chain(rig, *range(240))) == [DONE] * 240
        assert len(rig.holds(*range(240))) > 60

    def test_one_that_is_late_ends_none_of_its_unit(self, make_rig: MakeRig) -> None:
        disk = FaultyDisk()
        rig = make_rig(size="4MiB", disk=disk)
        disk.file.hang(True)
        busy = [rig.begin_put(name_of(100 + number), *SIZES)[0] for number in range(4)]
        rig.until(lambda: disk.file.hanging == 4)
        soon = time.monotonic_ns() + 50_000_000
        names = [name_of(number) for number in range(4)]
        parents = [b"", *[name.key for name in names]]
        tickets = [
            rig.tier.put(name, rig.l1.memory(*SIZES), parent, soon + 10**11 * (name != names[0]))
            for name, parent in zip(names, parents, strict=False)
        ]
        rig.turn()  # they are a unit from here on
        rig.until(lambda: time.monotonic_ns() > soon)
        rig.tier.tick(time.monotonic_ns())
        disk.file.hang(False)
        assert outcomes(rig, [*busy, *tickets]) == [DONE] * 8
