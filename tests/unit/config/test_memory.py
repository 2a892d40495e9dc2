"""How much L1 a machine or a cgroup can hold, read from files made up here."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvserver.config import available_memory
from kvserver.config.capacity import choose_l1_bytes
from kvserver.protocol import ConfigError

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30


class Machine:
    """A root folder with /proc and cgroup v2 files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "proc/self").mkdir(parents=True)
        self.memory(8 * GiB)

    def memory(self, available: int) -> None:
        text = f"MemTotal: {16 * GiB // KiB} kB\nMemAvailable: {available // KiB} kB\nHugePages_Total: 0\n"
        (self.root / "proc/meminfo").write_text(text)

    def cgroup(self, path: str, maximum: str, current: int) -> Path:
        """Limits of one folder, and this process in it."""
        (self.root / "proc/self/cgroup").write_text(f"0::/{path}\n")
        folder = self.root / "sys/fs/cgroup" / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{maximum}\n")
        (folder / "memory.current").write_text(f"{current}\n")
        return folder


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_a_cgroup_the_machine_sets_the_bound(machine: Machine) -> None:
    assert available_memory(machine.root) == (8 * GiB, "MemAvailable of the machine")


def test_a_cgroup_without_a_limit_sets_no_bound(machine: Machine) -> None:
    machine.cgroup("a", "max", 5 * GiB)
    assert available_memory(machine.root)[0] == 8 * GiB


def test_a_tighter_cgroup_sets_the_bound_and_is_named(machine: Machine) -> None:
    folder = machine.cgroup("system.slice/kv.service", str(4 * GiB), GiB)
    free, source = available_memory(machine.root)
    assert free == 3 * GiB
    assert str(folder) in source


def test_a_cgroup_above_ours_may_be_the_tightest(machine: Machine) -> None:
    machine.cgroup("outer", str(2 * GiB), GiB)
    machine.cgroup("outer/inner", str(4 * GiB), 0)
    assert available_memory(machine.root)[0] == GiB


def test_a_container_sees_its_limit_at_the_root_of_the_cgroups(machine: Machine) -> None:
    machine.cgroup("", str(2 * GiB), GiB // 2)
    assert available_memory(machine.root)[0] == 3 * GiB // 2


def test_a_cgroup_wider_than_the_machine_sets_no_bound(machine: Machine) -> None:
    machine.cgroup("a", str(64 * GiB), 0)
    assert available_memory(machine.root)[0] == 8 * GiB


def test_the_folders_of_cgroup_v1_are_passed_over(machine: Machine) -> None:
    (machine.root / "proc/self/cgroup").write_text("4:memory:/docker/abc\n1:name=systemd:/\n")
    assert available_memory(machine.root)[0] == 8 * GiB


def test_a_limit_that_cannot_be_read_is_passed_over(machine: Machine) -> None:
    folder = machine.cgroup("a", "nonsense", 0)
    assert available_memory(machine.root)[0] == 8 * GiB
    (folder / "memory.current").unlink()
    assert available_memory(machine.root)[0] == 8 * GiB


def test_auto_uses_a_quarter_of_what_is_free(machine: Machine) -> None:
    assert choose_l1_bytes("auto", machine.root) == 2 * GiB
    machine.cgroup("a", str(4 * GiB), 0)
    assert choose_l1_bytes("auto", machine.root) == GiB


def test_a_size_that_fits_is_taken_as_it_is(machine: Machine) -> None:
    assert choose_l1_bytes("7GiB", machine.root) == 7 * GiB


@pytest.mark.parametrize("size", ["8GiB", "9GiB", "1000TiB", "9" * 400])
def test_a_size_that_does_not_fit_is_refused_with_the_numbers(machine: Machine, size: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_l1_bytes(size, machine.root)
    assert f"--l1-size {size}" in str(caught.value)
    assert str(8 * GiB) in str(caught.value)
    assert "MemAvailable" in str(caught.value)


def test_a_full_cgroup_is_refused_with_its_name(machine: Machine) -> None:
    machine.cgroup("kv.service", str(GiB), GiB // 2)
    with pytest.raises(ConfigError, match=r"memory\.max of the cgroup .*kv\.service"):
        choose_l1_bytes("512MiB", machine.root)


def test_auto_on_a_machine_without_memory_is_refused(machine: Machine) -> None:
    machine.memory(60 * MiB)
    with pytest.raises(ConfigError, match="--l1-size"):
        choose_l1_bytes("auto", machine.root)
