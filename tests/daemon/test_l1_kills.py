"""A daemon with --l1-file that is killed at a step of a restart, or at any moment of one, and a state of another format."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.daemon import Daemon, wait_until
from support.kept_l1 import hits, start, state_of, store_prompt

from kvserver.restart.state import FORMAT

STEPWISE = (sys.executable, str(Path(__file__).parent.parent / "support" / "killed_restart.py"))


class Steps:
    """Daemons that die at a step of a restart: `support/killed_restart.py`."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon, self._report = daemon, daemon.folder / "steps"
        self._program = daemon.program

    def end(self, number: int) -> int:
        """Start the daemon, and end it by SIGTERM, at which it dies at this step. Returns its exit code."""
        self.daemon.program, self.daemon.env = STEPWISE, self._env(f"end:{number}")
        start(self.daemon)
        self.daemon.program, self.daemon.env = self._program, {}
        assert self.daemon.process is not None
        self.daemon.process.terminate()
        return self.daemon.process.wait(120)

    def start(self, number: int) -> None:
        """Start a daemon that dies at this step."""
        daemon = self.daemon
        daemon.program, env = STEPWISE, os.environ | self._env(f"start:{number}")
        ended = subprocess.run(daemon.command(), env=env, capture_output=True, timeout=120)
        daemon.program = self._program
        assert ended.returncode == -signal.SIGKILL, ended.stderr

    def count(self) -> tuple[int, int]:
        """Steps of a start and of an end. REQUIRES: the daemon has ended, and left chunks; it runs afterwards."""
        self.daemon.program, self.daemon.env = STEPWISE, self._env("start:0")
        start(self.daemon)
        assert self.daemon.terminate() == 0
        assert self.end(0) == 0
        self.daemon.start()
        wait_until(lambda: len(self._report.read_text().splitlines()) == 2, 120, what="both are counted")
        first, last = (line.split() for line in self._report.read_text().splitlines())
        assert (first[0], last[0]) == ("start", "end")
        return int(first[1]), int(last[1])

    def _env(self, step: str) -> dict[str, str]:
        return {"KVSERVER_TEST_STEP": step, "KVSERVER_TEST_STEPS": str(self._report)}


@pytest.mark.parametrize("rounds", [6, pytest.param(200, marks=pytest.mark.long)])
def test_kill_at_each_step_of_a_restart_keeps_all_chunks_or_none(kept: Daemon, path: Path, rounds: int) -> None:
    steps, each, source = Steps(kept), rounds // 2, random.Random(rounds)
    prompts = [store_prompt(kept, 15) for _ in range(4)]
    assert kept.terminate() == 0
    of_start, of_end = steps.count()
    outcomes = set()
    for number in range(rounds):
        begin, end = number % 2 == 0, number % 2 == 1
        total = of_start if begin else of_end
        at = 1 + min(total - 1, int((number // 2 + source.random()) * total / each))
        assert kept.terminate() == 0
        if begin:
            steps.start(at)
        else:
            assert steps.end(at) == -signal.SIGKILL
        left = state_of(path).exists()
        start(kept)
        found = [hits(kept, prompt) for prompt in prompts]
        assert found == [15 * left] * 4, f"killed at step {at} of {total} of the {'start' if begin else 'end'}"
        assert not path.with_name(f"{path.name}.state.new").exists()
        kept.audit()
        outcomes.add((end, left))
        if not left:
            prompts = [store_prompt(kept, 15) for _ in range(4)]
    assert rounds < 200 or len(outcomes) == 4, "both ends of both phases"


def test_state_of_another_format_is_not_read_by_an_older_or_newer_daemon(kept: Daemon, path: Path) -> None:
    older, newer = kept.program, FORMAT + 1
    for program, env, text in [
        (
            STEPWISE,
            {"KVSERVER_TEST_FORMAT": str(newer)},
            f"it is of format {FORMAT}, and this daemon has format {newer}",
        ),
        (older, {}, f"it is of format {newer}, and this daemon has format {FORMAT}"),
    ]:
        prompt = store_prompt(kept)
        assert kept.terminate() == 0
        assert state_of(path).exists()
        kept.program, kept.env = program, env
        start(kept)
        assert f"L1 begins empty: {path}.state: {text}" in kept.log
        assert hits(kept, prompt) == 0
        kept.audit()


@pytest.mark.parametrize("rounds", [4, pytest.param(40, marks=pytest.mark.long)])
def test_kill_while_a_state_is_written_or_adopted_leads_to_no_wrong_byte(kept: Daemon, path: Path, rounds: int) -> None:
    source, prompts = random.Random(rounds), [store_prompt(kept, 15) for _ in range(8)]
    for number in range(rounds):
        if number % 2:  # while it ends
            assert kept.process is not None
            kept.process.terminate()
            time.sleep(source.random() * 0.1)
        kept.kill()
        kept.start()
        if not number % 2:  # while it adopts
            time.sleep(source.random() * 0.05)
            kept.kill()
            kept.start()
        found = [hits(kept, prompt) for prompt in prompts]
        prompts = [prompt for prompt, count in zip(prompts, found, strict=True) if count == 15]
        prompts += [store_prompt(kept, 15) for _ in range(8 - len(prompts))]
        if not number % 3:
            assert kept.terminate() == 0
            kept.start()
    kept.audit()
