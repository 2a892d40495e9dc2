"""The file tier beside threads that only call pread and pwrite and hash the same bytes, on the same disk in the same run.

    .venv/bin/python bench/l2_files.py [FOLDER] [--size MIB ...] [--objects N]

`threads`: as many as the tier has, each one call per object and XXH3-64, by O_DIRECT if the tier uses it. The tier does what they
do, finds room, verifies, and keeps its index and journal. Expected is 0.9 of the threads, and at most 150 bytes of memory an object.
"""

from __future__ import annotations

import argparse
import mmap
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from common import alternate, median, table
from support.file_tiers import PAGE, FileRig, SmallL1, key_of, name_of

from kvserver._native import RecordTable, checksum
from kvserver.l2 import ObjectMemory, TierOutcome
from kvserver.l2.files.tier import THREADS

ROUNDS, TOTAL_BYTES = 5, 256 << 20


class Threads:
    """pread or pwrite, and the checksum."""

    def __init__(self, folder: Path, size: int, count: int, direct: bool) -> None:
        self._size, self._count = size, count
        self._fd = os.open(folder / "plain", os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0), 0o600)
        os.posix_fallocate(self._fd, 0, size * count)
        self._buffers = [mmap.mmap(-1, size) for _ in range(count)]
        for buffer in self._buffers:
            buffer.write(os.urandom(PAGE) * (size // PAGE))

    def put(self) -> float:
        return self._run(True)

    def get(self) -> float:
        return self._run(False)

    def _run(self, put: bool) -> float:
        def work(first: int) -> None:
            for number in range(first, self._count, THREADS):
                buffer = self._buffers[number]
                if put:
                    checksum(buffer)
                    os.pwritev(self._fd, [buffer], number * self._size)
                else:
                    os.preadv(self._fd, [buffer], number * self._size)
                    checksum(buffer)

        threads = [threading.Thread(target=work, args=(first,)) for first in range(THREADS)]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self._size * self._count / (time.perf_counter() - began) / 1e9


class Tier:
    """All objects of a round at once, as a prompt's are."""

    def __init__(self, folder: Path, size: int, count: int) -> None:
        l1 = SmallL1(count * size // PAGE + 16, fragmented=False)
        self.rig = FileRig(folder / "tier", f"{TOTAL_BYTES * 3 >> 20}MiB", l1=l1).opened()
        self._memories: list[ObjectMemory] = [l1.memory(size) for _ in range(count)]
        for memory in self._memories:
            l1.write(memory, os.urandom(PAGE) * (size // PAGE))
        self._size, self._first = size, 0
        self.direct = self.rig.tier._folder.data.direct

    def put(self) -> float:
        self._first += len(self._memories)
        return self._run(True)

    def get(self) -> float:
        return self._run(False)

    def _run(self, put: bool) -> float:
        tier = self.rig.tier
        began = time.perf_counter()
        names = [name_of(self._first + number) for number in range(len(self._memories))]
        pairs = list(zip(names, self._memories, strict=True))
        tickets = [tier.put(name, memory, b"", 0) if put else tier.get(name, memory, 0) for name, memory in pairs]
        ends = [self.rig.end(ticket) for ticket in tickets]
        seconds = time.perf_counter() - began
        assert {end.outcome for end in ends} == {TierOutcome.DONE}, ends
        return self._size * len(ends) / seconds / 1e9


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--size", type=float, nargs="+", default=[0.25, 2, 16])
    parser.add_argument("--objects", type=int, default=1_000_000)
    options = parser.parse_args()
    rows = []
    for size in [int(mib * (1 << 20)) for mib in options.size]:
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            folder, count = Path(name), TOTAL_BYTES // size
            tier = Tier(folder, size, count)
            plain = Threads(folder, size, count, tier.direct)
            for way in ("put", "get"):
                threads, tiers = map(median, alternate(ROUNDS, getattr(plain, way), getattr(tier, way)))
                rows.append([f"{size >> 10} KiB", way, threads, tiers, tiers / threads])
            tier.rig.close()
    print(table(["object", "", "threads GB/s", "tier GB/s", "tier / threads"], rows))
    index = RecordTable(1)
    began = time.perf_counter()
    for number in range(options.objects):
        index.add(b"n" * 32, 1, 0, key_of(number), b"", 9, (number + 1).to_bytes(4, "little") + b"\1\0\0\0")
    seconds = time.perf_counter() - began
    print(
        f"index: {index.memory_bytes / options.objects:.0f} bytes an object, {seconds / options.objects * 1e6:.2f} us a put"
    )


if __name__ == "__main__":
    main()
