"""Readers of the metrics of lifetimes do not wait for reports, however long those last."""

from __future__ import annotations

import threading
import time
from array import array

from kvserver._native import BlockLifetimes, LifetimeMetrics
from kvserver.protocol import MARK, RECORD_ALLOCATED, RECORD_CLEARED, RECORD_OPERATION_SHIFT

BLOCKS = 1_000_000


def test_a_report_that_takes_long_holds_up_no_reader() -> None:
    metrics = LifetimeMetrics([1.0])
    lifetimes = BlockLifetimes(metrics, BLOCKS, 1.0, 1)
    last = RECORD_ALLOCATED << RECORD_OPERATION_SHIFT | (BLOCKS - 1)  # still owned: each clear looks at every block
    clears = [RECORD_CLEARED << RECORD_OPERATION_SHIFT] * 100
    records, mark = array("I", [last, *clears]).tobytes(), MARK.pack(0, 1)
    began = time.monotonic()
    applying = threading.Thread(target=lifetimes.apply, args=(records, mark))
    applying.start()
    reads = 0
    longest = 0.0
    while applying.is_alive():
        before = time.monotonic()
        found = metrics.read()
        longest = max(longest, time.monotonic() - before)
        assert (found.allocations, found.cleared) in ((0, 0), (1, 1)), "not of one moment"
        reads += 1
    took = time.monotonic() - began
    applying.join()
    assert metrics.read().cleared == 1
    print(f"{reads} reads in {took:.2f} s, the longest {longest * 1e3:.3f} ms")
    assert reads > 10, "the readers waited for the report"


def test_clearing_a_pool_without_owners_is_cheap_the_second_time() -> None:
    metrics = LifetimeMetrics([1.0])
    lifetimes = BlockLifetimes(metrics, BLOCKS, 1.0, 1)
    shift = RECORD_OPERATION_SHIFT
    block = BLOCKS - 1
    records = array(
        "I", [RECORD_ALLOCATED << shift | block, 2 << shift | block, *[RECORD_CLEARED << shift] * 1_000_000]
    )
    lifetimes.apply(records.tobytes(), MARK.pack(0, 1))  # hours, if each clear looked at every block
    assert metrics.read().cleared == 1
    lifetimes.apply(array("I", [RECORD_ALLOCATED << shift | 5]).tobytes(), MARK.pack(0, 2))
    assert (metrics.read().allocations, metrics.read().active_blocks) == (2, 1)
