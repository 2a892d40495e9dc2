"""The test's end of an engine process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent


class Engine:
    """`python -m gpu.engine_process`. Its commands are methods here: engine.store("seed", 1, 3)."""

    def __init__(self, endpoint: str, **options: Any) -> None:
        command = [sys.executable, "-m", "gpu.engine_process", endpoint, *map(str, options.values())]
        self.process = subprocess.Popen(command, cwd=TESTS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._answer() == "ready"

    def ask(self, name: str, *arguments: Any) -> Any:
        self.send(name, *arguments)
        return self._answer()

    def send(self, name: str, *arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self.process.stdin.flush()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the engine ended with {self.process.wait(10)}, see its errors above"
        return json.loads(line)

    def freeze(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; returns when the process has ended."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()
