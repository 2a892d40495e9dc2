"""What the CUDA build makes: kernels for every architecture, no warning, the instructions that were meant.

Needs nvcc and no GPU. The build without nvcc is shown too.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import nanobind
import pytest
from support.nvcc import find_nvcc

import kvserver._native

ROOT = Path(__file__).parent.parent.parent
OBJECT = "CMakeFiles/kvserver_core.dir/csrc/gpu/copy_blocks.cu.o"
KERNELS = 2  # a direction each
ARCHITECTURES = ["sm_80", "sm_90", "sm_100"]


def cmake(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """With the tools beside this Python."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["cmake", *arguments],
        env={**os.environ, "PATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def configure(build: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """As pip does it, but for the options."""
    own = [f"-DPython_EXECUTABLE={sys.executable}", f"-Dnanobind_DIR={nanobind.cmake_dir()}"]
    return cmake("-S", ROOT, "-B", build, "-G", "Ninja", *own, *options, **environment)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The object file of the kernels, and the compiler's output."""
    nvcc = find_nvcc()
    if nvcc is None:
        pytest.skip("there is no nvcc: CUDACXX, PATH and /usr/local/cuda* were looked at")
    folder = tmp_path_factory.mktemp("cuda")
    done = configure(folder, "-DKVSERVER_CUDA=ON", "-DCMAKE_CUDA_FLAGS=-Xptxas=-v", CUDACXX=nvcc)
    assert done.returncode == 0, done.stdout + done.stderr
    done = cmake("--build", folder, "--verbose", "--target", OBJECT)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / OBJECT, done.stdout


def cuobjdump(*arguments: str | Path) -> str:
    """Of PyPI: the toolkit's is often left out of images. It calls nvdisasm, which is installed beside it."""
    tool = Path(str(distribution("nvidia-cuda-cuobjdump").locate_file("nvidia/cu13/bin/cuobjdump")))
    path = f"{tool.parent}:{os.environ['PATH']}"
    command = [tool, *arguments]
    return subprocess.run(
        command, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True, timeout=120
    ).stdout


def test_the_kernels_are_compiled_for_every_architecture_and_as_ptx_for_later_ones(build: tuple[Path, str]) -> None:
    assert sorted(re.findall(r"sm_\d+", cuobjdump("-lelf", build[0]))) == sorted(ARCHITECTURES)
    assert re.findall(r"sm_\d+", cuobjdump("-lptx", build[0])) == ["sm_100"]


def test_warnings_of_the_kernels_are_errors(build: tuple[Path, str]) -> None:
    command = next(line for line in build[1].splitlines() if "copy_blocks.cu" in line and "nvcc" in line)
    assert "-Werror=all-warnings" in command
    assert "-Xcompiler=-Wall,-Wextra" in command


def test_the_kernels_keep_everything_in_registers(build: tuple[Path, str]) -> None:
    compiled = re.findall(r"Compiling entry function '\w*copy_blocks\w*' for '(sm_\d+)'", build[1])
    assert sorted(compiled) == sorted(ARCHITECTURES * KERNELS)
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", build[1])
    assert frames == [("0", "0", "0")] * len(compiled)


def test_vectors_are_moved_by_streaming_instructions_several_at_a_time(build: tuple[Path, str]) -> None:
    kernels = cuobjdump("-sass", "-arch", "sm_90", build[0]).split("Function : ")[1:]
    assert len(kernels) == KERNELS
    for kernel in kernels:
        moves = re.findall(r"\b(?:LDG|STG|LDL|STL|LD|ST)\.[A-Z0-9.]+|\b(?:LDL|STL|LD|ST)\b", kernel)
        vectors = [move for move in moves if move.endswith(".128")]
        assert vectors == ["LDG.E.EF.128"] * 4 + ["STG.E.EF.128"] * 4
        assert not [move for move in moves if not move.startswith(("LDG", "STG"))], "local or generic memory is used"


def test_the_module_links_no_cuda_library() -> None:
    dynamic = subprocess.run(["readelf", "-d", kvserver._native.__file__], capture_output=True, text=True, check=True)
    needed = re.findall(r"NEEDED.*\[(.*)\]", dynamic.stdout)
    assert any(name.startswith("libc.so") for name in needed)
    assert not [name for name in needed if "cuda" in name or "nv" in name]


def test_without_nvcc_cuda_is_left_out_and_a_line_explains_how_to_get_it(tmp_path: Path) -> None:
    done = configure(tmp_path, CUDACXX="/nowhere/nvcc")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "CUDA is left out: no working nvcc was found. To have it, install a CUDA toolkit" in done.stdout
    assert "copy_blocks.cu" not in (tmp_path / "build.ninja").read_text()


def test_without_nvcc_a_build_that_must_have_cuda_fails(tmp_path: Path) -> None:
    done = configure(tmp_path, "-DKVSERVER_CUDA=ON", CUDACXX="/nowhere/nvcc")
    assert done.returncode != 0
    assert "KVSERVER_CUDA is ON, but no working nvcc was found" in done.stderr


def test_a_build_may_leave_cuda_out(tmp_path: Path) -> None:
    done = configure(tmp_path, "-DKVSERVER_CUDA=OFF")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "copy_blocks.cu" not in (tmp_path / "build.ninja").read_text()
