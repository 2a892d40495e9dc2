"""Speed of this machine's memory copies: libc's memcpy, as the ceiling that the page shows copies beside.

It is measured once, in a thread, when it is first requested: 64 MiB for about 0.1 s. It is not measured where little memory is
free. The GIL is free meanwhile. Owns: when that is measured. Refuses to know: how (`bench.timing`), and GPUs, whose copies have
other ceilings.
"""

from __future__ import annotations

import logging
import threading

from kvserver.config import available_memory

log = logging.getLogger(__name__)

_BYTES = 32 << 20  # of the source, and of the target
_MOST_OF_FREE = 1 / 16  # both together
_ROUNDS = 5


class Memcpy:
    def __init__(self, threads: int) -> None:
        """`threads`: each copies a part, all at once."""
        self._threads = threads
        self._measured: float | None = None
        self._begun = threading.Lock()  # never released: one measurement

    def bytes_per_second(self) -> float | None:
        """Measured speed, or None. The first call begins the measurement, and does not wait."""
        if self._begun.acquire(blocking=False):
            threading.Thread(target=self._measure, name="memcpy", daemon=True).start()
        return self._measured

    def _measure(self) -> None:
        try:
            free, _ = available_memory()
            if free * _MOST_OF_FREE >= 2 * _BYTES:
                from kvserver.bench.timing import MemcpyCeiling  # few daemons need it

                ceiling = MemcpyCeiling(_BYTES, self._threads)
                self._measured = round(max(ceiling.gb_per_second() for _ in range(_ROUNDS)) * 1e9)
        except (OSError, ValueError, RuntimeError) as error:  # no memory, no thread: the page shows no ceiling
            log.warning("the speed of memcpy could not be measured: %s", error)
