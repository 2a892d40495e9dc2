"""Where CMake finds nvcc (csrc/gpu/cuda.cmake)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def find_nvcc() -> str | None:
    beside = sorted(str(nvcc) for nvcc in Path("/usr/local").glob("cuda*/bin/nvcc"))
    return os.environ.get("CUDACXX") or shutil.which("nvcc") or next(iter(beside), None)
