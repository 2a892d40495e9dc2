"""The file tier opens a folder again: what it finds there, and which folders it refuses."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from support.file_tiers import NAMESPACE, PAGE, FaultyDisk, FileRig, SmallL1, keys_of, name_of, tier_url

from kvserver._native import HostRegion
from kvserver.l2 import TierOutcome, make_tier
from kvserver.protocol import ConfigError
from unit.l2.file_rigs import DONE, SIZES, MakeRig, data_pages


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
            "journal.new": 0o600,
            "lock": 0o600,
            "generations": 0o600,
            "generations.copy": 0o600,
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
