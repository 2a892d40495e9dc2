"""A command on a terminal of its own (a pseudo terminal), and what is on its screen."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Sequence
from typing import Any

from support.daemon import wait_until
from support.leftovers import closed, opened

_HOME = "\x1b[H"
_STYLE = re.compile("\x1b\\[[0-9;]*m")
_SEQUENCE = re.compile("\x1b\\[[0-9;?]*[A-Za-z]")


class Terminal:
    """REQUIRES: the command draws whole screens, each from the upper left corner on. close() ends it."""

    def __init__(self, command: Sequence[str], columns: int = 120, rows: int = 50, **env: str) -> None:
        self._reader, self._terminal = pty.openpty()
        os.set_blocking(self._reader, False)
        self.resize(columns, rows)
        self.modes = termios.tcgetattr(self._terminal)
        self.written = ""
        environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            command,
            stdin=self._terminal,
            stdout=self._terminal,
            stderr=self._terminal,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that keys and sizes become signals
            env=environ | {"TERM": "xterm", "PYTHONIOENCODING": "utf-8"} | env,
        )
        opened(self)

    def resize(self, columns: int, rows: int) -> None:
        """The command is notified as by a window."""
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self._reader, keys.encode())

    def read(self) -> str:
        """All that was written so far."""
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(self._reader, 65536):
                self.written += piece.decode(errors="replace")
        return self.written

    def screens(self) -> list[str]:
        """Each that was drawn whole, without styles."""
        return [_SEQUENCE.sub("", _STYLE.sub("", one)) for one in self.read().split(_HOME)[1:]]

    def screen_with(self, *words: str, seconds: float = 20.0) -> list[str]:
        """The lines of the newest screen, as soon as all words are on it. What is on older ones counts for nothing."""

        def newest() -> list[str]:
            screens = self.screens()
            return screens[-1].splitlines() if screens and all(word in screens[-1] for word in words) else []

        try:
            return wait_until(newest, seconds)
        except AssertionError:
            raise AssertionError(f"{words} are not on the screen:\n{(self.screens() or [self.written])[-1]}") from None

    def wait(self, seconds: float = 20.0) -> int:
        """Its exit code."""
        code = self.process.wait(seconds)
        self.read()
        return code

    @property
    def is_as_before(self) -> bool:
        """The screen, the cursor and the modes."""
        last = self.read()
        left = last.rfind("\x1b[?25h\x1b[?1049l") > last.rfind("\x1b[?1049h")
        modes: Any = termios.tcgetattr(self._terminal)
        return left and modes == self.modes

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._terminal)
        os.close(self._reader)
        closed(self)
