"""What an announced chunk costs: its description, the reference to it, and the counts of its blocks."""

from __future__ import annotations

import subprocess
import sys

CHUNKS, MOST = 40_000, 4300

# In a process of its own: memory that an earlier test freed would be used again, unseen.
PROGRAM = f"""
import os, random, time
from kvserver.kv_events.resident import ResidentChunks
from kvserver.kv_events.stream import Stream, StreamOptions
from kvserver.kv_events.types import Description, KVChunk, KVStored, Tier

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

rng, prefix, resident_chunks = random.Random(0), bytes(64), ResidentChunks()
stream = Stream("model", "int", StreamOptions("kv-events", False, 1 << 20, 1), resident_chunks)
stream.reader_connected("engine", prefix, ())
described_bytes = 0

def store(count):
    global described_bytes
    chunks = []
    for _ in range(count):
        hashes = rng.randbytes(16 * 32)
        described = Description(32, hashes, rng.randbytes(32), rng.randbytes(16 * 16 * 4), 16)
        chunks.append(KVChunk(hashes[-32:], described))
        described_bytes += described.size
    event = KVStored(1, 1, Tier.L1, prefix, tuple(chunks))
    resident_chunks.add(Tier.L1, prefix, chunks)
    stream.stored(event)

for _ in range(20):
    store(256)  # the buffer is full
before, described_bytes = resident(), 0
for _ in range({CHUNKS} // 250):
    store(250)
assert stream.announced_blocks == 16 * ({CHUNKS} + 20 * 256)
print((resident() - before) / {CHUNKS}, described_bytes / {CHUNKS}, stream.state_bytes / ({CHUNKS} + 20 * 256))
"""


def test_an_announced_chunk_of_256_tokens_uses_at_most_4300_bytes() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    resident, described, counted = map(float, run.stdout.split())
    print(f"{resident:.0f} bytes a chunk: its description {described:.0f}, the counts of its 16 blocks {counted:.0f}")
    assert described + 640 < resident <= MOST  # 40 bytes for each block at least
