"""Other ways to move a request's blocks: `native/gpu_ways.cu`, built when it is first used, by nvcc; for the host by g++.

- by_blocks, by_slots: a kernel with one CTA for each K or V, block and layer, 16-byte streaming accesses, four chunks a
  launch, through one staging buffer; the copy and the kernel one after the other on one stream. The second looks up a slot
  for each token.
- memcpy: no kernel, a cudaMemcpyAsync for each run.
- direct: kvserver's own kernel, over pinned L1 instead of staging.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
from array import array
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "bench/native/gpu_ways.cu"
WAYS = {"by_blocks": 0, "by_slots": 1, "memcpy": 2, "direct": 3}
BY_CHUNKS = {"by_blocks", "by_slots"}  # host memory is [chunk][plane][block][run], else [block][plane][run]
INCLUDES = [f"-I{ROOT / folder}" for folder in ("csrc", "bench/native")]
TARGETS = [
    "-gencode=arch=compute_80,code=sm_80",
    "-gencode=arch=compute_90,code=sm_90",
    "-gencode=arch=compute_100,code=[sm_100,compute_100]",
]


class WayFailed(RuntimeError):
    """A call of CUDA failed, or the way cannot move this layout."""


def find_nvcc() -> str | None:
    beside = sorted(str(nvcc) for nvcc in Path("/usr/local").glob("cuda*/bin/nvcc"))
    return os.environ.get("CUDACXX") or shutil.which("nvcc") or next(iter(beside), None)


def build(folder: Path, on_host: bool) -> Path:
    """The library. Warnings are errors. RuntimeError with the compiler's words if it cannot be built."""
    library = folder / ("libways_host.so" if on_host else "libways.so")
    if on_host:
        compiler = os.environ.get("CXX", "g++")
        flags = ["-std=c++20", "-O2", "-Wall", "-Wextra", "-Wshadow", "-Werror", "-Wno-unknown-pragmas", "-fPIC"]
        command = [compiler, *flags, "-DWAYS_ON_HOST", *INCLUDES, "-shared", "-x", "c++", SOURCE, "-o", library]
    else:
        nvcc = find_nvcc()
        if nvcc is None:
            raise RuntimeError("there is no nvcc: CUDACXX, PATH and /usr/local/cuda* were looked at")
        flags = ["-O3", "-std=c++17", "-Werror=all-warnings", "-Xcompiler=-Wall,-Wextra,-fPIC"]
        command = [nvcc, *flags, *TARGETS, *INCLUDES, "-shared", SOURCE, "-o", library]
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        raise RuntimeError(f"{SOURCE.name} could not be built: {done.stderr[-4000:]}")
    return library


class _Request(ctypes.Structure):
    _fields_ = [
        ("bases", ctypes.c_void_p),
        ("num_planes", ctypes.c_uint64),
        ("run", ctypes.c_uint64),
        ("block_tokens", ctypes.c_uint64),
        ("blocks", ctypes.c_void_p),
        ("num_blocks", ctypes.c_uint64),
        ("chunk_blocks", ctypes.c_uint64),
        ("host", ctypes.c_void_p),
    ]


@functools.cache
def load(library: Path) -> ctypes.CDLL:
    found = ctypes.CDLL(str(library))
    found.ways_open.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    found.ways_run.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32]
    found.ways_close.argtypes = [ctypes.c_void_p]
    found.ways_open.restype = found.ways_run.restype = ctypes.c_char_p
    found.ways_close.restype = None
    return found


class OtherWays:
    """One request. `bases`: where each plane begins; its block b is `run` bytes at b * run. `host`: pinned memory."""

    def __init__(
        self,
        library: Path,
        *,
        bases: Sequence[int],
        run: int,
        block_tokens: int,
        blocks: Sequence[int],
        chunk_blocks: int,
        host: int,
    ) -> None:
        self._library = load(library)
        self._bases, self._blocks = array("Q", bases), array("I", blocks)
        request = _Request(
            self._bases.buffer_info()[0],
            len(bases),
            run,
            block_tokens,
            self._blocks.buffer_info()[0],
            len(blocks),
            chunk_blocks,
            host,
        )
        self._opened = ctypes.c_void_p()
        self._check(self._library.ways_open(ctypes.byref(request), ctypes.byref(self._opened)))

    def run(self, way: str, load: bool) -> None:
        """Returns when the bytes are there."""
        self._check(self._library.ways_run(self._opened, WAYS[way], int(load)))

    def close(self) -> None:
        self._library.ways_close(self._opened)

    @staticmethod
    def _check(failed: bytes | None) -> None:
        if failed is not None:
            raise WayFailed(failed.decode())
