"""`kvserver replay` as a person or a script runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.traces import lines_of

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


def test_json_lines_have_policy_blocks_and_hit_rate_alone(trace: str) -> None:
    done = replay(trace, "--blocks", "5,0", "--policy", "lru", "--json")
    assert done.returncode == 0
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"policy": "lru", "blocks": 5, "hit_rate": 6 / 14},
        {"policy": "lru", "blocks": 0, "hit_rate": 7 / 14},
    ]


def test_the_table_is_on_stdout_and_progress_on_stderr(trace: str) -> None:
    done = replay(trace, "--blocks", "5,0")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[0] == ["4", "requests,", "14", "blocks,", "7", "of", "them", "distinct"]
    assert lines[1:] == [["policy", "blocks", "hit", "rate"], ["lru", "5", "42.9%"], ["lru", "unlimited", "50.0%"]]
    assert done.stderr.splitlines() == ["lru, 5 blocks: 4 requests", "lru, unlimited: 4 requests"]


def test_a_dash_is_stdin(trace: str) -> None:
    assert replay("-", "--json", stdin=TRACE).stdout == replay(trace, "--json").stdout != ""


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["-", "--blocks", "5,x"], "--blocks '5,x': write numbers of blocks"),
        (["-", "--blocks", "-5"], "--blocks"),
        (["-", "--policy", "lru,fifo"], "'fifo' is no policy; write of lru"),
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


def test_help_has_an_example() -> None:
    done = replay("--help")
    assert done.returncode == 0
    assert "kvserver replay trace.jsonl --blocks 1000,10000,0" in done.stdout
