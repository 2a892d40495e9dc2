"""A wait for a descriptor with a limit in nanoseconds: `select.poll`, `epoll` and zmq's poll count whole milliseconds.

An engine's scheduler has one millisecond a pass for all waits together. `select.select` refuses descriptors above 1023.
"""

from __future__ import annotations

import ctypes
import select


class _Descriptor(ctypes.Structure):
    _fields_ = [("fd", ctypes.c_int), ("events", ctypes.c_short), ("found", ctypes.c_short)]


class _Time(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanos", ctypes.c_long)]


_ppoll = ctypes.CDLL(None).ppoll


def wait_readable(fd: int, seconds: float) -> None:
    """Wait `seconds` at most; less if a signal arrives."""
    limit = _Time(int(seconds), int(seconds % 1 * 1e9))
    _ppoll(ctypes.byref(_Descriptor(fd, select.POLLIN, 0)), ctypes.c_ulong(1), ctypes.byref(limit), None)
