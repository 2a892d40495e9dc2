"""How long calls of the file device hold up their caller on a machine whose processors are all busy.

    python bench/l2_busy.py [--seconds 6]

A loop that drains and submits puts, 32 at a time of 256 KiB into a file in memory, alone and beside twice as many busy processes as
there are processors. The device's threads run at the lowest priority, so a busy machine suspends them at any place for
long: what they hold then holds up the loop. The ceiling is a loop that reads the clock twice: what is left is the scheduler's.

Then 64 MiB of gets of a file tier, for which a request waits, in the same two settings.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import select
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from common import percentile, table
from support.file_tiers import PAGE as SMALL_PAGE
from support.file_tiers import FileRig, SmallL1, name_of

from kvserver._native import FileDevice, HostRegion, Record
from kvserver.l2 import ObjectMemory, TierOutcome

PAGE, L1_PAGE, RECORDS, BYTES = 65536, 4096, 32, 256 << 10
FILE_PAGES = BYTES // PAGE + 1  # of one record, with its header
EXTENT = struct.Struct("=II")
READ_RECORDS, READ_BYTES, READS = 32, 2 << 20, 30
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


class Reads:
    """64 MiB of gets of a file tier, again and again."""

    def __init__(self, folder: Path) -> None:
        l1 = SmallL1(READ_RECORDS * READ_BYTES // SMALL_PAGE + 16, fragmented=False)
        self.rig = FileRig(folder / "tier", "256MiB", l1=l1).opened()
        self._memories = [l1.memory(READ_BYTES) for _ in range(READ_RECORDS)]
        self._millis(lambda number, memory: self.rig.tier.put(name_of(number), memory, b"", 0))

    def measure(self) -> list[float]:
        """Milliseconds of each time."""
        return [
            self._millis(lambda number, memory: self.rig.tier.get(name_of(number), memory, 0)) for _ in range(READS)
        ]

    def _millis(self, begin: Callable[[int, ObjectMemory], int]) -> float:
        began = time.perf_counter()
        left = {begin(number, memory) for number, memory in enumerate(self._memories)}
        while left:
            select.select([self.rig.tier.completion_fd], [], [], 1.0)
            ends = self.rig.tier.drain()
            assert all(end.outcome is TierOutcome.DONE for end in ends), ends
            left -= {end.ticket for end in ends}
        return (time.perf_counter() - began) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description="How long calls of the file device hold up their caller.")
    parser.add_argument("--seconds", type=float, default=6.0)
    seconds = parser.parse_args().seconds
    rows, of_reads = [], []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        reads = Reads(Path(folder))
        for name, busy in (("quiet", 0), ("busy", 2 * (os.cpu_count() or 1))):
            processes = [multiprocessing.Process(target=spin, daemon=True) for _ in range(busy)]
            for process in processes:
                process.start()
            loop = Loop("/dev/shm")
            rows.append(row(f"{name}, the clock alone", measure(seconds, lambda timed: timed(time.perf_counter)), 0))
            rows.append(row(f"{name}, the device", measure(seconds, loop.turn), loop.written))
            took = reads.measure()
            of_reads.append([name, len(took), percentile(took, 0.5), percentile(took, 0.9), max(took)])
            for process in processes:
                process.terminate()
                process.join()
            loop.close()
        reads.rig.close()
    print(table(["", "calls", "records", "p50 us", "p99 us", "p99.9 us", "longest ms"], rows), end="\n\n")
    print(table(["64 MiB of gets", "times", "p50 ms", "p90 ms", "longest ms"], of_reads))


if __name__ == "__main__":
    main()
