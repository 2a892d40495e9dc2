"""How long calls of the file device hold up their caller on a machine whose processors are all busy.

    python bench/l2_busy.py [--seconds 6]

A loop that drains and submits puts, 32 at a time of 256 KiB into a file in memory, alone and beside twice as many busy processes as
there are processors. The device's threads run at the lowest priority, so a busy machine suspends them at any place for
long: what they hold then holds up the loop. The ceiling is a loop that reads the clock twice: what is left is the scheduler's.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import struct
import tempfile
import time
from collections.abc import Callable
from typing import Any

from common import percentile, table

from kvserver._native import FileDevice, HostRegion, Record

PAGE, L1_PAGE, RECORDS, BYTES = 65536, 4096, 32, 256 << 10
FILE_PAGES = BYTES // PAGE + 1  # of one record, with its header
EXTENT = struct.Struct("=II")
Timed = Callable[[Callable[[], Any]], Any]  # calls, and notes how long it took


class Loop:
    """Puts of the same records again and again, and how long each call took."""

    def __init__(self, folder: str) -> None:
        self._region = HostRegion(RECORDS * BYTES)
        self._file = tempfile.NamedTemporaryFile(dir=folder)  # noqa: SIM115
        pages = 1 + RECORDS * FILE_PAGES
        self._file.truncate(pages * PAGE)
        self._device = FileDevice(self._file.fileno(), PAGE, pages, 4)
        self._free = list(range(RECORDS))
        self._places: dict[int, int] = {}
        self._tickets = 0
        self.written = 0

    def turn(self, timed: Timed) -> None:
        for ticket, *_ in timed(self._device.drain):
            self._free.append(self._places.pop(ticket))
            self.written += 1
        while self._free:
            self._submit(self._free.pop(), timed)

    def _submit(self, place: int, timed: Timed) -> None:
        self._tickets += 1
        ticket = self._tickets
        self._places[ticket] = place
        in_l1 = EXTENT.pack(place * BYTES // L1_PAGE, BYTES // L1_PAGE)
        record = Record(
            self._region, L1_PAGE, b"n" * 32, 0, ticket.to_bytes(32, "big"), b"c" * 16, 1, (in_l1,), (BYTES,)
        )
        in_file = EXTENT.pack(1 + place * FILE_PAGES, FILE_PAGES)
        timed(lambda: self._device.submit(ticket, True, record, in_file))

    def close(self) -> None:
        self._device.close(10**10)


def spin() -> None:
    while True:
        pass


def measure(seconds: float, turn: Callable[[Timed], Any]) -> list[float]:
    took: list[float] = []

    def timed(call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = call()
        took.append(time.perf_counter() - began)
        return result

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        turn(timed)
        time.sleep(0.0005)
    return took


def row(name: str, took: list[float], written: int) -> list[str]:
    at = [percentile(took, part) * 1e6 for part in (0.5, 0.99, 0.999)]
    return [name, str(len(took)), str(written), *(f"{each:.1f}" for each in at), f"{max(took) * 1e3:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description="How long calls of the file device hold up their caller.")
    parser.add_argument("--seconds", type=float, default=6.0)
    seconds = parser.parse_args().seconds
    rows = []
    for name, busy in (("quiet", 0), ("busy", 2 * (os.cpu_count() or 1))):
        processes = [multiprocessing.Process(target=spin, daemon=True) for _ in range(busy)]
        for process in processes:
            process.start()
        loop = Loop("/dev/shm")
        rows.append(row(f"{name}, the clock alone", measure(seconds, lambda timed: timed(time.perf_counter)), 0))
        rows.append(row(f"{name}, the device", measure(seconds, loop.turn), loop.written))
        for process in processes:
            process.terminate()
            process.join()
        loop.close()
    print(table(["", "calls", "records", "p50 us", "p99 us", "p99.9 us", "longest ms"], rows))


if __name__ == "__main__":
    main()
