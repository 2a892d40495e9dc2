"""A clock for block lifetimes, and the labels of their metrics."""

from __future__ import annotations

from support.block_lifetimes import SECOND

from kvserver.telemetry import BlockLifecycle


class Clock:
    def __init__(self) -> None:
        self.ns = SECOND

    def __call__(self) -> int:
        return self.ns

    def advance(self, seconds: float) -> None:
        self.ns += int(seconds * SECOND)


def names(l0: BlockLifecycle) -> set[tuple[str, ...]]:
    return {labels for family in l0.families() for labels, _ in family.points}
