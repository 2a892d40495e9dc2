"""The process of a real server that tests stop, kill and start again."""

from __future__ import annotations

import os
import signal
import subprocess


class ServerProcess:
    _process: subprocess.Popen[bytes] | None = None

    def stop(self) -> None:
        """It answers nothing, and keeps its connections, until go_on()."""
        self._signal(signal.SIGSTOP)
        assert self._process is not None
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _signal(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)
