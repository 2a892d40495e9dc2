"""Verdicts of `kvserver bench`: ratios to ceilings, and what else happened on the machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvserver.bench.verdicts import MachineWatch, at_least, at_most
from kvserver.cli.bench import line

TICKS = os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(("value", "ceiling", "normal"), [(6.0, 10.0, True), (5.9, 10.0, False), (59.0, 10.0, True)])
def test_a_rate_is_judged_by_its_ratio_to_the_ceiling_not_by_itself(value: float, ceiling: float, normal: bool) -> None:
    found = at_least("copies", "store", value, "GB/s", "memcpy", ceiling, 0.6)
    assert found.normal is normal
    assert ("NOT NORMAL" in line(found)) is not normal


@pytest.mark.parametrize(("value", "normal"), [(0.5, True), (0.51, False)])
def test_a_time_is_judged_by_its_ratio_to_the_echo(value: float, normal: bool) -> None:
    assert at_most("lookup", "1k", value, "ms", "an echo", 0.1, 5.0).normal is normal


class Root:
    """A made-up /proc and /sys."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seconds(0, 0, 0)
        self.write("sys/fs/cgroup/cpu.stat", "usage_usec 1\nnr_throttled 3\n")
        self.write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")

    def write(self, path: str, text: str) -> None:
        (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / path).write_text(text)

    def seconds(self, user: int, idle: int, stolen: int) -> None:
        self.write("proc/stat", f"cpu  {user * TICKS} 0 0 {idle * TICKS} 0 0 0 {stolen * TICKS} 0 0\ncpu0 1 2 3\n")


def test_reasons_name_what_else_used_the_machine(tmp_path: Path) -> None:
    root = Root(tmp_path)
    watch = MachineWatch(tmp_path)
    root.seconds(2000, 7000, 1000)
    root.write("sys/fs/cgroup/cpu.stat", "nr_throttled 4\n")
    root.write("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n")
    others, stolen, throttled, pages = watch.reasons()
    assert others == "other processes used 20% of this machine's processors meanwhile"
    assert "10% of the processors' time" in stolen
    assert "cpu.max" in throttled
    assert "huge pages are off" in pages


def test_without_a_cause_that_is_stated(tmp_path: Path) -> None:
    root = Root(tmp_path)
    watch = MachineWatch(tmp_path)
    root.seconds(10, 990, 0)
    assert watch.reasons() == ["no cause was found: run it again while the machine is idle, then kvserver doctor"]
    assert MachineWatch(tmp_path / "nothing").reasons(), "a system without /proc"
