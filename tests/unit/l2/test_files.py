"""The file tier: what it keeps, what it finds again, what it evicts."""

from __future__ import annotations

import select
from pathlib import Path

import pytest
from support.file_tiers import COVERAGE, NAMESPACE, PAGE, FaultyDisk, FileRig, SmallL1, key_of, keys_of, name_of

from kvserver.l2 import TierOutcome
from unit.l2.file_rigs import DONE, MISSING, OTHER, SIZES, MakeRig, data_pages


class TestObjects:
    def test_an_object_of_several_ranks_in_fragments_comes_back_exactly(self, make_rig: MakeRig) -> None:
        rig = make_rig()
        assert rig.put(name_of(1), *SIZES) is DONE
        assert rig.holds(1, 2) == [1]
        assert rig.get(name_of(1), *SIZES) is DONE
        assert rig.get(name_of(2), *SIZES) is MISSING

    @pytest.mark.parametrize("slot_bytes", [(1,), (PAGE,), (PAGE - 1, PAGE + 1), (300 * PAGE + 5,), (5,) * 40])
    def test_objects_of_sizes_around_pages_and_pieces_come_back(
        self, make_rig: MakeRig, slot_bytes: tuple[int, ...]
    ) -> None:
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

    def test_object_that_the_tier_has_is_not_written_again(self, make_rig: MakeRig) -> None:
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
        rig.until(lambda: rig.tier.status().evictions)
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
