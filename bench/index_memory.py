"""What a chunk costs beside its bytes: in the cache alone, with what a lookup costs, and in a whole daemon, by part.

python bench/index_memory.py [--chunks 10000 100000 1000000] [--ranks 1 8] [--daemons 100000 1000000]
"""

from __future__ import annotations

import argparse
import gc
import itertools
import multiprocessing
import os
import random
import statistics
import time
from array import array
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from common import table
from rig import BenchDaemon, BenchWorker, rss_bytes

from kvserver.cache import POLICIES, Cache, PagePool, one_group
from kvserver.config import Settings
from kvserver.events import ChunksStored
from kvserver.kv_events import KeysStored, Tier
from kvserver.protocol import KEY_BYTES, ChunkContents
from kvserver.routing import KVIndex
from kvserver.telemetry import ChunkLifecycle

NAMESPACE, SLOT_BYTES, KEYS = b"n" * 32, 2 << 20, 512
LOOKUPS = 1000
PAGE_BYTES, BLOCK_TOKENS, CHUNK_BLOCKS, RUN_BYTES = 4096, 16, 16, 64
MOST_L1_BYTES = 5 << 30
MOST_DESCRIBED = 1 << 17  # chunks, which use 3 KB each with KV events


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def filled(chunks: int, ranks: int, policy: str) -> Cache:
    """A cache of so many READY chunks, stored KEYS at a time as a server does it. Half of them were used again."""
    page_bytes = 4096
    pool = PagePool((chunks + KEYS) * ranks * SLOT_BYTES, page_bytes)
    cache = Cache(pool, POLICIES[policy]())
    rng = random.Random(0)
    for first in range(0, chunks, KEYS):
        keys = rng.randbytes(KEY_BYTES * min(KEYS, chunks - first))
        for rank in range(ranks):
            cache.finish_store(
                cache.plan_store(NAMESPACE, one_group(ranks), keys, SLOT_BYTES, slots=range(rank, rank + 1)),
                copied=True,
            )
        if rng.random() < 0.5:
            assert cache.lookup(NAMESPACE, keys, ("engine", "request"), 1e9).hit_chunks
            cache.end_lease(("engine", "request"))
    assert cache.index.chunk_count == chunks
    return cache


def lookup_micros(cache: Cache) -> tuple[float, float]:
    """Medians of looking up KEYS chunks that are there, and of ending their lease, each time others."""
    rng = random.Random(1)
    known = [chunk.key for chunk in cache.index]
    took: list[float] = []
    ends: list[float] = []
    for _ in range(LOOKUPS):
        first = rng.randrange(len(known) - KEYS)
        keys = b"".join(known[first : first + KEYS])
        began = time.perf_counter()
        assert cache.lookup(NAMESPACE, keys, ("engine", "request"), 1e9).hit_chunks == KEYS
        took.append((time.perf_counter() - began) * 1e6)
        began = time.perf_counter()
        cache.end_lease(("engine", "request"))
        ends.append((time.perf_counter() - began) * 1e6)
    return statistics.median(took), statistics.median(ends)


def measure(chunks: int, ranks: int, policy: str) -> tuple[float, float, float]:
    gc.freeze()  # as the server does
    before = resident_bytes()
    cache = filled(chunks, ranks, policy)
    gc.collect()
    return (resident_bytes() - before) / chunks, *lookup_micros(cache)


# ---- a whole daemon -----------------------------------------------------------------------------


def observed(part: str, chunks: int) -> float:
    """Bytes a chunk of one observer of chunks."""
    if part == "match index":
        index = KVIndex(1 << 30, follow_engines=False)

        def store(keys: bytes) -> None:
            index.observe(KeysStored(Tier.L1, NAMESPACE, [keys[at : at + 32] for at in range(0, len(keys), 32)]))
    else:
        lifetimes = ChunkLifecycle(Settings().metrics_sample_rate)

        def store(keys: bytes) -> None:
            lifetimes.handle(ChunksStored(time.monotonic_ns(), "engine", "model", NAMESPACE, keys))

    rng = random.Random(0)
    before = resident_bytes()
    for _ in range(0, chunks, KEYS):
        store(rng.randbytes(KEY_BYTES * KEYS))
    return (resident_bytes() - before) / chunks


class FullDaemon:
    """A daemon whose L1 has space for so many chunks, one page each and rank, and an engine of so many ranks."""

    def __init__(self, chunks: int, ranks: int, kv_events: bool) -> None:
        self._chunks, self._described = chunks, kv_events
        flags = {"kv_events_endpoint": "tcp://127.0.0.1:0", "kv_events_memory": "8GiB"} if kv_events else {}
        l1_bytes, blocks = chunks * ranks * PAGE_BYTES, 1 + KEYS * CHUNK_BLOCKS
        self._daemon = BenchDaemon(l1_size=l1_bytes, chunk_tokens=BLOCK_TOKENS * CHUNK_BLOCKS, **flags)
        self._workers = [
            BenchWorker(
                self._daemon.endpoint, planes=1, run=RUN_BYTES, num_blocks=blocks, block_tokens=BLOCK_TOKENS,
                instance_id="engine", rank=rank, world_size=ranks,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        if kv_events:
            self._workers[0].describe_scheduler()
        # The engine's own memory is mapped, and counts as the daemon's once it was read.
        self._before = self._rss() + l1_bytes + ranks * blocks * RUN_BYTES
        self._blocks = array("I", range(1, blocks))
        self._random = random.Random(0)

    def _rss(self) -> int:
        time.sleep(2)  # events are handled meanwhile
        return rss_bytes(self._daemon.process.pid)

    def store(self, chunks: int) -> float:
        """Bytes a chunk of L1 beside its pages after so many more, at least as many as L1 holds."""
        for _ in range(0, chunks, KEYS):
            keys, contents = self._message()
            for worker in self._workers:
                worker.store(keys, self._blocks, contents=contents)
                contents = None
        return (self._rss() - self._before) / self._chunks

    def _message(self) -> tuple[bytes, ChunkContents | None]:
        if not self._described:
            return self._random.randbytes(KEYS * KEY_BYTES), None
        hashes = [self._random.randbytes(KEY_BYTES) for _ in range(KEYS * CHUNK_BLOCKS)]
        tokens = self._random.randbytes(4 * BLOCK_TOKENS * len(hashes))
        contents = ChunkContents(hash_bytes=KEY_BYTES, hashes=b"".join(hashes), tokens=tokens, parent=b"")
        return b"".join(hashes[CHUNK_BLOCKS - 1 :: CHUNK_BLOCKS]), contents

    def close(self) -> None:
        self._daemon.close()


def whole(chunks: int, ranks: int, kv_events: bool) -> tuple[float, float]:
    """Bytes a chunk of L1 when it has just become full, and when all of it has been replaced twice."""
    daemon = FullDaemon(chunks, ranks, kv_events)
    try:
        return daemon.store(chunks), daemon.store(2 * chunks)
    finally:
        daemon.close()


def fresh(measured: Callable[..., Any], *arguments: object) -> Any:
    """Measured in a process of its own: freed memory stays with a process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measured, *arguments).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--daemons", type=int, nargs="*", default=[100_000, 1_000_000])
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    options = parser.parse_args()
    rows: list[list[object]] = []
    for ranks, chunks, policy in itertools.product(options.ranks, options.chunks, options.policies):
        rows.append([ranks, chunks, policy, *fresh(measure, chunks, ranks, policy)])
    print(
        table(["ranks", "chunks", "policy", "resident bytes a chunk", f"lookup of {KEYS} us", "its end us"], rows),
        end="\n\n",
    )
    rows = []
    parts = ["match index", "lifetimes"]
    for ranks, chunks in itertools.product(options.ranks, options.daemons):
        if chunks * ranks * PAGE_BYTES > MOST_L1_BYTES:
            continue
        chunks -= chunks % KEYS
        known = [
            fresh(measure, chunks, ranks, Settings().eviction_policy)[0],
            *(fresh(observed, part, chunks) for part in parts),
        ]
        full, replaced = whole(chunks, ranks, kv_events=False)
        rows.append([ranks, "off", chunks, *known, "", full - sum(known), full, replaced])
        if chunks * ranks <= MOST_DESCRIBED:
            described, replaced = whole(chunks, ranks, kv_events=True)
            rows.append([ranks, "on", chunks, *known, described - full, full - sum(known), described, replaced])
    print("bytes a chunk of a whole daemon")
    print(table(["ranks", "KV events", "chunks", "cache", *parts, "KV events", "rest", "in all", "replaced"], rows))


if __name__ == "__main__":
    main()
