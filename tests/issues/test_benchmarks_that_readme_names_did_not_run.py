"""README's row of `bench/l2_peer.py` and that of `bench/walk.py` could not be measured again: the one imported a class that had been removed, and
ended `make bench` with it, the other met the second message of a lookup (`--tails`). `make bench` did not run all that README names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

TOP = Path(__file__).parents[2]
NEEDS_VLLM = ("hook", "groups", "walk", "engine", "l2_engine")


def of_make_bench() -> list[str]:
    recipe = re.search(r"^bench:.*\n((?:\t.*\n)+)", (TOP / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    return [name for names in re.findall(r"for name in ([\w ]+);", recipe[1]) for name in names.split()]


def test_every_benchmark_of_make_bench_can_be_loaded() -> None:
    names = [name for name in of_make_bench() if name not in NEEDS_VLLM]
    assert "l2_peer" in names
    load = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"
    done = subprocess.run(
        [sys.executable, "-c", load, *names], cwd=TOP / "bench", capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
