"""What `gpu_cuda.cpp` makes of the errors of CUDA, over a made-up CUDA runtime (`cuda_stub.cpp`, which holds the cases).

Needs CUDA's headers, and no GPU. That the cases would see a fault is shown by planting some.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from support.nvcc import find_nvcc

HERE = Path(__file__).parent
CSRC = HERE.parent.parent / "csrc"
STUB = HERE / "cuda_stub.cpp"
CASES = re.findall(r"^ +CASE\((\w+)\)", STUB.read_text(), re.MULTILINE)

# The source's text, its text with the fault, and the case that notices.
FAULTS = {
    "no error is sticky": (
        "cudaEventRecord(probe_event_, stream) == cudaSuccess",
        "(cudaEventRecord(probe_event_, stream), true)",
        "a_sticky_error_loses_the_gpu_with_the_call_that_met_it",
    ),
    "every error is sticky": (
        "cudaEventRecord(probe_event_, stream) == cudaSuccess",
        "(cudaEventRecord(probe_event_, stream), false)",
        "an_odd_error_fails_its_call_and_no_other",
    ),
    "a GPU without a context can be lost": (
        "if (stream == nullptr) return true;",
        "if (stream == nullptr) return false;",
        "a_gpu_in_exclusive_use_is_refused_and_may_be_tried_again",
    ),
    "memory without a range is refused": (
        "if (!alive()) CHECK(result);",
        "CHECK(result);",
        "memory_whose_range_is_not_known_has_no_size",
    ),
    "a stream without an answer is quiet": (
        "if (error != cudaSuccess && alive()) CHECK(error);",
        "if (error != cudaSuccess && !alive()) CHECK(error);",
        "a_stream_is_quiet_if_it_ended_or_its_context_is_dead",
    ),
}


class Stub:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.objects = [self._compile(CSRC / "gpu/gpu.cpp", "gpu"), self._compile(STUB, "stub")]

    def _nvcc(self, *arguments: str | Path) -> None:
        nvcc = find_nvcc()
        if nvcc is None:
            pytest.skip("there is no nvcc, so no headers of CUDA")
        flags = ["-std=c++20", "-cudart", "none", "-Xcompiler", "-Wall,-Wextra,-Werror", f"-I{CSRC}", f"-I{HERE}"]
        done = subprocess.run([nvcc, *flags, *arguments], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr

    def _compile(self, source: Path, name: str) -> Path:
        target = self.folder / f"{name}.o"
        self._nvcc("-c", source, "-o", target)
        return target

    def program(self, source: str, name: str) -> Path:
        text = self.folder / f"{name}.cpp"
        text.write_text(source)
        self._nvcc(*self.objects, self._compile(text, name), "-o", self.folder / name)
        return self.folder / name


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Stub:
    return Stub(tmp_path_factory.mktemp("stub"))


@pytest.fixture(scope="module")
def program(stub: Stub) -> Path:
    return stub.program((CSRC / "gpu/gpu_cuda.cpp").read_text(), "whole")


def run(program: Path, case: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, case], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("case", CASES)
def test_each_cuda_error_has_its_stated_outcome(program: Path, case: str) -> None:
    done = run(program, case)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_how_errors_are_taken_is_noticed(stub: Stub, fault: str) -> None:
    source, (old, new, case) = (CSRC / "gpu/gpu_cuda.cpp").read_text(), FAULTS[fault]
    assert source.count(old) == 1
    assert run(stub.program(source.replace(old, new), f"fault{len(fault)}"), case).returncode != 0
