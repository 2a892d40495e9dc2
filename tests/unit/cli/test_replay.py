"""`kvserver replay` as a person or a script runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.traces import lines_of

from kvserver.replay.routers import ROUTERS

PROMPTS = [[1, 2, 3, 4], [1, 2, 3, 5], [6, 7], [1, 2, 3, 4]]
TRACE = b"".join(lines_of(PROMPTS))


def replay(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "kvserver", "replay", *arguments], input=stdin, capture_output=True, timeout=120
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(TRACE)
    return str(path)


def test_json_lines_have_policy_blocks_and_hit_rates_alone(trace: str) -> None:
    done = replay(trace, "--blocks", "5,0", "--policy", "lru", "--json")
    assert done.returncode == 0
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"policy": "lru", "blocks": 5, "hit_rate": 6 / 14, "token_hit_rate": 6 / 14},
        {"policy": "lru", "blocks": 0, "hit_rate": 7 / 14, "token_hit_rate": 7 / 14},
    ]


def test_the_table_is_on_stdout_and_progress_on_stderr(trace: str) -> None:
    done = replay(trace, "--blocks", "5,0", "--policy", "lru")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0] == ["4", "requests,", "14", "blocks,", "7", "of", "them", "distinct"]
    assert lines[1] == ["policy", "blocks", "hit", "rate", "of", "tokens"]
    assert lines[2:] == [["lru", "5", "42.9%", "42.9%"], ["lru", "unlimited", "50.0%", "50.0%"]]
    assert done.stderr.splitlines() == ["lru, 5 blocks: 4 requests", "lru, unlimited: 4 requests"]


def test_requests_of_the_warm_up_fill_the_cache_and_are_not_counted(trace: str) -> None:
    done = replay(trace, "--blocks", "0", "--policy", "lru", "--warm-up", "0.5", "--json")
    assert json.loads(done.stdout) == {"policy": "lru", "blocks": 0, "hit_rate": 4 / 6, "token_hit_rate": 4 / 6}


def test_a_dash_is_stdin(trace: str) -> None:
    assert replay("-", "--json", stdin=TRACE).stdout == replay(trace, "--json").stdout != ""


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["-", "--blocks", "5,x"], "--blocks '5,x': write numbers of blocks"),
        (["-", "--blocks", "-5"], "--blocks"),
        (["-", "--policy", "lru,fifo"], "'fifo' is no policy; write of lru"),
        (["-", "--warm-up", "1"], "--warm-up 1: write a share"),
        (["-", "--warm-up", "nan"], "--warm-up nan: write a share"),
        (["-", "--warm-up", "0.5", "--l2-blocks", "0"], "--warm-up: what crosses the network"),
        (["-", "--machines", "0"], "--machines 0: write 1 to 10,000"),
        (["-", "--machines", "2", "--l2-blocks", "-1"], "--l2-blocks -1: write a number"),
        (["-", "--machines", "2", "--block-bytes", "many"], "--block-bytes: 'many' is no size"),
        (["-", "--machines", "2", "--window", "0"], "--window 0: write a number of seconds"),
        (["-", "--machines", "2", "--window", "nan"], "--window nan: write a number of seconds"),
        (["-", "--router", "prefix"], "--router: there is nothing to choose without --machines"),
        (["-", "--machines", "2", "--router", "random"], "invalid choice: 'random'"),
        (["/no/such/trace"], "/no/such/trace: No such file or directory"),
        (["/"], "/: Is a directory"),
        (["-"], "-, line 5: "),
    ],
)
def test_a_wrong_argument_or_trace_is_an_error_in_one_line(arguments: list[str], why: str) -> None:
    done = replay(*arguments, stdin=TRACE + b"{}\n")
    assert done.returncode == 2
    assert why in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_cluster_has_a_table_and_json_lines_of_its_own(trace: str) -> None:
    arguments = [
        trace,
        "--blocks",
        "5,0",
        "--policy",
        "lru",
        "--machines",
        "2",
        "--l2-blocks",
        "0",
        "--block-bytes",
        "1GB",
        "--window",
        "0.1",
    ]
    lines = replay(*arguments).stdout.splitlines()
    assert lines[1].startswith(
        "machines: 2, router: round-robin, an L2 of unlimited blocks, 1,000,000,000 bytes a block"
    )
    assert lines[1].endswith("mean / peak of 0.1 s")
    # The second machine reads 1 2 3 from L2 and writes 5; the fourth prompt finds 1 2 3 in its L1 and reads 4.
    assert lines[3].split()[:5] == ["lru", "5", "50.0%", "21.4%", "28.6%"]
    results = [json.loads(line) for line in replay(*arguments, "--json").stdout.splitlines()]
    assert [result["blocks"] for result in results] == [5, 0]
    assert results[0] == {
        "policy": "lru", "blocks": 5, "machines": 2, "router": "round-robin", "l2_blocks": 0,
        "hit_rate": 0.5, "l1_hit_rate": 3 / 14, "l2_hit_rate": 4 / 14,
        "read_gb_s": pytest.approx(4 / 0.3), "read_peak_gb_s": pytest.approx(30), "write_gb_s": pytest.approx(7 / 0.3),
        "write_peak_gb_s": pytest.approx(40), "machine_peak_gb_s": pytest.approx(40), "busiest_machine": 8 / 7,
    }  # fmt: skip


def test_help_of_replay_names_every_router() -> None:
    assert "{" + ",".join(ROUTERS) + "}" in replay("--help").stdout


def test_help_has_an_example() -> None:
    done = replay("--help")
    assert done.returncode == 0
    assert "kvserver replay trace.jsonl --blocks 1000,10000,0" in done.stdout
