"""What KV events and POST /kv/match cost of a large L2: the resync that names what a tier found at its start.

python bench/l2_events.py [--objects 1000000]

A file tier's index (`RecordTable`) is walked by the loop's part (`L2Events`) through the bus to the hub and the index of matches. The longest
turn is what a request would wait for; beside it the longest wait for the interpreter of a thread that does nothing else,
without and with the resync: what the bus's thread costs the loop. Then, for one object that is written and
evicted again, what the loop's thread pays, without a tier, and beside one tier and two.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from collections.abc import Iterator

from common import percentile, table

from kvserver._native import RecordTable
from kvserver.events import Bus, L2Resynced
from kvserver.kv_events import Hub
from kvserver.l2 import ObjectName
from kvserver.l2.base import Changed, State
from kvserver.routing import KVIndex
from kvserver.tiering.events import L2Events

NAMESPACE = b"n" * 64
EXTENT = (1).to_bytes(4, "little") * 2


class TableTier:
    """The part of a file tier that is an index in memory."""

    shared = False

    def __init__(self) -> None:
        self.state: State = "ready"
        self.table = RecordTable(1)
        self.changed: Changed = lambda stored, name: None

    def fill(self, objects: int) -> None:
        rng = random.Random(0)
        for _ in range(objects):
            self.table.add(NAMESPACE, 1, 0, rng.randbytes(32), b"", 9, EXTENT)

    def holds(self, namespace: bytes, group: int, keys: bytes) -> int:
        return self.table.holds(namespace, 1, group, keys)

    def watch(self, changed: Changed) -> None:
        self.changed = changed

    def walk(self) -> Iterator[tuple[bytes, int, bytes]]:
        at: int | None = 0
        while at is not None:
            at, found = self.table.walk(at, 1024)
            for namespace, _, group, keys in found:
                yield namespace, group, keys


class Waits(threading.Thread):
    """Sleeps and notes by how much it wakes late."""

    def __init__(self) -> None:
        super().__init__()
        self.late: list[float] = []
        self.ends = False

    def run(self) -> None:
        while not self.ends:
            began = time.perf_counter()
            time.sleep(0.001)
            self.late.append(time.perf_counter() - began - 0.001)


def watched(seconds: float) -> Waits:
    waits = Waits()
    waits.start()
    time.sleep(seconds)
    waits.ends = True
    waits.join()
    return waits


def show_resync(objects: int) -> None:
    index = KVIndex(1 << 30, follow_engines=False)
    hub = Hub(256 << 20, index.observe)
    bus, tier = Bus([hub]), TableTier()
    tier.fill(objects)
    events = L2Events([tier], bus)  # type: ignore[list-item]
    bus.start()
    alone = watched(2.0)
    waits, turns = Waits(), []
    waits.start()
    began, cpu = time.perf_counter(), time.process_time()
    more = True
    while more or L2Resynced in bus.needs_resync:
        turn = time.perf_counter()
        more = events.step()
        turns.append(time.perf_counter() - turn)
        time.sleep(0 if more else 0.001)  # the loop's other work
    bus.flush(60)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    waits.ends = True
    waits.join()
    status = index.status()
    assert status.blocks == objects
    rows: list[list[object]] = [
        ["until all are known, s", seconds],
        ["of a processor, s", cpu],
        ["longest turn, ms", max(turns) * 1e3],
        ["p99 turn, ms", percentile(turns, 0.99) * 1e3],
        ["late wake-up of a thread, p99 ms", percentile(waits.late, 0.99) * 1e3],
        ["the same without a resync", percentile(alone.late, 0.99) * 1e3],
        ["bytes of the index an object", status.memory_bytes / objects],
    ]
    print(table([f"{objects} objects found", ""], rows))
    bus.close()
    index.close()


def show_changes() -> None:
    rows: list[list[object]] = []
    for count in (0, 1, 2):
        bus, tiers = Bus([Hub(1 << 20, lambda event: None)], limit=1 << 30), [TableTier() for _ in range(count)]
        events = L2Events(tiers, bus)  # type: ignore[arg-type]
        bus.start()
        names = [ObjectName(NAMESPACE, 0, random.randbytes(32)) for _ in range(16)]
        for _ in range(10):
            events.step()
        took = []
        for _ in range(2000):
            began = time.perf_counter()
            for stored in (True, False):
                for name in names if tiers else ():
                    tiers[0].changed(stored, name)
                events.step()
            took.append((time.perf_counter() - began) / 16 * 1e6)
        rows.append([count, percentile(took, 0.5), percentile(took, 0.99)])
        bus.close()
    print(table(["tiers", "us of the loop an object, written and removed, p50", "p99"], rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--objects", type=int, default=1_000_000)
    options = parser.parse_args()
    show_resync(options.objects)
    show_changes()


if __name__ == "__main__":
    main()
