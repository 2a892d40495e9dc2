"""Cost of a restart with --l1-file, beside one that begins empty: SIGTERM to exit, start to ready, first hit, all hits, memory.

python bench/restart.py [--chunks 100000 1000000] [--chunk-bytes 4096] [--folder /dev/shm] [--trace KIND] [--prefill 10000]

Columns: seconds from SIGTERM to the daemon's end, from a start to its line, of an empty one to its line, from the line to the first
hit, and from the line until L1 has adopted all; hits afterwards as a share of those before; resident memory before, and afterwards.
CPU: the daemon's processor seconds of the stop, and of the start until all is adopted. They count on a machine that others use.

The second table replays a minute of a trace (`traces.py`) around a restart, in real time: the minute begins with SIGTERM, and a
prompt that arrives before the daemon is ready finds nothing. Prefill is what the engine would compute at that rate, of tokens a second.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import resource
import shutil
import signal
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence

from common import table
from rig import BenchDaemon, BenchWorker, cpu_seconds, rss_bytes
from traces import BLOCK_TOKENS as TRACE_TOKENS
from traces import KINDS, Prompt, prompts

from kvserver._native import HostRegion, digest_objects
from kvserver.protocol import KEY_BYTES

KEYS, BLOCK_TOKENS = 512, 16
DIGESTED_BYTES = 256 << 20
WARM_SECONDS = 120.0  # the longest wait for all hits
MINUTE = 60.0


def of_ended_children() -> float:
    """Processor seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Rig:
    """Daemons one after the other on one file, and a worker beside each."""

    def __init__(self, chunks: int, chunk_bytes: int, folder: str, block_tokens: int = BLOCK_TOKENS) -> None:
        self._folder = tempfile.mkdtemp(prefix="kvb-", dir=folder)
        self._flags = {
            "l1_file": f"{self._folder}/l1",
            "l1_size": (chunks + KEYS) * chunk_bytes,
            "chunk_tokens": block_tokens,
        }
        self._chunk_bytes, self._block_tokens = chunk_bytes, block_tokens
        self.daemon = BenchDaemon(**self._flags)
        while os.stat(f"{self._folder}/l1").st_blocks * 512 < (chunks + KEYS) * chunk_bytes:  # else L1 is smaller
            time.sleep(0.1)
        self.worker = self._connect()

    def _connect(self) -> BenchWorker:
        return BenchWorker(
            self.daemon.endpoint, planes=1, run=self._chunk_bytes, num_blocks=1 + KEYS, block_tokens=self._block_tokens
        )

    def store(self, keys: bytes) -> None:
        """At most KEYS keys."""
        self.worker.store(keys, array("I", range(1, 1 + len(keys) // KEY_BYTES)))

    def stop(self, number: signal.Signals) -> float:
        """Seconds until the daemon has ended."""
        began = time.perf_counter()
        self.daemon.process.send_signal(number)
        self.daemon.process.wait()
        return time.perf_counter() - began

    def start(self) -> float:
        """Seconds until the daemon is ready. The worker registers again."""
        self.daemon = BenchDaemon(**self._flags)
        self.worker = self._connect()
        return self.daemon.seconds_to_ready

    def close(self) -> None:
        self.daemon.close()
        shutil.rmtree(self._folder)


def seconds_until(worker: BenchWorker, message: bytes) -> float:
    """Seconds until all of the message's chunks are found."""
    began = time.perf_counter()
    while worker.lookup(message) < len(message) // KEY_BYTES and time.perf_counter() - began < WARM_SECONDS:
        time.sleep(0.02)
    return time.perf_counter() - began


def measure(chunks: int, chunk_bytes: int, folder: str) -> list[object]:
    rig = Rig(chunks, chunk_bytes, folder)
    source = random.Random(0)
    messages = [source.randbytes(KEYS * KEY_BYTES) for _ in range(chunks // KEYS)]
    try:
        for message in messages:
            rig.store(message)
        sample = messages[:: max(1, len(messages) // 20)]
        before = sum(map(rig.worker.lookup, sample))
        memory = rss_bytes(rig.daemon.process.pid)
        used = of_ended_children() + cpu_seconds(rig.daemon.process.pid)
        stopped = rig.stop(signal.SIGTERM)
        of_stop = of_ended_children() - used
        ready = rig.start()
        first = seconds_until(rig.worker, messages[-1])
        warm = first + seconds_until(rig.worker, messages[1])  # the oldest that no lookup has used: adopted last
        of_start = cpu_seconds(rig.daemon.process.pid)
        kept = sum(map(rig.worker.lookup, sample)) / before
        after = rss_bytes(rig.daemon.process.pid)
        rig.stop(signal.SIGKILL)
        cold = rig.start()
        cpu = [of_stop, of_start]
        return [chunks, stopped, ready, cold, first, warm, f"{kept:.1%}", *cpu, memory / 2**20, after / 2**20]
    finally:
        rig.close()


# ---- a trace ------------------------------------------------------------------------------------


def keys_of(path: Sequence[int]) -> bytes:
    """Keys of a prompt's first blocks, as many as one message has."""
    return b"".join(hashlib.sha256(str(block).encode()).digest() for block in path[:KEYS])


def serve(worker: BenchWorker, store: Callable[[bytes], None], path: Sequence[int]) -> int:
    """Look up a prompt and store what it lacks; returns the tokens that were found."""
    keys = keys_of(path)
    found = worker.lookup(keys)
    if missed := keys[found * KEY_BYTES :]:
        store(missed)
    worker.end_request()
    return found * TRACE_TOKENS


def minute_around(rig: Rig, minute: Sequence[Prompt], number: signal.Signals) -> int:
    """Tokens that are found in the minute that begins with this signal, in real time."""
    began = time.perf_counter()
    rig.stop(number)
    rig.start()
    found = 0
    for now, path in minute:
        wait = now - (time.perf_counter() - began)
        if wait >= 0:  # else it has come while there was no daemon
            time.sleep(wait)
            found += serve(rig.worker, rig.store, path)
    return found


def replayed(kind: str, tokens_per_second: float, folder: str) -> list[object]:
    """A row: the trace's last minute, with L1 kept and with L1 lost."""
    trace = prompts(kind)
    end = trace[-1][0] - MINUTE
    past = [path for now, path in trace if now < end]
    minute = [(now - end, path) for now, path in trace if now >= end]
    found = []
    for number in (signal.SIGTERM, signal.SIGKILL):
        rig = Rig(len({block for path in past for block in path}), 4096, folder, TRACE_TOKENS)
        try:
            for path in past:
                serve(rig.worker, rig.store, path)
            found.append(minute_around(rig, minute, number))
        finally:
            rig.close()
    tokens = sum(len(path[:KEYS]) * TRACE_TOKENS for _, path in minute)
    kept, lost = found
    return [kind, len(minute), tokens, kept, lost, (kept - lost) / tokens_per_second]


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
    parser.add_argument("--chunks", type=int, nargs="*", default=[100_000, 1_000_000])
    parser.add_argument("--chunk-bytes", type=int, default=4096)
    parser.add_argument("--folder", default="/dev/shm")
    parser.add_argument("--trace", choices=KINDS, nargs="*", default=["agents"])
    parser.add_argument("--prefill", type=float, default=10_000)
    arguments = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    print(f"digests: {digest_rate(1):.1f} GB/s by 1 thread, {digest_rate(threads):.1f} by {threads}")
    header = ["chunks", "SIGTERM to exit s", "to ready s", "empty s", "first hit s", "all hits s", "kept"]
    header += ["CPU of stop", "of start", "MiB before", "after"]
    rows = [measure(chunks, arguments.chunk_bytes, arguments.folder) for chunks in arguments.chunks]
    print(table(header, rows))
    header = [
        "trace",
        "prompts",
        "tokens",
        "found, L1 kept",
        "L1 lost",
        f"s of prefill saved at {arguments.prefill:.0f}/s",
    ]
    print(table(header, [replayed(kind, arguments.prefill, arguments.folder) for kind in arguments.trace]))


if __name__ == "__main__":
    main()
