"""`bench/gpu_all.sh` runs to its end over the simulated GPU, so that it does on the day a GPU is there.

What it measures here means nothing, and its output states that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
SECTIONS = {
    "goal", "transfers", "runs", "ways", "chunks", "daemon", "neighbours", "busy_runs", "busy", "busy_chunks", "pinning"
}  # fmt: skip


def gpu_all(out: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    simulated = {"KVSERVER_SIMULATED_GPU": "1", "KVSERVER_BUILD": "0", "KVSERVER_COMMIT": "0123abc"}
    return subprocess.run(
        ["bash", ROOT / "bench/gpu_all.sh", *arguments],
        env={**os.environ, **simulated, "PYTHON": sys.executable, "OUT": str(out), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_benchmark_writes_every_section_as_json_and_as_a_table_and_states_that_it_was_simulated(
    tmp_path: Path,
) -> None:
    done = gpu_all(tmp_path, "bench", "--", "--rounds", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[0].startswith("SIMULATED: no GPU is used")
    (found,) = tmp_path.glob("*-simulated-bench.json")
    joined: dict[str, Any] = json.loads(found.read_text())
    assert (joined["device"], joined["commit"], joined["simulated"]) == ("simulated", "0123abc", True)
    assert joined["date"][:10] == found.name[:10]
    assert joined.keys() >= SECTIONS
    assert (joined["left_out"], joined["failed"]) == ([], [])
    assert {row["direction"] for row in joined["transfers"]} == {"store", "load", "both"}
    assert all(row[way]["median"] > 0 for row in joined["transfers"] for way in ("ceiling", "dma", "staged", "chosen"))
    assert all(
        row[way]["median"] > 0 for row in joined["ways"] for way in ("by_blocks", "by_slots", "memcpy", "direct")
    )
    assert {(row["work"], row["way"]) for row in joined["busy"]} == {
        (work, way) for work in ("decode", "prefill") for way in ("dma", "staged")
    }
    assert {row["geometry"] for row in joined["goal"]} == {"Llama-8B", "one memcpy", "Llama-70B TP8", "DeepSeek MLA"}
    table = found.with_suffix(".md").read_text()
    assert "**SIMULATED: no GPU was used" in table
    assert table.count("\n## ") == len(SECTIONS)
    assert "only 20 samples" in table
    assert "best kShortStoreBytes, kShortLoadBytes: store" in table


def test_the_tests_run_after_the_smoke_and_their_counts_are_written(tmp_path: Path) -> None:
    done = gpu_all(tmp_path, "bytes", "--", "-k", "cross-layer and pinned")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all bytes arrived" in done.stdout
    (found,) = tmp_path.glob("*-simulated-tests.json")
    counts = json.loads(found.read_text())["tests"]
    assert counts["tests"] > 10
    assert counts["failures"] == counts["errors"] == 0


def test_the_smoke_goes_on_with_memory_that_another_process_made() -> None:
    command = [sys.executable, ROOT / "bench/gpu_smoke.py"]
    environment = {**os.environ, "KVSERVER_SIMULATED_GPU": "1", "KVSERVER_VMM": "child"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "memory made by a child" in done.stdout
    assert "all bytes arrived" in done.stdout
