"""The file tier after its process was killed or its machine lost power: right bytes or a miss."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from support.file_tiers import COVERAGE, NAMESPACE, PAGE, FaultyDisk, FileRig, SmallL1, keys_of, name_of

from kvserver.l2 import TierOutcome
from kvserver.l2.files.tier import THREADS
from kvserver.protocol import ConfigError
from unit.l2.file_writer import NUMBERS, sizes_of

WRITER = Path(__file__).with_name("file_writer.py")


def written_and_killed(folder: Path, seed: int, size: str, dice: random.Random) -> int:
    """Let the writer run for a while and kill it; the version of the last clear that was done."""
    with subprocess.Popen(
        [sys.executable, str(WRITER), str(folder), str(seed), size], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        time.sleep(dice.uniform(0.02, 0.5))
        child.kill()
        lines = child.stdout.read().split("\n")
    return max([0, *[int(line.split()[1]) for line in lines[:-1] if line.startswith("cleared ")]])


@pytest.mark.parametrize("size", ["1MiB", "8MiB"])  # with evictions, and without
def test_a_killed_daemons_records_are_right_or_missing(tmp_path: Path, size: str) -> None:
    dice = random.Random(size)
    found = 0
    for seed in range(1, 7):
        cleared = written_and_killed(tmp_path / "tier", seed, size, dice)
        rig = FileRig(tmp_path / "tier", size, l1=SmallL1(2048)).opened()
        assert rig.tier.state == "ready"
        there = rig.holds(*range(NUMBERS))
        for number in there:
            version = rig.version_in(name_of(number), *sizes_of(number))
            assert version is not None
            assert version // 1_000_000 == seed, "what the run before had was cleared"
            assert version > cleared, "what began before a clear that has ended does not come back"
            found += 1
        assert rig.tier.status().corrupt == 0, "a killed process leaves whole records"
        assert rig.clear() is TierOutcome.DONE  # so that each run's versions are its own
        rig.close()
    assert found > 20


@pytest.mark.parametrize("losses", [25, pytest.param(250, marks=pytest.mark.long)])
def test_a_machine_that_lost_power_gives_no_wrong_bytes(tmp_path: Path, losses: int) -> None:
    """Of the 4 KiB pages written since a sync, each may be old or new, in the data and in the journal."""
    dice = random.Random(losses)
    outcomes = Counter[str]()
    for turn in range(losses):
        before, after = tmp_path / f"before{turn}", tmp_path / f"tier{turn}"
        rig = FileRig(after, "1MiB", l1=SmallL1(2048)).opened()
        for number in range(20):
            rig.put(name_of(number), *sizes_of(number), version=0)
        rig.written()
        shutil.copytree(after, before)
        for step in range(30):
            put_neighbours(rig, dice, step)
        rig.written()
        shutil.copytree(after, crashed := tmp_path / f"crashed{turn}")
        rig.close()
        for name in ("data", "journal"):
            lose_pages(before / name, crashed / name, dice)
        rig = FileRig(crashed, "1MiB", l1=SmallL1(2048)).opened()
        assert rig.tier.state == "ready"
        for number in rig.holds(*range(NUMBERS)):
            outcomes["missing" if rig.version_in(name_of(number), *sizes_of(number)) is None else "right"] += 1
        assert rig.tier.state == "ready", "a loss of power closes no tier"
        for number in range(NUMBERS):
            assert rig.put(name_of(number), *sizes_of(number), version=1000) in (TierOutcome.DONE, TierOutcome.FULL)
        for number in rig.holds(*range(NUMBERS)):
            assert rig.version_in(name_of(number), *sizes_of(number)) is not None
        rig.close()
        for folder in (before, after, crashed):
            shutil.rmtree(folder)
    assert outcomes["right"] > 2 * losses
    assert outcomes["missing"] > 2 * losses, "the losses were none"


@pytest.mark.parametrize("flips", [40, pytest.param(1000, marks=pytest.mark.long)])
def test_a_flipped_bit_of_a_file_is_a_counted_miss_at_most(tmp_path: Path, flips: int) -> None:
    """Of one that was closed, then of one that is in use: of its data only, for nothing else is read then."""
    dice = random.Random(flips)
    outcomes = Counter[str]()
    rig = FileRig(tmp_path / "tier", "1MiB", l1=SmallL1(2048)).opened()
    assert rig.clear(NAMESPACE) is TierOutcome.DONE
    for number in range(20):
        assert rig.put(name_of(number), *sizes_of(number), version=number) is TierOutcome.DONE
    rig.written().close()
    used_bytes = rig.tier.status().used_bytes
    for flip in range(flips):
        name = dice.choice(("data", "data", "journal", "generations"))
        shutil.copytree(tmp_path / "tier", folder := tmp_path / f"flipped{flip}")
        size = used_bytes if name == "data" else (folder / name).stat().st_size
        in_use = name == "data" and dice.random() < 0.5
        if not in_use:
            flip_bit(folder / name, dice.randrange(size), dice.randrange(8))
        try:
            rig = FileRig(folder, "1MiB", l1=SmallL1(2048)).opened()
        except ConfigError as error:
            outcomes[f"{name}: refused"] += "has format" in str(error)
            continue
        if in_use:
            flip_bit(folder / name, dice.randrange(size), dice.randrange(8))
        there = rig.holds(*range(20))
        read = [rig.version_in(name_of(number), *sizes_of(number)) for number in there]
        assert all(version in (None, number) for number, version in zip(there, read, strict=True))
        corrupt = rig.tier.status().corrupt
        assert corrupt == read.count(None) <= 1
        assert name == "data" or not corrupt, "what is in the index is in the journal as it was"
        outcomes[f"{name}: {'corrupt' if corrupt else 'fewer' if len(there) < 20 else 'all there'}"] += 1
        rig.close()
        shutil.rmtree(folder)
    print(dict(outcomes))
    assert sum(outcomes.values()) == flips
    assert outcomes["data: corrupt"] > flips // 5
    assert outcomes["journal: fewer"] > flips // 20
    assert outcomes["generations: all there"] > flips // 20, "there is a copy"


def put_neighbours(rig: FileRig, dice: random.Random, version: int) -> None:
    """One to three of a chain anew, in one turn."""
    first = dice.randrange(0, NUMBERS, 5) + dice.randrange(3)
    numbers = range(first, first + dice.randint(1, 3))
    rig.tier.drop(NAMESPACE, 0, keys_of(*numbers))
    begun = [
        rig.begin_put(name_of(each), *sizes_of(each), parent=keys_of(each - 1) if each else b"", version=version)
        for each in numbers
    ]
    for ticket, memory in begun:
        rig.end(ticket)
        rig.l1.free(memory)


def flip_bit(path: Path, at: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def lose_pages(before: Path, after: Path, dice: random.Random) -> None:
    """Each page that differs is that of `before` with one chance in three; a page that was not there is zeros."""
    old, new = before.read_bytes(), bytearray(after.read_bytes())
    old = old.ljust(len(new), b"\0")
    for at in range(0, len(new), PAGE):
        if new[at : at + PAGE] != old[at : at + PAGE] and dice.random() < 1 / 3:
            new[at : at + PAGE] = old[at : at + PAGE]
    after.write_bytes(new)


@pytest.mark.parametrize("durable", [True, False])
def test_nothing_of_a_clear_comes_back_after_a_crash_while_writing(tmp_path: Path, durable: bool) -> None:
    """The crash is a copy of the files at that moment. A clear that has not ended may be lost, then all is there."""
    disk = FaultyDisk()
    rig = FileRig(tmp_path / "tier", disk=disk, l1=SmallL1(2048)).opened()
    for number in range(20):
        rig.put(name_of(number), *sizes_of(number))
    rig.written()
    disk.file.hang(True)
    begun = [rig.begin_put(name_of(number), *sizes_of(number))[0] for number in range(20, 30)]
    rig.until(lambda: disk.file.hanging == THREADS)
    if durable:
        assert rig.clear(NAMESPACE) is TierOutcome.DONE
    disk.file.hang(False)
    for ticket in begun:
        assert (rig.end(ticket).outcome is TierOutcome.DONE) == (not durable)
    if durable:
        rig.put(name_of(40), 1)
        rig.put(name_of(3), 7, version=9)
    rig.written()
    shutil.copytree(tmp_path / "tier", tmp_path / "crashed")
    rig.close()
    rig = FileRig(tmp_path / "crashed", l1=SmallL1(2048)).opened()
    assert rig.holds(*range(50)) == ([3, 40] if durable else list(range(30)))
    if durable:
        assert rig.get(name_of(3), 7, version=9) is TierOutcome.DONE
    rig.close()


def test_a_clear_that_a_crash_cut_off_does_not_bring_back_what_a_later_clear_removed(tmp_path: Path) -> None:
    """The first clear's generation was never durable; a record of it is in the journal. It must not match the second's."""
    rig = FileRig(tmp_path / "tier").opened()
    rig.put(name_of(1), 5000)
    old = (tmp_path / "tier/generations").read_bytes()
    assert rig.clear(NAMESPACE) is TierOutcome.DONE
    rig.put(name_of(2), 5000)
    rig.close()
    for name in ("generations", "generations.copy"):
        (tmp_path / "tier" / name).write_bytes(old)  # as if the crash was before it was replaced
    rig = FileRig(tmp_path / "tier").opened()
    assert rig.holds(1, 2) == [1]
    assert rig.clear(NAMESPACE) is TierOutcome.DONE
    rig.close()
    rig = FileRig(tmp_path / "tier").opened()
    assert rig.holds(1, 2) == []
    assert rig.tier.get(name_of(1), rig.l1.memory(5000, coverage=COVERAGE), 0)
    rig.close()
