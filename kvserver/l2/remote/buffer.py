"""A lane's own memory for packed records, between a client and L1.

Owns: its size, which grows to the largest record that the lane has met. A client that hangs may use it for ever; it is then lost
with its lane, and L1 is not touched.
"""

from __future__ import annotations

import mmap

_STEP_BYTES = 1 << 20


class LaneBuffer:
    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    def view(self, count: int) -> memoryview:
        """`count` bytes of it. What an earlier view showed is no longer there. REQUIRES: no earlier one is used."""
        if self._memory is None or len(self._memory) < count:
            self._memory = mmap.mmap(-1, max(_STEP_BYTES, -(-count // _STEP_BYTES) * _STEP_BYTES))
        return memoryview(self._memory)[:count]

    def free(self) -> None:
        self._memory = None
