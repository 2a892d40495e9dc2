"""Memory of a lane for packed records, between a client and L1.

A client that hangs may use it for ever. The memory is then lost with its lane, and L1 is not touched.

Owns: its size, which grows to the largest command that the lane has met.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence

_STEP_BYTES = 1 << 20


class LaneBuffer:
    """Buffer in a memory file, which a client may hand to another process."""

    def __init__(self, covers: int = 0) -> None:
        self._memory: mmap.mmap | None = None
        self.fd = -1
        self.covers = covers  # bytes of a command, for which the time-outs of the lane's client suffice
        self.growths = 0  # after each of which the file is another one, whatever its number

    @property
    def bytes(self) -> int:
        return len(self._memory) if self._memory is not None else 0

    def views(self, sizes: Sequence[int]) -> list[memoryview]:
        """Pieces of these sizes, each from a page on. What earlier ones showed is no longer there. REQUIRES: none of them is used."""
        ends, end = [], 0
        for size in sizes:
            ends.append(end + size)
            end += -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        if end > self.bytes:
            self._grow(-(-end // _STEP_BYTES) * _STEP_BYTES)
        whole = memoryview(self._memory) if self._memory is not None else memoryview(bytearray())
        return [whole[end - size : end] for end, size in zip(ends, sizes, strict=True)]

    def offset_of(self, view: memoryview) -> int:
        """REQUIRES: it is one of views()."""
        assert self._memory is not None
        return _address(view) - _address(self._memory)

    def free(self) -> None:
        self._memory = None
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def _grow(self, size: int) -> None:
        self.free()
        self.growths += 1
        self.fd = os.memfd_create("kvserver-lane", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, size)
        self._memory = mmap.mmap(self.fd, size)


def _address(memory: memoryview | mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
