"""`bench/walk.py` failed at its first lookup: since there are tails a second message names a missed chunk's blocks, so the
answer was not there yet."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).parents[3]


@pytest.mark.long
def test_each_walk_has_functions_of_both_processes() -> None:
    kvserver = Path(os.environ.get("KVSERVER_BIN", TOP / ".venv/bin/kvserver"))
    command = [sys.executable, TOP / "bench/walk.py", "--rounds", "2", "--daemon-python", kvserver.with_name("python")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = {line[:14].strip(): line[14:].split() for line in done.stdout.splitlines()[-6:]}
    assert list(rows) == ["store", "load", "lookup", "end of request", "block report", "clear"]
    for what, (functions, files, of_daemon, crossings, *_) in rows.items():
        assert int(functions) > int(files) >= int(of_daemon) > 5, what
        assert int(crossings) > 0, what
