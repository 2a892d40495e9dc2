"""Turns of what must end by itself."""

from __future__ import annotations

from collections.abc import Callable

from kvserver.cache import Cache, StorePlan


def repeat(turn: Callable[[], bool]) -> None:
    """As long as it returns True."""
    for _ in range(10_000):
        if not turn():
            return
    raise AssertionError(f"{turn} has no end")


def complete_plan(cache: Cache, plan: StorePlan, steps: int) -> None:
    """Plan a store to its end, `steps` steps a turn."""

    def turn() -> bool:
        if not plan.complete:
            cache.extend_plan(plan, steps)
        return not plan.complete

    repeat(turn)
