"""The process of a real engine, driven from a test: it reads a request a line, as JSON, and answers each with a line.

Owns the process, its log and its answers. Refuses to know which engine it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

Prompt = list[int]
START_SECONDS = 600
ANSWER_SECONDS = 400  # four requests of 400 tokens took 60 s where the load average was 12
# The ranks of an engine spin while they wait for each other: two of them kept a machine of two cores so busy that a thread of
# the daemon which was ready to run waited for 10 s. So engines yield to the daemon. They stay in our session, too: a session
# of their own would be a scheduling group of its own, and niceness counts only within one.
NICE = ["nice", "-n", "10"]


class EngineEnded(AssertionError):
    """The engine's process has ended where an answer was expected."""


class EngineDriver:
    def __init__(self, command: list[str], log: Path, environ: dict[str, str]) -> None:
        self.log = log
        self._log_file = log.open("w")
        self.process = subprocess.Popen(
            [*NICE, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log_file,
            text=True,
            env=environ,
            process_group=0,
        )
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self._ready = False

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._answers.put(json.loads(line))
        self._answers.put({"ended": True})

    def wait_ready(self) -> Self:
        if not self._ready:
            reply = self.receive(START_SECONDS)
            assert reply.get("ready"), f"{reply}\n{self.tail()}"
            self.check(reply)
            self._ready = True
        return self

    def check(self, ready: dict[str, Any]) -> None:
        """AssertionError if its first line states another engine than the test is about."""

    def send(self, op: str, **fields: Any) -> None:
        self.wait_ready()
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"op": op, **fields}) + "\n")
        self.process.stdin.flush()

    def receive(self, timeout: float = ANSWER_SECONDS) -> dict[str, Any]:
        reply = self._answers.get(timeout=timeout)
        if "ended" in reply:
            raise EngineEnded(f"with status {self.process.wait()}; the end of {self.log}:\n{self.tail()}")
        assert "error" not in reply, f"{reply['error']}\n{self.tail()}"
        return reply

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        self.send(op, **fields)
        return self.receive()

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text().splitlines()[-lines:])

    def kill(self) -> None:
        """Kill -9 the engine's processes, as an out-of-memory kill would."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._log_file.close()
