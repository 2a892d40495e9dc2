"""Ceilings, percentiles and rounds.

A measurement alone means little on a noisy machine, so each is compared with a ceiling measured in the same run, in turn with it.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import statistics
import threading
import time
from collections.abc import Callable, Sequence


class Buffer:
    """Anonymous memory, touched."""

    def __init__(self, size: int) -> None:
        self.memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.size = size
        ctypes.memset(self.address, 1, size)


class MemcpyCeiling:
    """libc's memcpy from one large buffer to another, all threads at once, each a part of its own.

    Buffers are larger than the caches and touched before; ctypes lets go of the GIL during the copy.
    """

    def __init__(self, size: int, threads: int) -> None:
        self._from, self._to = Buffer(size), Buffer(size)
        self._size, self._threads = size, threads

    def gb_per_second(self) -> float:
        """RuntimeError if its threads cannot be started."""
        part = self._size // self._threads
        start = threading.Barrier(self._threads + 1, timeout=10)  # s: a thread that cannot start leaves none waiting

        def copy(n: int) -> None:
            start.wait()
            ctypes.memmove(self._to.address + n * part, self._from.address + n * part, part)

        workers = [threading.Thread(target=copy, args=(n,), daemon=True) for n in range(self._threads)]
        for worker in workers:
            worker.start()
        start.wait()
        began = time.perf_counter()
        for worker in workers:
            worker.join()
        return part * self._threads / (time.perf_counter() - began) / 1e9


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of all are below or equal to. REQUIRES: at least 1,000 values for 0.99."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def alternate(rounds: int, *measures: Callable[[], float], most_seconds: float = math.inf) -> list[list[float]]:
    """Measure in turn, A B C A B C ..., after one round that does not count; after `most_seconds` no round begins but the first one."""
    began = time.monotonic()
    for measure in measures:
        measure()
    found: list[list[float]] = [[] for _ in measures]
    for done in range(rounds):
        if done and time.monotonic() - began > most_seconds:
            break
        for values, measure in zip(found, measures, strict=True):
            values.append(measure())
    return found


def median(values: Sequence[float]) -> float:
    return statistics.median(values)
