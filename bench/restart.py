"""Cost of a restart with --l1-file, beside one that begins empty: SIGTERM to exit, start to ready, first hit, all hits, memory.

python bench/restart.py [--chunks 100000 1000000] [--chunk-bytes 4096] [--folder /dev/shm]
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import tempfile
import time
from array import array

from common import table
from rig import BenchDaemon, BenchWorker, rss_bytes

from kvserver._native import HostRegion, digest_objects
from kvserver.protocol import KEY_BYTES

KEYS, BLOCK_TOKENS = 512, 16
DIGESTED_BYTES = 256 << 20


class Rig:
    """Daemons one after the other on one file, and the keys of what was stored, a message a row."""

    def __init__(self, chunks: int, chunk_bytes: int, folder: str) -> None:
        self._folder = tempfile.mkdtemp(prefix="kvb-", dir=folder)
        self._flags = {
            "l1_file": f"{self._folder}/l1",
            "l1_size": (chunks + KEYS) * chunk_bytes,
            "chunk_tokens": BLOCK_TOKENS,
        }
        self._chunk_bytes = chunk_bytes
        self.daemon = BenchDaemon(**self._flags)
        self._worker = self._connect()
        source = random.Random(0)
        self.messages = [source.randbytes(KEYS * KEY_BYTES) for _ in range(chunks // KEYS)]

    def _connect(self) -> BenchWorker:
        return BenchWorker(
            self.daemon.endpoint, planes=1, run=self._chunk_bytes, num_blocks=1 + KEYS, block_tokens=BLOCK_TOKENS
        )

    def store(self) -> None:
        blocks = array("I", range(1, 1 + KEYS))
        for keys in self.messages:
            self._worker.store(keys, blocks)

    def stop(self, number: signal.Signals) -> float:
        """Seconds until the daemon has ended."""
        began = time.perf_counter()
        self.daemon.process.send_signal(number)
        self.daemon.process.wait()
        return time.perf_counter() - began

    def start(self) -> float:
        """Seconds until the daemon is ready. The worker registers again."""
        self.daemon = BenchDaemon(**self._flags)
        self._worker = self._connect()
        return self.daemon.seconds_to_ready

    def hits(self, message: bytes) -> int:
        return self._worker.lookup(message)

    def seconds_until_warm(self) -> tuple[float, float, float]:
        """Seconds from now until the last message's chunks are found, and all of them; and the share that is found."""
        began = time.perf_counter()
        while self.hits(self.messages[-1]) < KEYS and time.perf_counter() - began < 60:
            time.sleep(0.001)
        first = time.perf_counter() - began
        left = list(self.messages)
        while left and time.perf_counter() - began < 60:
            if self.hits(left[-1]) == KEYS:
                left.pop()
            else:
                time.sleep(0.005)
        return first, time.perf_counter() - began, 1 - len(left) / len(self.messages)

    def close(self) -> None:
        self.daemon.close()
        shutil.rmtree(self._folder)


def measure(chunks: int, chunk_bytes: int, folder: str) -> list[object]:
    rig = Rig(chunks, chunk_bytes, folder)
    try:
        rig.store()
        before = rss_bytes(rig.daemon.process.pid)
        stopped, ready = rig.stop(signal.SIGTERM), rig.start()
        first, warm, share = rig.seconds_until_warm()
        after = rss_bytes(rig.daemon.process.pid)
        rig.stop(signal.SIGKILL)
        cold = rig.start()
        return [chunks, stopped, ready, cold, first, warm, f"{share:.1%}", before / 2**20, after / 2**20]
    finally:
        rig.close()


def digest_rate(threads: int) -> float:
    """GB/s."""
    region = HostRegion(DIGESTED_BYTES)
    pages, pages_each = DIGESTED_BYTES // 4096, 64
    objects = [(first, pages_each) for first in range(0, pages, pages_each)]
    counts = array("I", [1] * len(objects)).tobytes()
    extents = array("I", [number for extent in objects for number in extent]).tobytes()
    digest_objects(region, 4096, counts, extents, threads)  # the first touch
    began = time.perf_counter()
    digest_objects(region, 4096, counts, extents, threads)
    return DIGESTED_BYTES / (time.perf_counter() - began) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--chunk-bytes", type=int, default=4096)
    parser.add_argument("--folder", default="/dev/shm")
    arguments = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    print(f"digests: {digest_rate(1):.1f} GB/s by 1 thread, {digest_rate(threads):.1f} by {threads}")
    header = [
        "chunks",
        "SIGTERM to exit s",
        "to ready s",
        "empty s",
        "first hit s",
        "all hits s",
        "kept",
        "MiB before",
        "after",
    ]
    print(table(header, [measure(chunks, arguments.chunk_bytes, arguments.folder) for chunks in arguments.chunks]))


if __name__ == "__main__":
    main()
