"""`make demo`, small: it shows hits and equal tokens, and leaves nothing behind. And the doctor beside a real vLLM."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from support.daemon import KVSERVER, wait_until

DEMO = [sys.executable, str(Path(__file__).parent.parent.parent / "bench/demo.py")]
SMALL = ["--layers", "2", "--hidden", "256", "--tokens", "700", "--prompts", "2"]


def processes_below(folder: str) -> list[str]:
    """Processes whose files lie in this folder: the daemon, and engines with a model from there."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:  # it has just ended
            continue
        if folder.encode() in words:
            found.append(words.decode())
    return found


@pytest.fixture
def folder():
    """The folder for everything temporary; its name is short, because sockets lie below it."""
    with tempfile.TemporaryDirectory(prefix="kvd-") as name:
        yield name


def test_the_demo_shows_hits_and_equal_tokens_and_leaves_nothing_behind(folder):
    ended = subprocess.run(
        [*DEMO, *SMALL], capture_output=True, text=True, timeout=400, env=os.environ | {"TMPDIR": folder}
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = re.findall(r"^(\d+|median) +([\d.]+) +([\d.]+) +([\d.]+) +(\d+)   (yes|NO)$", ended.stdout, re.MULTILINE)
    assert [row[0] for row in rows] == ["1", "2", "median"], ended.stdout
    for _, cold, warm, ratio, cached, same in rows:
        assert abs(float(warm) / float(cold) - float(ratio)) < 0.02
        assert int(cached) == 512  # two whole chunks of 256; the engine computes the rest
        assert same == "yes"
    assert re.search(r"copying [1-9]\d* MiB from the daemon", ended.stdout)
    assert processes_below(folder) == []
    assert [name for name in os.listdir(folder) if name.startswith("kv")] == []  # torch keeps a folder of its own


@pytest.mark.long
def test_a_demo_that_is_stopped_stops_its_daemon_and_engines(folder):
    demo = subprocess.Popen(
        [*DEMO, *SMALL],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"TMPDIR": folder},
    )
    try:
        assert any("two vLLM processes" in line for line in demo.stdout)
        wait_until(lambda: len(processes_below(folder)) >= 3, 30, "a daemon and two engines")
        time.sleep(1)
        demo.send_signal(signal.SIGTERM)
        assert demo.wait(60) == 1
    finally:
        demo.kill()
        demo.stdout.close()
    wait_until(lambda: processes_below(folder) == [], 10, "nothing runs any more")


def test_the_doctor_finds_the_connector_in_vllms_environment():
    ended = subprocess.run(
        [KVSERVER, "doctor", "--json", "--http-port", "0", "--python", sys.executable],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    found = {row["check"]: row for row in json.loads(ended.stdout)}["vLLM"]
    assert found["level"] == "ok", found
    assert f"in {sys.executable}, and it imports the connector" in found["text"]
