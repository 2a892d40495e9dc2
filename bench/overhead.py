"""What a daemon uses beside L1, each part beside what `kvserver doctor` assumes for it (kvserver/config/capacity.py).

python bench/overhead.py [--chunks 102400]
"""

from __future__ import annotations

import argparse
import threading
import urllib.request

from common import table
from index_memory import KEYS, fresh, resident_bytes, whole
from rig import BenchDaemon, rss_bytes

from kvserver.cache import LookupOutcome
from kvserver.config import MiB, Settings, bytes_beside_l1
from kvserver.events import QUEUE_COST, Bus, Event, LookupEnded, Subscriber
from kvserver.protocol import KEY_BYTES

L1_BYTES = 64 * MiB
SCRAPES = 100
PROCESS_MIB, QUEUE_MIB, INDEXED_BYTES = 128, 288, 512  # as bytes_beside_l1 assumes them


def idle_bytes(**flags: object) -> float:
    """Of a daemon without engines whose pages are read again and again."""
    daemon = BenchDaemon(l1_size=L1_BYTES, **flags)
    try:
        for number in range(SCRAPES):
            page = ("metrics", "status")[number % 2]
            urllib.request.urlopen(f"http://127.0.0.1:{daemon.http_port}/{page}").read()
        return rss_bytes(daemon.process.pid)
    finally:
        daemon.close()


class _Stuck(Subscriber):
    """Handles its first event when it is released."""

    def __init__(self) -> None:
        self.name = "stuck"
        self.released = threading.Event()

    def handle(self, event: Event) -> None:
        self.released.wait()

    def close(self) -> None:
        """Nothing is open."""


def _lookup(number: int, chunks: int) -> LookupEnded:
    keys, request = bytes(KEY_BYTES * chunks), f"request {number}"
    return LookupEnded(number, "engine", "model", request, number, keys, LookupOutcome(chunks, chunks), 256)


def queue_bytes(chunks: int) -> float:
    """Of as many lookups of so many chunks as the queue of events takes."""
    stuck = _Stuck()
    bus = Bus([stuck])
    bus.start()
    before, published = resident_bytes(), 0
    while bus.publish(_lookup(published, chunks), KEY_BYTES * chunks):
        published += 1
    grown = resident_bytes() - before
    stuck.released.set()
    bus.close()
    assert published > QUEUE_COST // 2
    return grown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=200 * KEYS)
    options = parser.parse_args()
    rows: list[list[object]] = [
        ["a daemon, its pages read 100 times, MiB", idle_bytes() / MiB, PROCESS_MIB],
        ["the same with --otlp-endpoint grpc://", idle_bytes(otlp_endpoint="grpc://127.0.0.1:1") / MiB, PROCESS_MIB],
        ["a full queue of events: lookups of 16 chunks, MiB", fresh(queue_bytes, 16) / MiB, QUEUE_MIB],
        ["the same, of 100 chunks", fresh(queue_bytes, 100) / MiB, QUEUE_MIB],
    ]
    full, replaced = whole(options.chunks, 1, kv_events=False)
    rows += [
        [f"{options.chunks} objects, bytes of each", full, INDEXED_BYTES],
        ["the same once all have been replaced", replaced, INDEXED_BYTES],
    ]
    print(table(["what", "measured", "assumed"], rows))
    needed = bytes_beside_l1(Settings(), 20 << 30) / MiB
    print(f"beside an L1 of 20 GiB with defaults: {needed:.0f} MiB, of which --kv-index-size 256 MiB")


if __name__ == "__main__":
    main()
