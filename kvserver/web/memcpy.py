"""How fast this machine copies memory: libc's memcpy, as the ceiling that the page shows copies beside.

Measured once, in a thread, when it is first requested: 64 MiB for about 0.1 s, and not where little memory is free. The interpreter's
lock is free meanwhile. Owns: the measurement. Refuses to know: GPUs, whose copies have other ceilings.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time

from kvserver.config import available_memory

log = logging.getLogger(__name__)

_BYTES = 32 << 20  # of the source, and of the target
_MOST_OF_FREE = 1 / 16  # both together
_ROUNDS = 5  # the first writes to new pages and does not count


class Memcpy:
    def __init__(self, threads: int) -> None:
        """`threads`: each copies a part, all at once."""
        self._threads = threads
        self._measured: float | None = None
        self._begun = threading.Lock()  # never released: one measurement

    def bytes_per_second(self) -> float | None:
        """None unless it was measured. The first call begins that, and does not wait."""
        if self._begun.acquire(blocking=False):
            threading.Thread(target=self._measure, name="memcpy", daemon=True).start()
        return self._measured

    def _measure(self) -> None:
        try:
            free, _ = available_memory()
            if free * _MOST_OF_FREE >= 2 * _BYTES:
                self._measured = round(_best(self._threads))
        except (OSError, ValueError, RuntimeError) as error:  # no memory, no thread: the page shows no ceiling
            log.warning("the speed of memcpy could not be measured: %s", error)


def _best(threads: int) -> float:
    import ctypes  # few daemons need it: it is loaded with the first page

    part = _BYTES // threads
    with mmap.mmap(-1, _BYTES) as source, mmap.mmap(-1, _BYTES) as target:
        views = [ctypes.c_char.from_buffer(memory) for memory in (source, target)]
        here, there = (ctypes.addressof(view) for view in views)
        together = threading.Barrier(threads, timeout=10)
        times: list[list[tuple[float, float]]] = [[] for _ in range(_ROUNDS)]  # by round: when each began and ended

        def copy(number: int) -> None:
            for round_times in times:
                together.wait()
                began = time.perf_counter()
                ctypes.memmove(there + number * part, here + number * part, part)
                round_times.append((began, time.perf_counter()))

        ctypes.memset(here, 1, _BYTES)
        workers = [threading.Thread(target=copy, args=(number,), daemon=True) for number in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        del views[:]
    spans = [
        max(ended for _, ended in each) - min(began for began, _ in each) for each in times if len(each) == threads
    ]
    return part * threads / min(spans[1:])
