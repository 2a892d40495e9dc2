"""What `kvserver doctor` reports of GPUs, on machines made up of files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvserver.cli import checks_gpu, doctor
from kvserver.cli.checks import Finding, Level, Machine
from kvserver.config import Settings
from kvserver.config.settings import GiB, MiB

FIRST = "GPU-9221d5d1-b60b-a624-bf14-0a1819cfda3b"
SECOND = "GPU-00000000-0000-0000-0000-000000000002"
OPEN_DRIVER = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder)\nGCC version: 13\n"
)
OLD_DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Tue Mar  5 22:23:56 UTC 2024\n"
INFORMATION = """Model: \t\t NVIDIA H100 80GB HBM3
IRQ:   \t\t 10
GPU UUID: \t {}
Video BIOS: \t 96.00.99.00.01
Bus Type: \t PCIe
Bus Location: \t {}
Device Minor: \t {}
GPU Excluded:\t No
"""


def native(built: bool = True, memory: tuple[int, ...] = (), **values: int) -> Callable[[str], object]:
    """The native module of a build that sees GPUs with so much memory."""
    gpus = [("GPU-0", "a GPU", "0000:01:00.0", size) for size in memory]
    module = SimpleNamespace(built_with_cuda=lambda: built, cuda_gpus=lambda: gpus, **values)
    return lambda name: module


class World:
    """A machine of which only what a test writes is there."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def machine(self, load: Callable[[str], object] | None = None, access: Any = None, **settings: Any) -> Machine:
        may_access = access or (lambda path, mode: True)
        return Machine(Settings(**settings), self.root, {}, uid=1000, load=load or native(), access=may_access)

    def write(self, path: str, text: object = "") -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(f"{text}\n")

    def driver(self, version: str = "580.95.05", text: str = OPEN_DRIVER) -> None:
        self.write("proc/driver/nvidia/version", text.format(version))

    def gpu(self, uuid: str, bus: str, minor: int) -> None:
        self.write(f"proc/driver/nvidia/gpus/{bus}/information", INFORMATION.format(uuid, bus, minor))
        for name in ("nvidiactl", "nvidia-uvm", f"nvidia{minor}"):
            self.write(f"dev/{name}")

    def namespaces(self, pid: int = 4026531836, user: int = 4026531837) -> None:
        folder = self.root / "proc/self/ns"
        folder.mkdir(parents=True)
        (folder / "pid").symlink_to(f"pid:[{pid}]")
        (folder / "user").symlink_to(f"user:[{user}]")


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def gpus(world: World) -> World:
    """A machine with two GPUs that is well."""
    world.driver()
    world.gpu(FIRST, "0000:1a:00.0", 0)
    world.gpu(SECOND, "0000:62:00.0", 5)
    world.namespaces()
    return world


def check_finding(finding: Finding, level: Level, *words: str) -> None:
    assert finding.level is level, finding
    assert [word for word in words if word not in f"{finding.text} -> {finding.fix}"] == [], finding
    assert bool(finding.fix) == (level is not Level.OK), finding


GPU_CHECKS = {name: check for name, check in doctor.CHECKS.items() if check.__module__ == checks_gpu.__name__}


@pytest.mark.parametrize("name", GPU_CHECKS)
def test_a_machine_without_a_gpu_is_well(world: World, name: str) -> None:
    assert len(GPU_CHECKS) == 4
    check_finding(GPU_CHECKS[name](world.machine(native(built=False))), Level.OK)


@pytest.mark.parametrize("name", GPU_CHECKS)
def test_a_machine_whose_gpus_can_be_used_is_well(gpus: World, name: str) -> None:
    check_finding(GPU_CHECKS[name](gpus.machine()), Level.OK)


@pytest.mark.parametrize("name", GPU_CHECKS)
def test_a_native_module_that_does_not_load_stops_no_other_check(gpus: World, name: str) -> None:
    def load(name: str) -> object:
        raise ImportError(name)

    GPU_CHECKS[name](gpus.machine(load))


# ---- the driver and the build -------------------------------------------------------------------


def test_no_driver_is_no_fault_unless_gpus_were_named(world: World) -> None:
    assert checks_gpu.driver(world.machine()) == Finding(Level.OK, "no GPU driver: CPU memory only")
    check_finding(checks_gpu.driver(world.machine(gpus=FIRST)), Level.PROBLEM, FIRST, "--gpus none")


@pytest.mark.parametrize("text", [OPEN_DRIVER, OLD_DRIVER], ids=["open", "closed"])
def test_a_driver_must_be_new_enough_for_cuda_13(world: World, text: str) -> None:
    world.driver("580.65.06", text)
    check_finding(checks_gpu.driver(world.machine()), Level.OK, "NVIDIA driver 580.65.06")
    world.driver("575.57.08", text)
    check_finding(checks_gpu.driver(world.machine()), Level.PROBLEM, "575.57.08 is too old", "driver 580 or later")
    check_finding(checks_gpu.driver(world.machine(gpus="none")), Level.OK, "575.57.08", "--gpus none")


def test_a_driver_of_unknown_version_is_not_called_old(world: World) -> None:
    world.write("dev/dxg")
    check_finding(checks_gpu.driver(world.machine()), Level.OK, "a GPU driver")


@pytest.mark.parametrize("load", [native(built=False), lambda name: SimpleNamespace()], ids=["states so", "is older"])
def test_a_build_without_cuda_beside_a_gpu_is_reported_with_what_it_cannot_do(
    world: World, load: Callable[[str], object]
) -> None:
    world.driver()
    check_finding(checks_gpu.driver(world.machine(load)), Level.WARNING, "has no CUDA", "without cache", "nvcc")
    check_finding(checks_gpu.driver(world.machine(load, gpus=FIRST)), Level.PROBLEM, "has no CUDA")


# ---- devices ------------------------------------------------------------------------------------


def test_every_gpu_is_shown_with_model_uuid_bus_and_node(gpus: World) -> None:
    gpus.write("sys/bus/pci/devices/0000:62:00.0/numa_node", 1)
    found = checks_gpu.devices(gpus.machine())
    assert found.text == (
        f"NVIDIA H100 80GB HBM3 {FIRST} at 0000:1a:00.0, next to no memory node; "
        f"NVIDIA H100 80GB HBM3 {SECOND} at 0000:62:00.0, next to memory node 1"
    )


def test_a_container_without_gpus_is_reported_with_the_option_that_adds_them(world: World) -> None:
    world.driver()
    check_finding(checks_gpu.devices(world.machine()), Level.WARNING, "shows no GPU", "--gpus all", "nvidia.com/gpu")


def test_a_named_gpu_that_is_not_there_is_a_problem(gpus: World) -> None:
    check_finding(checks_gpu.devices(gpus.machine(gpus=f"{FIRST},{SECOND}")), Level.OK)
    other = "GPU-00000000-0000-0000-0000-00000000000f"
    check_finding(
        checks_gpu.devices(gpus.machine(gpus=f"{FIRST},{other}")),
        Level.PROBLEM,
        f"{other} of --gpus",
        SECOND,
        "nvidia-smi -L",
    )


def test_a_gpu_before_its_first_use_has_no_uuid_and_is_not_called_missing(world: World) -> None:
    world.driver()
    world.gpu("GPU-????????-????-????-????-????????????", "0000:1a:00.0", 0)
    check_finding(checks_gpu.devices(world.machine(gpus=FIRST)), Level.OK, "GPU-????????")


@pytest.mark.parametrize("name", ["nvidiactl", "nvidia-uvm", "nvidia0", "nvidia5"])
def test_a_device_file_that_is_missing_is_a_problem(gpus: World, name: str) -> None:
    (gpus.root / "dev" / name).unlink()
    found = checks_gpu.devices(gpus.machine())
    check_finding(found, Level.PROBLEM, f"/dev/{name} is not there", "docker: --gpus all")
    assert ("nvidia-modprobe" in found.fix) == (name == "nvidia-uvm")


def test_a_device_file_that_the_user_may_not_open_is_a_problem(gpus: World) -> None:
    closed = gpus.machine(access=lambda path, mode: path.name != "nvidia5")
    check_finding(
        checks_gpu.devices(closed),
        Level.PROBLEM,
        "/dev/nvidia5 may not be read and written by user 1000",
        "--group-add",
    )


# ---- memory -------------------------------------------------------------------------------------


def test_the_daemons_use_of_gpu_memory_is_reported(gpus: World) -> None:
    check_finding(checks_gpu.gpu_memory(gpus.machine()), Level.OK, "about 576 MiB", "by estimate", "not known")
    found = checks_gpu.gpu_memory(gpus.machine(native(memory=(80 * GiB,))))
    check_finding(found, Level.OK, "leaves 6.4 GiB of 80.0 GiB")
    check_finding(checks_gpu.gpu_memory(gpus.machine(native(GPU_STAGING_BYTES=512 * MiB))), Level.OK, "about 1.0 GiB")


def test_a_small_gpu_has_no_room_beside_an_engine_with_defaults(gpus: World) -> None:
    found = checks_gpu.gpu_memory(gpus.machine(native(memory=(80 * GiB, 4 * GiB))))
    check_finding(found, Level.WARNING, "leaves 328 MiB of 4.0 GiB", "--gpu-memory-utilization 0.85")


# ---- namespaces ---------------------------------------------------------------------------------


def test_a_pid_namespace_of_its_own_matters_for_engines_on_gpus_only(world: World) -> None:
    world.namespaces(pid=4026532000)
    check_finding(
        checks_gpu.namespaces(world.machine()), Level.OK, "a pid namespace of its own", "engines on CPU need not share"
    )
    world.driver()
    found = checks_gpu.namespaces(world.machine())
    check_finding(found, Level.WARNING, "error 201", "--pid=host", "shareProcessNamespace")
    assert "is pid 1" not in found.text
    world.write("proc/1/cmdline", "/usr/bin/python\0/usr/bin/kvserver\0serve")
    check_finding(checks_gpu.namespaces(world.machine()), Level.WARNING, "the daemon is pid 1 of it")
    check_finding(checks_gpu.namespaces(world.machine(gpus="none")), Level.OK)


def test_the_machines_own_namespaces_are_well(gpus: World) -> None:
    assert "of its own" not in checks_gpu.namespaces(gpus.machine()).text


def test_a_user_namespace_of_its_own_is_reported(world: World) -> None:
    world.namespaces(user=4026532001)
    check_finding(
        checks_gpu.namespaces(world.machine()), Level.OK, "the machine's pid namespace", "a user namespace of its own"
    )


def test_namespaces_that_cannot_be_seen_are_not_guessed(world: World) -> None:
    assert checks_gpu.namespaces(world.machine()) == Finding(Level.OK, "not known")
