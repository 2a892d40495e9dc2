"""What a chunk costs beside its bytes, and what a lookup costs, by how many chunks L1 holds.

python bench/index_memory.py [--chunks 10000 100000 1000000] [--ranks 1 8]
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import random
import statistics
import time
from concurrent.futures import ProcessPoolExecutor

from common import table

from kvserver.cache import POLICIES, Cache, PagePool
from kvserver.protocol import KEY_BYTES

NAMESPACE, SLOT_BYTES, KEYS = b"n" * 32, 2 << 20, 512
LOOKUPS = 1000


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def filled(chunks: int, ranks: int) -> Cache:
    """A cache of so many READY chunks, stored KEYS at a time as a server does it. Half of them were used again."""
    page_bytes = 4096
    pool = PagePool((chunks + KEYS) * ranks * SLOT_BYTES, page_bytes)
    cache = Cache(pool, POLICIES["lru"]())
    rng = random.Random(0)
    for first in range(0, chunks, KEYS):
        keys = rng.randbytes(KEY_BYTES * min(KEYS, chunks - first))
        for rank in range(ranks):
            cache.finish_store(cache.plan_store(NAMESPACE, ranks, rank, keys, SLOT_BYTES), copied=True)
        if rng.random() < 0.5:
            assert cache.lookup(NAMESPACE, keys, ("engine", "request"), 1e9).hit_chunks
            cache.end_lease(("engine", "request"))
    assert cache.index.chunk_count == chunks
    return cache


def lookup_micros(cache: Cache) -> float:
    """Median of looking up KEYS chunks that are there, and of ending the lease, each time others."""
    rng = random.Random(1)
    known = [chunk.key for chunk in cache.index]
    took = []
    for _ in range(LOOKUPS):
        first = rng.randrange(len(known) - KEYS)
        keys = b"".join(known[first : first + KEYS])
        began = time.perf_counter()
        assert cache.lookup(NAMESPACE, keys, ("engine", "request"), 1e9).hit_chunks == KEYS
        took.append((time.perf_counter() - began) * 1e6)
        cache.end_lease(("engine", "request"))
    return statistics.median(took)


def measure(chunks: int, ranks: int) -> tuple[float, float]:
    gc.freeze()  # as the server does
    before = resident_bytes()
    cache = filled(chunks, ranks)
    gc.collect()
    return (resident_bytes() - before) / chunks, lookup_micros(cache)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8])
    options = parser.parse_args()
    rows: list[list[object]] = []
    for ranks in options.ranks:
        for chunks in options.chunks:  # each in a fresh process: freed memory stays with the process
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
                resident, micros = fresh.submit(measure, chunks, ranks).result()
            rows.append([ranks, chunks, resident, micros])
    print(table(["ranks", "chunks", "resident bytes a chunk", f"lookup of {KEYS} us"], rows))


if __name__ == "__main__":
    main()
