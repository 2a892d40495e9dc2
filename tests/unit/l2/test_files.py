"""The file tier: what it keeps, what it finds again, what it evicts."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.file_tiers import (
    COVERAGE,
    NAMESPACE,
    PAGE,
    FaultyDisk,
    FileRig,
    SmallL1,
    key_of,
    keys_of,
    name_of,
    tier_url,
)

from kvserver._native import HostRegion
from kvserver.l2 import TierOutcome, make_tier
from kvserver.l2.files.tier import THREADS
from kvserver.protocol import ConfigError

SIZES = (3 * PAGE + 17, 2 * PAGE, 1)  # 8 pages of the data file, with the header
DONE, MISSING = TierOutcome.DONE, TierOutcome.MISSING
OTHER = b"o" * 32
MakeRig = Callable[..., FileRig]


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[MakeRig]:
    rigs: list[FileRig] = []

    def make(**options: Any) -> FileRig:
        rigs.append(FileRig(tmp_path / "tier", **options))
        return rigs[-1].opened()

    yield make
    for rig in rigs:
        rig.close()


def data_pages(rig: FileRig) -> int:
    return rig.tier.status().used_bytes // PAGE - 1  # without the file's first page


class TestObjects:
    def test_an_object_of_several_ranks_in_fragments_comes_back_exactly(self, make_rig: MakeRig) -> None:
        rig = make_rig()
        assert rig.put(name_of(1), *SIZES) is DONE
        assert rig.holds(1, 2) == [1]
        assert rig.get(name_of(1), *SIZES) is DONE
        assert rig.get(name_of(2), *SIZES) is MISSING

    @pytest.mark.parametrize("slot_bytes", [(1,), (PAGE,), (PAGE - 1, PAGE + 1), (300 * PAGE + 5,), (5,) * 40])
    def test_sizes_around_pages_and_pieces(self, make_rig: MakeRig, slot_bytes: tuple[int, ...]) -> None:
        rig = make_rig(l1=SmallL1(1024))
        assert rig.put(name_of(1), *slot_bytes) is DONE
        assert rig.get(name_of(1), *slot_bytes) is DONE

    def test_nothing_of_l1_behind_a_slots_bytes_reaches_the_file(self, make_rig: MakeRig, tmp_path: Path) -> None:
        rig = make_rig()
        whole = rig.l1.memory(PAGE)
        secret = b"\x5a" * PAGE
        rig.l1.write(whole, secret)
        rig.l1.free(whole)
        assert rig.put(name_of(1), 5) is DONE  # into the same page
        assert b"\x5a" * 16 not in (tmp_path / "tier/data").read_bytes()

    def test_a_get_leaves_l1_behind_a_slots_bytes_alone(self, make_rig: MakeRig) -> None:
        rig = make_rig()
        assert rig.put(name_of(1), 5) is DONE
        whole = rig.l1.memory(PAGE)
        rig.l1.write(whole, b"\x5a" * PAGE)
        part = type(whole)(COVERAGE, whole.slots, (5,))
        assert rig.end(rig.tier.get(name_of(1), part, 0)).outcome is DONE
        assert rig.l1.read(whole) == rig.content(name_of(1), 5) + b"\x5a" * (PAGE - 5)

    def test_an_object_is_found_under_its_own_name_only(self, make_rig: MakeRig) -> None:
        rig = make_rig()
        rig.put(name_of(1), *SIZES)
        for name in (name_of(2), name_of(1, group=1), name_of(1, namespace=OTHER), name_of(1, namespace=NAMESPACE * 2)):
            assert rig.get(name, *SIZES) is MISSING
        assert rig.holds(1, group=1) == rig.holds(1, namespace=OTHER) == []

    def test_another_coverage_or_other_lengths_are_another_object(self, make_rig: MakeRig) -> None:
        rig = make_rig()
        rig.put(name_of(1), *SIZES)
        assert rig.get(name_of(1), *SIZES, coverage=b"d" * 16) is MISSING
        assert rig.get(name_of(1), 3 * PAGE + 18, 2 * PAGE, 1) is MISSING
        assert rig.get(name_of(1), *SIZES) is DONE, "it was not dropped by them"

    def test_a_put_with_another_coverage_takes_the_place(self, make_rig: MakeRig) -> None:
        rig = make_rig()
        rig.put(name_of(1), 2 * PAGE)
        assert rig.put(name_of(1), PAGE, version=1) is DONE
        assert rig.get(name_of(1), 2 * PAGE) is MISSING
        assert rig.get(name_of(1), PAGE, version=1) is DONE
        rig.until(lambda: data_pages(rig) == 2)

    def test_what_is_there_is_not_written_again(self, make_rig: MakeRig) -> None:
        rig = make_rig()
        rig.put(name_of(1), *SIZES)
        ticket, _ = rig.begin_put(name_of(1), *SIZES)
        end = rig.end(ticket)
        assert (end.outcome, end.bytes) == (DONE, 0)
        assert rig.tier.status().written_objects == 1

    def test_two_puts_of_one_object_at_a_time_are_one_object(self, make_rig: MakeRig) -> None:
        disk = FaultyDisk()
        rig = make_rig(disk=disk)
        disk.file.hang(True)
        tickets = [rig.begin_put(name_of(1), *SIZES)[0] for _ in range(2)]
        disk.file.hang(False)
        assert {rig.end(ticket).outcome for ticket in tickets} == {DONE}
        rig.until(lambda: data_pages(rig) == 8)
        assert rig.get(name_of(1), *SIZES) is DONE

    def test_a_dropped_object_is_not_found_and_its_pages_are_free(self, make_rig: MakeRig) -> None:
        rig = make_rig()
        rig.put(name_of(1), *SIZES)
        rig.put(name_of(2), *SIZES)
        rig.tier.drop(NAMESPACE, 0, keys_of(1, 7))
        assert rig.holds(1, 2) == [2]
        rig.until(lambda: data_pages(rig) == 8)

    def test_a_put_that_was_dropped_meanwhile_is_cancelled(self, make_rig: MakeRig) -> None:
        disk = FaultyDisk()
        rig = make_rig(disk=disk)
        disk.file.hang(True)
        ticket, _ = rig.begin_put(name_of(1), *SIZES)
        rig.tier.drop(NAMESPACE, 0, keys_of(1))
        disk.file.hang(False)
        assert rig.end(ticket).outcome is TierOutcome.CANCELLED
        assert rig.holds(1) == []

    def test_a_probe_ends_at_once(self, make_rig: MakeRig) -> None:
        rig = make_rig()
        assert rig.end(rig.tier.probe(NAMESPACE, 0, keys_of(1), True, 0)).outcome is DONE

    def test_the_descriptor_is_readable_while_there_is_an_end(self, make_rig: MakeRig) -> None:
        rig = make_rig()
        rig.turn()
        while select.select([rig.tier.completion_fd], [], [], 0.2)[0]:
            rig.tier.drain()
        ticket = rig.tier.get(name_of(1), rig.l1.memory(1), 0)
        assert select.select([rig.tier.completion_fd], [], [], 1)[0]
        assert [end.ticket for end in rig.tier.drain()] == [ticket]


class TestReopening:
    def test_a_new_daemon_finds_what_the_last_one_wrote(self, make_rig: MakeRig) -> None:
        rig = make_rig()
        for number in range(20):
            assert rig.put(name_of(number), *SIZES) is DONE
        rig.tier.drop(NAMESPACE, 0, keys_of(3, 4))
        rig.close()
        rig = make_rig()
        left = [number for number in range(20) if number not in (3, 4)]
        assert rig.holds(*range(20)) == left
        assert all(rig.get(name_of(number), *SIZES) is DONE for number in left)
        assert data_pages(rig) == 18 * 8

    def test_nothing_is_there_and_no_put_is_accepted_before_the_replay_has_ended(
        self, make_rig: MakeRig, tmp_path: Path
    ) -> None:
        rig = make_rig()
        rig.put(name_of(1), *SIZES)
        rig.close()
        rig = FileRig(tmp_path / "tier")
        assert (rig.tier.state, rig.holds(1)) == ("opening", [])
        assert rig.put(name_of(2), *SIZES) is TierOutcome.UNAVAILABLE
        assert rig.get(name_of(1), *SIZES) in (TierOutcome.UNAVAILABLE, DONE)
        assert rig.opened().holds(1, 2) == [1]
        rig.close()

    def test_files_are_their_owners_only(self, make_rig: MakeRig, tmp_path: Path) -> None:
        make_rig().put(name_of(1), *SIZES)
        assert (tmp_path / "tier").stat().st_mode & 0o777 == 0o700
        assert {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "tier").iterdir()} == {
            "data": 0o600,
            "journal": 0o600,
            "generations": 0o600,
        }

    @pytest.mark.parametrize("size", ["2MiB", "1MiB"])
    def test_a_smaller_size_drops_what_does_not_fit(self, make_rig: MakeRig, tmp_path: Path, size: str) -> None:
        rig = make_rig(size="4MiB")
        for number in range(100):
            rig.put(name_of(number), *SIZES)
        rig.close()
        rig = make_rig(size=size)
        assert (tmp_path / "tier/data").stat().st_size == rig.tier.status().size_bytes
        there = rig.holds(*range(100))
        assert 0 < len(there) < 100
        assert all(rig.get(name_of(number), *SIZES) is DONE for number in there)
        rig.close()
        assert make_rig(size="8MiB").holds(*range(100)) == there

    def test_journals_are_compacted_and_ages_survive(self, make_rig: MakeRig, tmp_path: Path) -> None:
        rig = make_rig(size="1MiB", l1=SmallL1(64))
        for number in range(20):
            rig.put(name_of(number), *SIZES)
        rig.tier.touch(NAMESPACE, 0, keys_of(5))
        journal = tmp_path / "tier/journal"
        first = journal.stat().st_ino
        entries = 0
        while journal.stat().st_ino == first:
            rig.put(name_of(1000), 1)
            rig.tier.drop(NAMESPACE, 0, keys_of(1000))
            entries += 2
            assert entries < 20_000
        assert journal.stat().st_size < 100_000
        assert rig.holds(*range(20)) == list(range(20))
        rig.put(name_of(20), *SIZES)  # into the new file
        rig.close()
        rig = make_rig(size="1MiB")
        assert rig.holds(*range(21)) == list(range(21))
        number = 100
        while 5 in rig.holds(5) and rig.holds(*range(20)) != [5]:
            rig.put(name_of(number), *SIZES)
            number += 1
        assert rig.holds(*range(20)) == [5], "the touched one is the last of the old ones"


class TestEviction:
    def fill(self, rig: FileRig, chains: int, length: int) -> None:
        for number in range(chains * length):
            parent = key_of(number - 1) if number % length else b""
            assert rig.put(name_of(number), *SIZES, parent=parent) is DONE

    def test_a_chain_loses_its_end_first(self, make_rig: MakeRig) -> None:
        rig = make_rig(size="1MiB")  # 31 objects of 8 pages
        self.fill(rig, 1, 31)
        for evicted in range(1, 10):
            rig.put(name_of(100 + evicted), *SIZES)
            assert rig.holds(*range(31)) == list(range(31 - evicted))

    def test_the_chain_that_was_used_last_stays(self, make_rig: MakeRig) -> None:
        rig = make_rig(size="1MiB")
        self.fill(rig, 3, 10)
        rig.tier.touch(NAMESPACE, 0, keys_of(*range(10)))
        rig.put(name_of(200), *SIZES)
        for number in range(100, 110):
            rig.put(name_of(number), *SIZES)
        assert rig.holds(*range(30)) == [*range(10), *range(20, 30)]

    def test_the_quota_is_never_exceeded(self, make_rig: MakeRig, tmp_path: Path) -> None:
        rig = make_rig(size="1MiB", l1=SmallL1(2048))
        waiting = [rig.begin_put(name_of(number), *SIZES) for number in range(100)]
        for ticket, _ in waiting:
            assert rig.end(ticket).outcome in (DONE, TierOutcome.FULL)
            status = rig.tier.status()
            assert status.used_bytes <= status.size_bytes == 1 << 20
        assert (tmp_path / "tier/data").stat().st_size == 1 << 20
        there = rig.holds(*range(100))
        assert len(there) > 20
        assert all(rig.get(name_of(number), *SIZES) is DONE for number in there)

    def test_room_is_made_at_once_for_all_that_waits(self, make_rig: MakeRig) -> None:
        """Pages are free once a write of the journal has ended: of one for each put, puts would wait for each other."""
        rig = make_rig(size="1MiB")
        self.fill(rig, 31, 1)
        waiting = [rig.begin_put(name_of(100 + number), *SIZES) for number in range(8)]
        assert rig.tier.status().evictions == 8
        assert all(rig.end(ticket).outcome is DONE for ticket, _ in waiting)
        assert rig.tier.status().evictions == 8

    def test_an_object_larger_than_the_tier_is_refused(self, make_rig: MakeRig) -> None:
        rig = make_rig(size="1MiB", l1=SmallL1(1024, fragmented=False))
        assert rig.put(name_of(1), 256 * PAGE) is TierOutcome.FULL
        assert rig.put(name_of(2), 200 * PAGE) is DONE
        assert rig.tier.status().full == 1

    def test_pages_that_are_being_read_are_not_written(self, make_rig: MakeRig) -> None:
        disk = FaultyDisk()
        rig = make_rig(size="1MiB", disk=disk, l1=SmallL1(1024))
        assert rig.put(name_of(1), 200 * PAGE) is DONE
        disk.file.hang(True)
        memory = rig.l1.memory(200 * PAGE)
        get = rig.tier.get(name_of(1), memory, 0)
        rig.until(lambda: disk.file.hanging == 1)
        put, _ = rig.begin_put(name_of(2), 200 * PAGE)  # evicts the object that is read
        assert rig.holds(1) == []
        for _ in range(5):
            rig.turn()
        assert disk.file.hanging == 1, "the put has begun"
        disk.file.hang(False)
        assert rig.end(get).outcome is DONE
        assert rig.l1.read(memory) == rig.content(name_of(1), 200 * PAGE)
        assert rig.end(put).outcome is DONE
        assert rig.get(name_of(2), 200 * PAGE) is DONE


class TestClear:
    def test_what_was_cleared_is_not_found_now_nor_later(self, make_rig: MakeRig) -> None:
        rig = make_rig()
        for number in range(10):
            rig.put(name_of(number), *SIZES)
        rig.put(name_of(1, namespace=OTHER), *SIZES)
        ticket = rig.tier.clear(NAMESPACE)
        assert rig.holds(*range(10)) == []
        assert rig.end(ticket).outcome is DONE
        rig.until(lambda: data_pages(rig) == 8)
        assert rig.put(name_of(3), *SIZES, version=1) is DONE
        rig.close()
        rig = make_rig()
        assert rig.holds(*range(10)) == [3]
        assert rig.get(name_of(3), *SIZES, version=1) is DONE
        assert rig.get(name_of(1, namespace=OTHER), *SIZES) is DONE

    def test_a_prefix_clears_the_variants_of_a_namespace(self, make_rig: MakeRig) -> None:
        rig = make_rig()
        lora, epoch = NAMESPACE + b"e" * 32 + b"l" * 32, NAMESPACE + b"e" * 32
        for namespace in (NAMESPACE, epoch, lora):
            rig.put(name_of(1, namespace=namespace), *SIZES)
        assert rig.clear(epoch) is DONE
        assert [rig.holds(1, namespace=each) for each in (NAMESPACE, epoch, lora)] == [[1], [], []]
        assert rig.clear(b"") is DONE
        assert rig.holds(1) == []

    @pytest.mark.parametrize("reading", [True, False])
    def test_what_began_before_the_clear_is_cancelled(self, make_rig: MakeRig, reading: bool) -> None:
        disk = FaultyDisk()
        rig = make_rig(disk=disk)
        rig.put(name_of(1), *SIZES)
        disk.file.hang(True)
        ticket = rig.tier.get(name_of(1), rig.l1.memory(*SIZES), 0) if reading else rig.begin_put(name_of(2), *SIZES)[0]
        rig.until(lambda: disk.file.hanging == 1)
        assert rig.clear(NAMESPACE) is DONE
        disk.file.hang(False)
        assert rig.end(ticket).outcome is TierOutcome.CANCELLED
        assert rig.holds(1, 2) == []
        rig.until(lambda: data_pages(rig) == 0)

    def test_a_clear_before_the_tier_is_ready_counts(self, make_rig: MakeRig, tmp_path: Path) -> None:
        rig = make_rig()
        rig.put(name_of(1), *SIZES)
        rig.close()
        rig = FileRig(tmp_path / "tier")
        assert rig.tier.state == "opening"
        assert rig.clear(b"") is DONE
        assert rig.holds(1) == []
        rig.close()
        assert make_rig().holds(1) == []

    def test_many_prefixes_are_cleared_one_by_one(self, make_rig: MakeRig, tmp_path: Path) -> None:
        rig = make_rig()
        rig.put(name_of(1), *SIZES)
        for number in range(5000):
            last = rig.tier.clear(number.to_bytes(32, "big"))
        assert rig.end(last).outcome is DONE
        assert (tmp_path / "tier/generations").stat().st_size < 1 << 18
        rig.close()
        rig = make_rig()
        rig.put(name_of(2), *SIZES)
        assert rig.get(name_of(2), *SIZES) is DONE


class TestTickets:
    def test_a_waiting_ticket_ends_at_its_cancel(self, make_rig: MakeRig) -> None:
        disk = FaultyDisk()
        rig = make_rig(disk=disk)
        rig.put(name_of(1), *SIZES)
        disk.file.hang(True)
        gets = [rig.tier.get(name_of(1), rig.l1.memory(*SIZES), 0) for _ in range(8)]
        rig.until(lambda: disk.file.hanging == 4)
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
        soon = time.monotonic_ns() + 50_000_000
        gets = [rig.tier.get(name_of(1), rig.l1.memory(*SIZES), soon) for _ in range(6)]
        rig.until(lambda: time.monotonic_ns() > soon + 50_000_000)
        rig.tier.tick(time.monotonic_ns())
        assert [rig.end(ticket).outcome for ticket in gets[4:]] == [TierOutcome.TIMEOUT] * 2, (
            "those that wait end in time"
        )
        assert not any(map(rig.ended, gets[:4]))
        disk.file.hang(False)
        assert {rig.end(ticket).outcome for ticket in gets} == {TierOutcome.TIMEOUT}
        assert rig.get(name_of(1), *SIZES) is DONE, "a slow disk is no reason to drop it"

    def test_gets_go_before_puts(self, make_rig: MakeRig) -> None:
        disk = FaultyDisk()
        rig = make_rig(disk=disk)
        rig.put(name_of(0), *SIZES)
        disk.file.hang(True)
        puts = [rig.begin_put(name_of(number), *SIZES)[0] for number in range(1, 9)]
        rig.until(lambda: disk.file.hanging == 3)  # a thread is kept for gets
        reads = disk.file.reads.calls
        get = rig.tier.get(name_of(0), rig.l1.memory(*SIZES), 0)
        rig.until(lambda: disk.file.hanging == 4)
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


def test_the_threads_of_a_tier_give_way_to_all_others(make_rig: MakeRig) -> None:
    """Else L1's copies wait for them: a store took 1.35 of its time while a fill ran."""
    before = threads_of_nice(19)
    rig = make_rig()
    rig.until(lambda: len(threads_of_nice(19) - before) == THREADS)


class TestFolders:
    def refusal(self, folder: Path, size: str = "1MiB") -> str:
        with pytest.raises(ConfigError) as refused:
            make_tier(tier_url(folder, size), HostRegion(1 << 20), PAGE)
        return str(refused.value)

    def test_a_second_daemon_on_the_folder_is_refused(self, make_rig: MakeRig, tmp_path: Path) -> None:
        rig = make_rig()
        assert self.refusal(tmp_path / "tier") == f"--l2 file://{tmp_path}/tier: another daemon uses it"
        rig.close()
        make_rig()

    def test_a_folder_that_others_may_write_to_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "open").mkdir()
        (tmp_path / "open").chmod(0o777)
        assert "other users may write" in self.refusal(tmp_path / "open")

    def test_links_are_not_followed(self, tmp_path: Path) -> None:
        (tmp_path / "there").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "there")
        self.refusal(tmp_path / "link")
        (tmp_path / "tier").mkdir(0o700)
        (tmp_path / "target").write_bytes(b"precious")
        (tmp_path / "tier/data").symlink_to(tmp_path / "target")
        self.refusal(tmp_path / "tier")
        assert (tmp_path / "target").read_bytes() == b"precious"

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder of another user")
    def test_foreign_folders_and_files_are_refused(self, make_rig: MakeRig, tmp_path: Path) -> None:
        make_rig().close()
        os.chown(tmp_path / "tier/data", 4321, 4321)
        assert "not a regular file of this user" in self.refusal(tmp_path / "tier") or "permitted" in self.refusal(
            tmp_path / "tier"
        )
        os.chown(tmp_path / "tier", 4321, 4321)
        assert "belongs to uid 4321" in self.refusal(tmp_path / "tier")

    def test_a_folder_without_a_parent_is_refused(self, tmp_path: Path) -> None:
        assert "cannot be made" in self.refusal(tmp_path / "absent/tier")

    def test_space_that_is_not_there_is_refused_at_the_start(self, tmp_path: Path) -> None:
        disk = os.statvfs(tmp_path)
        before = disk.f_bavail
        refusal = self.refusal(tmp_path / "tier", f"{(disk.f_bavail * disk.f_frsize >> 30) + 64}GiB")
        assert "could not be had: No space left on device" in refusal
        assert "?size=" in refusal
        assert (tmp_path / "tier/data").stat().st_blocks == 0
        assert os.statvfs(tmp_path).f_bavail > before * 0.8, "a refused tier leaves no full disk behind"

    def test_a_refused_allocation_leaves_no_space_behind(self, make_rig: MakeRig, tmp_path: Path) -> None:
        class HalfFull(FaultyDisk):
            def allocate(self, fd: int, size: int) -> None:
                super().allocate(fd, size // 2)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        make_rig(size="1MiB").close()
        with pytest.raises(ConfigError, match="could not be had"):
            make_rig(size="8MiB", disk=HalfFull())
        assert (tmp_path / "tier/data").stat().st_size == 1 << 20
