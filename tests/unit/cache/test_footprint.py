"""What a chunk costs beside its bytes."""

from __future__ import annotations

import subprocess
import sys

import pytest

CHUNKS, MOST = 100_000, 320

# In a process of its own: memory that an earlier test freed would be used again, unseen.
PROGRAM = f"""
import os, random, sys
from kvserver.cache import one_group, POLICIES, Cache, PagePool
from kvserver.config import Settings

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

slot_bytes = int(sys.argv[1])
cache = Cache(PagePool({CHUNKS} * slot_bytes, 4096), POLICIES[Settings().eviction_policy]())
rng = random.Random(0)
before = resident()
for _ in range({CHUNKS} // 500):
    keys = rng.randbytes(500 * 32)
    cache.finish_store(cache.plan_store(b"n" * 32, one_group(1), keys, slot_bytes), copied=True)
    if rng.random() < 0.5:
        assert cache.lookup(b"n" * 32, keys, ("engine", "request"), 1e9).hit_chunks == 500
        cache.end_lease(("engine", "request"))
assert cache.index.chunk_count == {CHUNKS}
print((resident() - before) / {CHUNKS})
"""


@pytest.mark.parametrize("slot_bytes", [192 << 10, 32 << 20])
def test_a_chunk_uses_at_most_320_bytes_however_large_it_is(slot_bytes: int) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(slot_bytes)], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    assert 100 < float(run.stdout) <= MOST
