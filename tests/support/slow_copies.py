"""Copies that a test can act in the middle of: of a daemon that is slow, or whose copies are paused."""

from __future__ import annotations

from kvserver._native import State
from kvserver.protocol import Error
from support.daemon import wait_until
from support.worker import Operation

# Per block, or per operation of a GPU's stream: three chunks take 36 or 75 ms.
COPY_DELAY_US = {"cpu": 3000, "gpu": 15_000}
AT_ONCE = 4  # copies of one direction: copying threads, or batches that a lane has in flight


def assert_failed(operation: Operation, code: str) -> None:
    reply = operation.reply()
    assert isinstance(reply, Error), reply
    assert reply.code == code, reply


def wait_for_state(operation: Operation, state: State) -> None:
    wait_until(lambda: operation.state == state, what=f"word {state!r}, is {operation.state!r}")
