"""Store and load through a real daemon: one request of 8192 tokens of a 8B-like model, and one chunk.

    python bench/daemon.py [--rounds 9] [--samples 1000]

First table, per number of copy threads: GB/s of a store of fresh chunks and of a load, from the send to
the reply, beside memcpy with as many threads, measured in turn. L1 is touched by a first round, which
does not count. Second table: milliseconds of a load of one chunk, p50 and p99.
"""

from __future__ import annotations

import argparse
import itertools
import time
from array import array

from common import MemcpyCeiling, alternate, median, percentile, table
from rig import BenchDaemon, BenchWorker, make_keys

from kvserver.protocol import Clear, Cleared

TOKENS, CHUNK_TOKENS, BLOCK_TOKENS, PLANES = 8192, 256, 32, 32
RUN = BLOCK_TOKENS * 8 * 128 * 2 * 2  # one layer's block: 8 KV heads of 128, K and V, bf16
BLOCKS = TOKENS // BLOCK_TOKENS
PAYLOAD = BLOCKS * PLANES * RUN


class Subject:
    """A daemon with `threads` copy threads and a worker whose `blocks` blocks are all stored under one prefix."""

    def __init__(self, threads: int, planes: int = PLANES, run: int = RUN) -> None:
        self.payload = BLOCKS * planes * run
        self._chunks = TOKENS // CHUNK_TOKENS
        # A slot is whole pages, and granules of them.
        self.daemon = BenchDaemon(
            l1_size=self.payload + self.payload // 16 + (64 << 20), chunk_tokens=CHUNK_TOKENS, copy_threads=threads
        )
        self.worker = BenchWorker(
            self.daemon.endpoint, planes=planes, run=run, num_blocks=BLOCKS + 1, block_tokens=BLOCK_TOKENS
        )
        self.ids = array("I", range(1, BLOCKS + 1))
        self._names = itertools.count()
        self.keys = b""

    def store(self) -> float:
        """GB/s. The chunks of the round before are cleared first, so that these go into touched pages."""
        self.worker.client.ask(Clear(), Cleared)
        self.keys = make_keys(f"{next(self._names)}", self._chunks)
        began = time.perf_counter()
        self.worker.store(self.keys, self.ids)
        return self.payload / (time.perf_counter() - began) / 1e9

    def load(self) -> float:
        began = time.perf_counter()
        self.worker.load(self.keys, self.ids)
        return self.payload / (time.perf_counter() - began) / 1e9

    def load_chunk(self) -> float:
        """Milliseconds."""
        began = time.perf_counter()
        self.worker.load(self.keys[:32], self.ids[: CHUNK_TOKENS // BLOCK_TOKENS])
        return (time.perf_counter() - began) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--samples", type=int, default=1000)
    options = parser.parse_args()
    rows: list[list[object]] = []
    small: list[list[object]] = []
    for threads in (1, 2):
        subject = Subject(threads)
        ceiling = MemcpyCeiling(PAYLOAD, threads)
        memcpy, store, load = (
            median(found) for found in alternate(options.rounds, ceiling.gb_per_second, subject.store, subject.load)
        )
        rows.append([threads, memcpy, store, load, store / memcpy, load / memcpy])
        times = [subject.load_chunk() for _ in range(options.samples)]
        chunk_bytes = CHUNK_TOKENS // BLOCK_TOKENS * PLANES * RUN
        bare = chunk_bytes / memcpy / 1e6
        small.append([threads, chunk_bytes >> 20, bare, percentile(times, 0.5), percentile(times, 0.99)])
        subject.daemon.close()
    print(table(["threads", "memcpy GB/s", "store", "load", "store ratio", "load ratio"], rows))
    print()
    print(table(["threads", "chunk MiB", "at memcpy's rate ms", "p50 ms", "p99 ms"], small))


if __name__ == "__main__":
    main()
