"""Tiers of L2 in shared stores, beside their client library's own loop with a checksum of the same bytes, in the same run.

    .venv/bin/python bench/l2_remote.py [--size MIB ...] [--only valkey|s3]

The servers are those of the tests, on this machine: Valkey, and moto for S3, which is slow itself. `loop`: one thread that calls the
library and XXH3; `threads`: as many as the tier has lanes, each with a client. The tier does what they do, and gathers from and
scatters to L1; before its puts it has probed, as a lookup does. Expected is 0.85 of the faster one.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from common import alternate, median, table
from support.l1_memory import PAGE, name, within
from support.s3 import CREDENTIALS, S3Server
from support.shared_tiers import SharedStore, TierDaemon
from support.valkey import ValkeyStore

from kvserver._native import checksum
from kvserver.config import parse_tiers
from kvserver.l2 import TierOutcome
from kvserver.l2.remote import s3, valkey
from kvserver.l2.remote.make import LANES
from kvserver.l2.remote.store import StoreClient

ROUNDS, TOTAL_BYTES = 5, 128 << 20
Connect = Callable[[], StoreClient]


class Loop:
    """Threads that call the client library and the checksum, and nothing else."""

    def __init__(self, connect: Connect, threads: int, size: int, count: int) -> None:
        self._clients = [connect() for _ in range(threads)]
        self._buffers = [memoryview(bytearray(size)) for _ in range(threads)]
        self._values = [os.urandom(size) for _ in range(count)]  # as L1 has them: not in the CPU's caches
        self._places: list[tuple[str, bytes]] = []

    def put(self) -> float:
        self._places = [(uuid.uuid4().hex, value) for value in self._values]
        return self._run(self._put)

    def get(self) -> float:
        return self._run(self._get)

    def _put(self, number: int, where: str, value: bytes) -> None:
        checksum(value)
        self._clients[number].put(where, memoryview(value))

    def _get(self, number: int, where: str, value: bytes) -> None:
        found = self._clients[number].get(where, self._buffers[number])
        assert found is not None
        checksum(self._values[0])  # as many bytes, and as near

    def _run(self, step: Callable[[int, str, bytes], None]) -> float:
        """GB/s."""
        waiting = list(self._places)

        def work(number: int) -> None:
            while True:
                try:
                    where, value = waiting.pop()
                except IndexError:
                    return
                step(number, where, value)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(len(self._clients))]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(map(len, self._values)) / (time.perf_counter() - began) / 1e9


class Tier:
    def __init__(self, url: str, size: int, count: int) -> None:
        self._daemon = TierDaemon(url, pages=(count + 4) * (size // PAGE + 2))
        self._daemon.until_open()
        self._memory = [self._daemon.l1.object(size) for _ in range(count)]
        self._bytes, self._first = size * count, 0

    def put(self) -> float:
        self._first += len(self._memory)
        self._daemon.probe(list(range(self._first, self._first + len(self._memory))))
        return self._run(lambda number, memory: self._daemon.tier.put(name(number), memory, b"", within(100)))

    def get(self) -> float:
        return self._run(lambda number, memory: self._daemon.tier.get(name(number), memory, within(100)))

    def close(self) -> None:
        self._daemon.tier.close(within(5))

    def _run(self, begin: Callable[..., int]) -> float:
        """GB/s."""
        began = time.perf_counter()
        tickets = [begin(self._first + number, memory) for number, memory in enumerate(self._memory)]
        ends = self._daemon.ends.all(tickets, 100)
        seconds = time.perf_counter() - began
        assert {end.outcome for end in ends} == {TierOutcome.DONE}, ends
        return self._bytes / seconds / 1e9


def measure(kind: str, store: SharedStore, connect: Connect, lanes: int, url: str, size: int) -> list[list[object]]:
    count = max(2 * lanes, TOTAL_BYTES // size)
    loop, threads, tier = Loop(connect, 1, size, count), Loop(connect, lanes, size, count), Tier(url, size, count)
    rows = []
    for what in ("put", "get"):
        found = alternate(ROUNDS, *(getattr(each, what) for each in (loop, threads, tier)))
        ours, best = median(found[2]), max(median(found[0]), median(found[1]))
        rows.append([kind, size / (1 << 20), what, median(found[0]), median(found[1]), ours, ours / best])
    tier.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, nargs="+", default=[0.25, 2, 16], help="MiB of an object")
    parser.add_argument("--only", choices=["valkey", "s3"])
    arguments = parser.parse_args()
    os.environ.update(CREDENTIALS)
    rows: list[list[object]] = []
    for mebibytes in arguments.size:
        size = int(mebibytes * (1 << 20))
        if arguments.only != "s3":
            with tempfile.TemporaryDirectory() as folder:
                store = ValkeyStore(Path(folder))
                url = store.url_of("bench", "timeout=60s", "expiry=60s")
                place = valkey.ValkeyUrl(*parse_tiers([url]))
                valkey.require_client(*parse_tiers([url]))
                rows += measure("valkey", store, lambda place=place: valkey.connect(place), LANES["valkey"], url, size)
                store.close()
        if arguments.only != "valkey":
            server = S3Server()
            url = server.url_of("bench", "timeout=60s")
            bucket = s3.S3Url(*parse_tiers([url]))
            rows += measure("s3", server, lambda bucket=bucket: s3.connect(bucket), LANES["s3"], url, size)
            server.close()
    print(table(["kind", "MiB", "", "loop GB/s", "threads", "tier", "tier/best"], rows))


if __name__ == "__main__":
    main()
