"""Block lifetimes over a clock that a test advances."""

from __future__ import annotations

import pytest

from kvserver.telemetry import BlockLifecycle
from unit.telemetry.l0_rig import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def l0(clock: Clock) -> BlockLifecycle:
    return BlockLifecycle(1.0, clock=clock)
