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

import pytest

sys.path.append(str(Path(__file__).parent.parent.parent / "bench"))

from gpu_bytes import WrongBytes
from gpu_rig import LOAD, STORE, Board, Direction, Transfer
from gpu_run import latencies
from gpu_sizes import SIZES, geometries
from support.gpu_memory import real_gpu

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


@pytest.mark.long
def test_parts_whose_time_is_over_are_ended_and_named_and_what_they_measured_stays(tmp_path: Path) -> None:
    done = gpu_all(tmp_path, "runs,transfers", "busy", "--", "--rounds", "100", KVSERVER_GPU_SECONDS="12")
    assert done.returncode == 1
    (found,) = tmp_path.glob("*-simulated-bench.json")
    joined = json.loads(found.read_text())
    assert joined["runs"]
    assert joined["left_out"] == [
        "runs,transfers: ended with 124, its time was over",
        "busy: not begun, the time was over",
    ]
    assert "its time was over" in found.with_suffix(".md").read_text()


NOTHING_MOVES = """
import runpy, sys
sys.path.insert(0, sys.argv[1])
import gpu_rig
seconds = gpu_rig.Transfer.seconds
gpu_rig.Transfer.seconds = lambda self, way, *directions: 1.0 if way == "staged" else seconds(self, way, *directions)
sys.argv = ["gpu.py", "--simulated", "--only", "runs,transfers"]
runpy.run_path(sys.path[0] + "/gpu.py", run_name="__main__")
"""


def test_a_way_that_moves_nothing_ends_the_benchmark_with_an_error_of_its_own() -> None:
    command = [sys.executable, "-c", NOTHING_MOVES, ROOT / "bench"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == WrongBytes.EXIT_STATUS
    assert "WRONG BYTES: a store of runs, one plane, 256 tokens, staged did not move" in done.stderr
    assert "GB/s" not in done.stdout


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


def test_measurements_of_a_simulation_never_get_into_the_results() -> None:
    results = ROOT / "bench/results"
    done = gpu_all(results, "bench")
    assert done.returncode == 2
    assert "do not belong into" in done.stderr
    assert not list(results.glob("*simulated*"))


@pytest.mark.skipif(real_gpu() != "", reason="there is a GPU")
def test_a_machine_without_a_gpu_ends_the_benchmark_before_it_begins(tmp_path: Path) -> None:
    done = gpu_all(tmp_path, "bench", KVSERVER_SIMULATED_GPU="0")
    assert done.returncode == 1
    assert "no GPU: " in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(real_gpu() != "", reason="there is a GPU")
def test_a_machine_without_a_gpu_skips_the_tests_and_writes_no_results(tmp_path: Path) -> None:
    done = gpu_all(tmp_path, "bytes", "--", "-k", "cross-layer and queued", KVSERVER_SIMULATED_GPU="0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 skipped" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(real_gpu() != "", reason="there is a GPU")
def test_without_a_torch_that_sees_a_gpu_nothing_is_measured() -> None:
    done = subprocess.run([sys.executable, ROOT / "bench/gpu.py"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "the ceiling must be CUDA's" in done.stderr


@pytest.fixture(scope="module")
def transfer() -> Transfer:
    sizes = SIZES["tiny"]
    return Transfer(Board(True, sizes.memory), geometries(sizes.fewer_layers)[0], 256)


class TestBytes:
    """A copy that moved other bytes ends the benchmark."""

    @pytest.mark.parametrize("direction", [STORE, LOAD])
    def test_a_copy_that_moved_all_is_accepted(self, transfer: Transfer, direction: Direction) -> None:
        assert transfer.gb_per_second("dma", direction) > 0

    @pytest.mark.parametrize("direction", [STORE, LOAD])
    def test_what_an_earlier_copy_left_is_not_accepted(self, transfer: Transfer, direction: Direction) -> None:
        transfer.gb_per_second("dma", direction)
        transfer.kv.change()
        with pytest.raises(WrongBytes, match=r"WRONG BYTES: a .* of Llama-8B"):
            transfer.check("dma", direction)

    @pytest.mark.parametrize("direction", [STORE, LOAD])
    @pytest.mark.parametrize("place", [0, 0.5, -1])
    def test_one_wrong_byte_is_not_accepted(self, transfer: Transfer, direction: Direction, place: float) -> None:
        transfer.gb_per_second("dma", direction)
        geometry, block = transfer.geometry, sorted(transfer.ids[direction])[-1 if place else 0]
        at = block * geometry.run + int(place * geometry.run) % geometry.run
        view = transfer.board.kv.view
        view[at] ^= 1
        with pytest.raises(WrongBytes):
            transfer.check("dma", direction)


def test_percentiles_come_from_a_thousand_samples() -> None:
    assert latencies([1.0] * 999) == {"samples": 999, "p50_ms": None, "p99_ms": None}
    assert latencies([float(n) for n in range(1000)]) == {"samples": 1000, "p50_ms": 500.0, "p99_ms": 990.0}
