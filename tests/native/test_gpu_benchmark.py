"""`bench/gpu.py` runs to its end, so that it does on the day a GPU is there. What it measures here means nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_the_gpu_benchmark_runs_over_the_simulated_gpu(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    command = [sys.executable, ROOT / "bench/gpu.py", "--simulated", "--rounds", "1", "--seconds", "1000", "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["simulated"]
    assert {row["direction"] for row in found["transfers"]} == {"store", "load", "both"}
    assert all(row[way]["median"] > 0 for row in found["transfers"] for way in ("ceiling", "dma", "staged", "chosen"))
    assert {"runs", "neighbours", "chunks", "daemon", "pinning"} <= found.keys()
    assert "SIMULATED" in done.stdout
    assert "best kShortStoreBytes, kShortLoadBytes: store" in done.stdout
