"""Turns of what must end by itself."""

from __future__ import annotations

from collections.abc import Callable


def repeat(turn: Callable[[], bool]) -> None:
    """As long as it returns True."""
    for _ in range(10_000):
        if not turn():
            return
    raise AssertionError(f"{turn} has no end")
