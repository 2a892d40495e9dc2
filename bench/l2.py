"""L2 in files: the tier beside plain threads on the same disk, what L1 notices of it, and what its index uses.

    .venv/bin/python bench/l2.py [FOLDER] [--only files beside index] [--size MIB ...] [--rounds 9]

`files`: puts and gets of the tier, as many at a time as a daemon has under way, beside threads that only call pread or pwrite and hash
the same bytes: as many, the same sizes in the same order in a file, by O_DIRECT if the tier uses it. The tier does what they do, finds
and makes room, verifies, and keeps its index and journal; its space is full from the third round on. Chains have 64 objects. Expected is 0.9 of the threads.

`beside`: L1 of a real daemon while L2 writes at its limit, and while requests are filled from it, beside quiet moments of the same
daemon, in turn. Expected is 1.1 of quiet. `plain reads` is the ceiling: L2 rests, and another process reads as fast as it can.

`index`: bytes of memory an object, of which at most 120 are expected, and 50 in units of 16, the replay of their journal, and the longest
calls, which should not grow with `--objects`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import l2_beside
from common import alternate, median, table
from rig import BenchDaemon, rss_bytes
from support.daemon import fetch, wait_until
from support.file_tiers import PAGE, FileRig, SmallL1, key_of, name_of

from kvserver._native import RecordTable
from kvserver.bench.storage import PlainFiles
from kvserver.l2 import TierOutcome
from kvserver.l2.files import generations, journal
from kvserver.l2.files.disk import Disk
from kvserver.l2.files.folder import Folder
from kvserver.l2.files.journal import Journal

BESIDE = [
    "while L2 is", "", "samples", "quiet p50 ms", "p50 ms", "ratio", "quiet p99 ms", "p99 ms", "ratio", "read GB/s",
]  # fmt: skip
TOTAL_BYTES, CHAIN, UNIT = 256 << 20, 64, 16
IN_FLIGHT_BYTES, IN_FLIGHT, SMALL_BYTES = 64 << 20, 16, 32 << 20  # as tiering/spill.py has it


def parent_of(number: int, chain: int = CHAIN) -> bytes:
    return key_of(number - 1) if number % chain else b""


class Tier:
    """As many at a time as a daemon has under way; the thread that begins them is the one that waits, as a daemon's loop."""

    def __init__(self, folder: Path, size: int, count: int) -> None:
        l1 = SmallL1(count * (size // PAGE) + 16, fragmented=False)
        self._rig = FileRig(folder / "tier", f"{TOTAL_BYTES * 3 >> 20}MiB", l1=l1).opened()
        self._memories = [l1.memory(size) for _ in range(count)]
        for memory in self._memories:
            l1.write(memory, os.urandom(PAGE) * (size // PAGE))
        self._size, self._first = size, 0
        self._most = max(1, min(max(IN_FLIGHT, SMALL_BYTES // size), IN_FLIGHT_BYTES // size))

    @property
    def direct(self) -> bool:
        return self._rig.tier.direct

    def put(self) -> float:
        self._first += len(self._memories)
        tier, chain = self._rig.tier, min(CHAIN, len(self._memories))  # all are there at the end of a round
        return self._run(lambda number, memory: tier.put(name_of(number), memory, parent_of(number, chain), 0))

    def get(self) -> float:
        tier = self._rig.tier
        return self._run(lambda number, memory: tier.get(name_of(number), memory, 0))

    def close(self) -> None:
        self._rig.close()

    def _run(self, begin: Callable[..., int]) -> float:
        """GB/s."""
        waiting = deque(enumerate(self._memories, self._first))
        under_way: set[int] = set()
        began = time.perf_counter()
        while waiting or under_way:
            while waiting and len(under_way) < self._most:
                under_way.add(begin(*waiting.popleft()))
            self._rig.turn()
            under_way = {ticket for ticket in under_way if not self._rig.ended(ticket)}
        seconds = time.perf_counter() - began
        assert self._rig.outcomes() == {TierOutcome.DONE}
        return self._size * len(self._memories) / seconds / 1e9


def files(folder: Path | None, sizes: list[float], rounds: int) -> str:
    rows: list[list[object]] = []
    for size in [int(mib * (1 << 20)) for mib in sizes]:
        with tempfile.TemporaryDirectory(dir=folder) as name:
            tier = Tier(Path(name), size, TOTAL_BYTES // size)
            plain = PlainFiles(Path(name) / "plain", TOTAL_BYTES // size, tier.direct, size)
            for way in ("put", "get"):
                found = alternate(rounds, getattr(plain, way), getattr(tier, way))
                ratio = median([ours / theirs for theirs, ours in zip(*found, strict=True)])
                rows.append([f"{size >> 10} KiB", way, *map(median, found), ratio])
            tier.close()
            plain.close()
    return table(["object", "", "threads GB/s", "tier GB/s", "tier / threads"], rows)


def index(folder: Path | None, objects: int) -> str:
    """The native table alone, its replay, then a daemon that finds so many in a journal, beside one with an empty folder."""
    rows: list[list[object]] = []
    for unit in (1, UNIT):
        began, logs = time.perf_counter(), []
        records = RecordTable(1)
        records.begin_log(1, 0)
        for number in range(0, objects, unit):
            add(records, 1, number, unit)
            if number % 10_240 == 0:
                logs.append(records.drain_log())
        micros = (time.perf_counter() - began) / objects * 1e6
        rows.append([f"the table, units of {unit}", objects, records.memory_bytes / objects, micros])
        rows += [[f"the longest {call}", objects, "", micros] for call, micros in longest(records, objects).items()]
        rows.append([f"replay, units of {unit}", objects, "", replay_seconds(logs) / objects * 1e6])
        del records, logs
    with tempfile.TemporaryDirectory(dir=folder) as name:
        fewer = objects // 100
        empty, _ = daemon_bytes(Path(name) / "tier", fewer)
        write_journal(Path(name) / "tier", fewer)
        full, seconds = daemon_bytes(Path(name) / "tier", fewer)
        rows.append(["a daemon", fewer, (full - empty) / fewer, seconds / fewer * 1e6])
    return table(["", "objects", "bytes an object", "us an object"], rows)


def replay_seconds(logs: list[bytes]) -> float:
    again, sequence = RecordTable(2), 0
    began = time.perf_counter()
    for part in logs:
        _, sequence = again.replay(part, 1, sequence)
    again.link_orphans()
    return time.perf_counter() - began


def longest(records: RecordTable, objects: int) -> dict[str, float]:
    """Microseconds of the longest call of those that once looked at all records."""
    found = dict.fromkeys(("touch of a chain", "evict() after all were used", "sweep(512)"), 0.0)

    def timed(name: str, call: Callable[[], object]) -> None:
        began = time.perf_counter()
        call()
        found[name] = max(found[name], (time.perf_counter() - began) * 1e6)

    for first in range(0, objects, 64):
        keys = b"".join(map(key_of, range(first, min(first + 64, objects))))
        timed("touch of a chain", lambda keys=keys: records.touch(b"n" * 32, 1, 0, keys))
    for _ in range(200):
        timed("evict() after all were used", records.evict)
    records.drop_space(b"n" * 32, 1, 0)
    while not records.swept:
        timed("sweep(512)", lambda: records.sweep(512))
    return found


def add(records: RecordTable, generation: int, number: int, unit: int = 1) -> None:
    extents = (number + 1).to_bytes(4, "little") + unit.to_bytes(4, "little")
    keys = b"".join(map(key_of, range(number, number + unit)))
    records.add(b"n" * 32, generation, 0, keys, parent_of(number), 9, extents)


def write_journal(path: Path, objects: int) -> None:
    """As if so many objects of one page had been put."""
    folder = Folder(str(path), size_for(objects), False, Disk())
    known, whole = generations.read(folder)
    assert whole
    records, file = RecordTable(1), Journal.make(folder, journal.new_id())
    records.begin_log(file.id, 0)
    for number in range(objects):
        add(records, known.of(b"n" * 32), number)
        if number % 10_000 == 0:
            file.append(records.drain_log())
    file.append(records.drain_log())
    file.close()
    folder.close()


def daemon_bytes(path: Path, objects: int) -> tuple[int, float]:
    """Resident memory of a daemon whose tier has opened, and the seconds until then."""
    daemon = BenchDaemon(l1_size="64MiB", l2=f"file://{path}?size={size_for(objects)}")
    try:
        began = time.perf_counter()

        def ready() -> bool:
            (tier,) = json.loads(fetch(f"http://127.0.0.1:{daemon.http_port}/status")[1])["l2"]
            return bool(tier["state"] == "ready")

        wait_until(ready, 120)
        return rss_bytes(daemon.process.pid), time.perf_counter() - began
    finally:
        daemon.close()


def size_for(objects: int) -> int:
    return (objects + 64) * 12 * PAGE  # room for their entries in the journal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--only", nargs="+", choices=["files", "beside", "index"], default=["files", "beside", "index"])
    parser.add_argument("--size", type=float, nargs="+", default=[0.25, 2, 16, 32])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--objects", type=int, default=10_000_000)
    options = parser.parse_args()
    if "files" in options.only:
        print(files(options.folder, options.size, options.rounds), end="\n\n")
    if "beside" in options.only:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            print(table(BESIDE, l2_beside.rows(Path(folder) / "tier", options.rounds)), end="\n\n")
    if "index" in options.only:
        print(index(options.folder, options.objects))


if __name__ == "__main__":
    main()
