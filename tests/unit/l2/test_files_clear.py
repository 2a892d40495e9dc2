"""A clear of the file tier: nothing of it is found, also not by the next process."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.file_tiers import NAMESPACE, FaultyDisk, FileRig, name_of

from kvserver.l2 import TierOutcome
from unit.l2.file_rigs import DONE, OTHER, SIZES, MakeRig, data_pages


class TestClear:
    def test_cleared_objects_are_found_neither_at_once_nor_after_a_restart(self, make_rig: MakeRig) -> None:
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
    def test_puts_and_gets_begun_before_a_clear_are_cancelled(self, make_rig: MakeRig, reading: bool) -> None:
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
