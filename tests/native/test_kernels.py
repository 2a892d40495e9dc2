"""The kernels' addresses, shown without a GPU: their source, compiled for the host, against a copy by tensor strides.

`kernel_matrix.cpp` holds the cases. That it would see a fault is shown by planting some.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CSRC = HERE.parent.parent / "csrc"
SOURCE = CSRC / "gpu/copy_blocks.cu"
FLAGS = ["-std=c++20", "-g1", "-Wall", "-Wextra", "-Wshadow", f"-I{CSRC}", f"-I{HERE}"]
SANITIZED = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]

# The source's text, and its text with the fault.
FAULTS = {
    "the last item is left out": ("item < total", "item + 1 < total"),
    "warps step over items": ("item += warps", "item += warps + 1"),
    "warps repeat items": ("gridDim.x} * (kThreads / kWarp)", "gridDim.x} * (kThreads / kWarp) - 1"),
    "a small launch has no thread": ("(threads + kThreads - 1) / kThreads", "threads / kThreads"),
    "a hole is copied": (" || block == kNoBlock", ""),
    "a hole ends the warp": ("block == kNoBlock) continue;", "block == kNoBlock) return;"),
    "a piece behind the run is copied": ("offset >= plane.run || ", ""),
    "a piece is the whole rest": ("left < kPieceBytes ? left : kPieceBytes", "left"),
    "a piece does not end with the run": ("left < kPieceBytes ? left : kPieceBytes", "kPieceBytes"),
    "every piece is the first": ("(piece - first_piece(job.planes, index)) * kPieceBytes", "0"),
    "planes have no spare piece": ("slot_offset / kPieceBytes + plane", "slot_offset / kPieceBytes"),
    "the last plane lacks a piece": ("kPieceBytes + job.num_planes", "kPieceBytes + job.num_planes - 1"),
    "a plane's first piece is the plane's before": ("middle) <= piece", "middle) < piece"),
    "the alignment of the source is not asked": (" | reinterpret_cast<uintptr_t>(from)", ""),
    "the alignment of the target is not asked": ("reinterpret_cast<uintptr_t>(to) | ", ""),
    "8 bytes are enough for 16": ("either % sizeof(uint4) == 0", "either % 8 == 0"),
    "4 bytes are enough for 8": ("either % sizeof(uint64_t) == 0", "either % 4 == 0"),
    "2 bytes are enough for 4": ("either % sizeof(uint32_t) == 0", "either % 2 == 0"),
    "lanes copy the same": ("uint32_t first = lane", "uint32_t first = 0"),
    "a lane is one of the block": (
        "copy_piece(l0, packed, bytes, thread % kWarp)",
        "copy_piece(l0, packed, bytes, thread % kThreads)",
    ),
    "the last round is left out": ("first < vectors;", "first + kInFlight * kWarp < vectors;"),
    "rounds overlap": ("first += kInFlight * kWarp", "first += kWarp"),
    "rounds are left out": ("first += kInFlight * kWarp", "first += 2 * kInFlight * kWarp"),
    "loads of a round go too far": ("< vectors) loaded[i]", "<= vectors) loaded[i]"),
    "stores of a round go too far": ("< vectors) __stcs", "<= vectors) __stcs"),
    "stores of a round end early": (
        "if (first + i * kWarp < vectors) __stcs",
        "if (first + i * kWarp + 1 < vectors) __stcs",
    ),
    "loads of a round are one": ("__ldcs(source + first + i * kWarp)", "__ldcs(source + first)"),
    "the odd tail is left out": ("rest < bytes", "false && rest < bytes"),
    "the odd tail is too long": ("rest < bytes", "rest <= bytes"),
    "blocks lie a run apart": ("block * plane.stride", "block * plane.run"),
    "blocks' offsets have 32 bits": ("block * plane.stride", "uint32_t(block * plane.stride)"),
    "positions' offsets have 32 bits": ("position * job.position_bytes", "uint32_t(position * job.position_bytes)"),
    "planes share their place in a slot": ("job.position_bytes + plane.slot_offset", "job.position_bytes"),
    "positions have one block": ("position * job.groups", "position"),
    "every plane is of group 0": ("job.groups + plane.group", "job.groups"),
    "stores load": ("copy_piece(packed, l0,", "copy_piece(l0, packed,"),
}


def compile_object(source: Path, target: Path, *flags: str) -> Path:
    command = [os.environ.get("CXX", "g++"), *FLAGS, *flags, "-c", str(source), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return target


class Matrix:
    """The cases, to be run over any version of the kernels' source."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Only the kernels are instrumented; the end of every memory is known by malloc.
        self.cases = compile_object(HERE / "kernel_matrix.cpp", folder / "matrix.o", "-O2", "-Werror")

    def run(self, kernels: str, name: str) -> subprocess.CompletedProcess[str]:
        source = self.folder / f"{name}.cu"
        source.write_text(kernels)
        flags = ["-O1", "-Wno-unknown-pragmas", f'-DKERNEL_SOURCE="{source}"', *SANITIZED]
        kernels_object = compile_object(HERE / "counted_kernels.cpp", source.with_suffix(".o"), *flags)
        program = source.with_suffix("")
        link = [os.environ.get("CXX", "g++"), *SANITIZED, str(self.cases), str(kernels_object), "-o", str(program)]
        subprocess.run(link, check=True, timeout=300)
        return subprocess.run([program], capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(tmp_path_factory.mktemp("kernels"))


Ends = dict[str, "Future[subprocess.CompletedProcess[str]]"]


@pytest.fixture(scope="module")
def faulty_ends(matrix: Matrix, request: pytest.FixtureRequest) -> Iterator[Ends]:
    """How the cases end for each fault that a selected test asks about, two at a time."""
    source = SOURCE.read_text()
    asked = {item.callspec.params["fault"] for item in request.session.items if "faulty_ends" in item.fixturenames}
    with ThreadPoolExecutor(2) as pool:
        yield {
            fault: pool.submit(matrix.run, source.replace(*FAULTS[fault]), f"fault{number}")
            for number, fault in enumerate(FAULTS)
            if fault in asked
        }


def test_every_byte_of_every_layout_is_copied_exactly_once_and_no_other_is_touched(matrix: Matrix) -> None:
    done = matrix.run(SOURCE.read_text(), "right")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 4000, done.stdout


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, faulty_ends: Ends) -> None:
    right, _ = FAULTS[fault]
    assert SOURCE.read_text().count(right) == 1, (
        f"the source does not have {right!r} once: choose another place for this fault"
    )
    done = faulty_ends[fault].result()
    assert done.returncode != 0, "no case saw it"
    assert done.stderr, "it failed without a word"
