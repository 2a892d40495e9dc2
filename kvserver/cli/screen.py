"""A whole screen of a terminal: lines drawn in place, keys, and the terminal as it was when that ends.

Owns: the terminal's modes, its size, and the signals that belong to it. Refuses to know: what is shown.

The alternate screen is left, and the modes of the terminal are restored, however the program ends; a stopped program (Ctrl-Z)
leaves the terminal to the shell until it goes on.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import termios
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from kvserver.cli.terminal import clipped, width_of

Span = tuple[str, str]  # text, and one of STYLES
Line = Sequence[Span]

STYLES = {"": "", "bold": "1", "dim": "2", "good": "32", "warn": "33", "bad": "1;31", "note": "36"}
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_KEYS = {
    b"q": "quit", b"Q": "quit", b"j": "down", b"\x1b[B": "down", b"\x1bOB": "down", b"k": "up", b"\x1b[A": "up",
    b"\x1bOA": "up", b" ": "page", b"\x1b[6~": "page", b"b": "back", b"\x1b[5~": "back",
}  # fmt: skip


def is_terminal() -> bool:
    """Whether stdout is a terminal on which lines can be drawn in place."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def painted(line: Line, width: int | None = None, colours: bool = False) -> str:
    """The line within so many cells. REQUIRES: plain() text."""
    parts, left = [], 1 << 20 if width is None else width
    for text, style in line:
        text = clipped(text, left)
        left -= width_of(text)
        code = STYLES[style] if colours else ""
        parts.append(f"\x1b[{code}m{text}\x1b[0m" if code and text else text)
    return "".join(parts)


class Screen:
    """REQUIRES: the main thread uses it, within opened(); wake() is for any thread."""

    def __init__(self) -> None:
        self._out = sys.stdout
        self._keys = sys.stdin.fileno() if sys.stdin.isatty() else None
        self._saved: list[Any] | None = None
        self._woken, self._wakes = socket.socketpair()
        self._woken.setblocking(False)
        self._wakes.setblocking(False)
        self._colours = not os.environ.get("NO_COLOR")

    @contextlib.contextmanager
    def opened(self) -> Iterator[Screen]:
        before = {
            number: signal.signal(number, handler)
            for number, handler in (
                (signal.SIGWINCH, _ignore),
                (signal.SIGTERM, _end),
                (signal.SIGTSTP, self._stop),
            )
        }
        wakeup = signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        try:
            self._enter()
            yield self
        finally:
            self._leave()
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)
            self._woken.close()
            self._wakes.close()

    def wake(self) -> None:
        """Make wait() return. An end of the screen meanwhile is no error."""
        with contextlib.suppress(OSError):
            self._wakes.send(b"\0")

    def wait(self, seconds: float) -> str:
        """The next key as a word of _KEYS; "" after wake(), another key, a new size of the terminal, or `seconds`."""
        keys = [self._keys] if self._keys is not None else []
        ready, _, _ = select.select([*keys, self._woken], [], [], seconds)
        if self._woken in ready:
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(4096)
        if self._keys is None or self._keys not in ready:
            return ""
        try:
            typed = os.read(self._keys, 64)
        except OSError:  # the terminal was closed
            return "quit"
        return _KEYS.get(typed, "") or _KEYS.get(typed[:1], "") if typed else "quit"

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines."""
        try:
            columns, lines = os.get_terminal_size(self._out.fileno())
        except OSError:
            columns, lines = 0, 0
        return columns or 80, lines or 24

    def draw(self, lines: Sequence[Line], first: int = 0) -> int:
        """Draw as many as fit, from number `first` on or from where the last one is at the bottom; returns that number."""
        columns, rows = self.size
        first = max(0, min(first, len(lines) - rows))
        shown = [painted(line, columns, self._colours) for line in lines[first : first + rows]]
        self._write("\x1b[H" + "\n".join("\x1b[2K" + line for line in shown) + "\x1b[J")
        return first

    # ---- the terminal -------------------------------------------------------------------------

    def _enter(self) -> None:
        if self._keys is not None:
            self._saved = termios.tcgetattr(self._keys)
            modes = termios.tcgetattr(self._keys)
            modes[3] &= ~(termios.ICANON | termios.ECHO)  # Ctrl-C and Ctrl-Z still send their signals
            termios.tcsetattr(self._keys, termios.TCSANOW, modes)
        self._write(_ENTER)

    def _leave(self) -> None:
        with contextlib.suppress(OSError):  # it was closed: there is nothing to restore
            self._write(_LEAVE)
        if self._keys is not None and self._saved is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._keys, termios.TCSANOW, self._saved)
            self._saved = None

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._leave()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._enter()  # after SIGCONT
        self.wake()

    def _write(self, text: str) -> None:
        """Past the buffer of sys.stdout, which a signal's handler may find in use."""
        left = text.encode(self._out.encoding, "replace")
        while left:
            left = left[os.write(self._out.fileno(), left) :]


def _ignore(number: int, frame: FrameType | None) -> None:
    """The wakeup descriptor is what wakes wait()."""


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
