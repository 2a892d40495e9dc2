"""The environment of processes that run SGLang on CPUs. As a program: compile what SGLang compiles when it is first used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ENVIRONMENT = {
    **os.environ,
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_EXTENSIONS_DIR": str(Path(sys.prefix) / "extensions"),
    "PATH": f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ['PATH']}",
}

if __name__ == "__main__":
    hash_a_page = "from sglang.srt.mem_cache.utils import get_hash_str; get_hash_str([1], None)"
    subprocess.run([sys.executable, "-c", hash_a_page], env=ENVIRONMENT, check=True)
