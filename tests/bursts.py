"""Keeps the processors busy for moments, to find what a test leaves to the machine: run tests beside it.

Each processor by itself is busy for 20 to 200 ms at a time, a tenth of the time in all, with priority over every other process.
Root runs `python tests/bursts.py [SECONDS]`, since it needs SCHED_FIFO; an hour without a number; Ctrl+C ends it.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from multiprocessing import get_context

BUSY_SECONDS = (0.02, 0.2)
IDLE_SECONDS = (0.3, 1.5)


def keep_busy(processor: int, until: float) -> None:
    """`until` is of the monotonic clock. PermissionError if this user may not use SCHED_FIFO."""
    os.sched_setaffinity(0, {processor})
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))
    with contextlib.suppress(KeyboardInterrupt):
        while time.monotonic() < until:
            burst_ends = time.monotonic() + random.uniform(*BUSY_SECONDS)
            while time.monotonic() < burst_ends:
                pass
            time.sleep(random.uniform(*IDLE_SECONDS))


def main() -> int:
    until = time.monotonic() + float(sys.argv[1] if len(sys.argv) > 1 else 3600)
    context = get_context("spawn")
    bursts = [context.Process(target=keep_busy, args=(number, until)) for number in sorted(os.sched_getaffinity(0))]
    for burst in bursts:
        burst.start()
    with contextlib.suppress(KeyboardInterrupt):
        for burst in bursts:
            burst.join()
    return max(abs(burst.exitcode or 0) for burst in bursts)


if __name__ == "__main__":
    sys.exit(main())
