"""Scrolling: the lines on the screen, of a text that is longer than the screen.

Owns: the keys that scroll, the position, and the line that states what is not shown. Refuses to know: what the lines are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

_KEY = re.compile(rb"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)
_LINES = {b"\x1b[A": -1, b"\x1bOA": -1, b"\x1b[B": 1, b"\x1bOB": 1}
_PAGES = {b"\x1b[5~": -1, b"\x1b[6~": 1}
_QUITS = (b"q", b"Q")


class Scroll:
    """Position in a text. The first line is always shown, the others by the position."""

    def __init__(self, has_keys: bool) -> None:
        self._how = ": arrow keys and page keys scroll" if has_keys else ""
        self._hidden = 0  # lines between the first one and the second that is shown
        self._page = 1

    def press(self, keys: bytes) -> bool:
        """Scroll by the keys; False if they end the command. Without keys the keyboard is closed."""
        pressed = _KEY.findall(keys)
        for key in pressed:
            self._hidden += _LINES.get(key, 0) + _PAGES.get(key, 0) * self._page
        return bool(pressed) and not any(key in _QUITS for key in pressed)

    def shown(self, lines: Sequence[T], rows: int) -> tuple[list[T], str]:
        """Lines that fit into so many rows, and the text of the last row, "" if all lines are shown. The position ends at the last line."""
        self._page = max(1, rows - 2)
        self._hidden = max(0, min(self._hidden, len(lines) - 1 - self._page))
        if len(lines) <= rows or rows < 3:
            self._hidden = 0
            return list(lines[:rows]), ""
        first = 1 + self._hidden
        last = first + self._page
        return [*lines[:1], *lines[first:last]], f"lines {first + 1} to {last} of {len(lines)}{self._how}"
