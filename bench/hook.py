"""What the hook in vLLM's block pool costs per event, beside vLLM's own collector at rate 1.0 in the same run.

    .venv-vllm/bin/python bench/hook.py [--rounds 15] [--blocks 4096]

Three real pools do the same work in turn: one without a collector, one with vLLM's collector, one with ours, which also
hands its records over. Columns: the pool's own nanoseconds per block of each operation, then what each adds to that.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from common import median, table
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvserver.adapters.vllm.blockpool import PoolHook

BLOCK_TOKENS = 16
BATCH = 64  # blocks of a request
OPERATIONS = ["evict and allocate", "access", "release", "hand over"]


def make_requests(count: int) -> list[Request]:
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
    parameters = SamplingParams(max_tokens=1)
    size = BATCH * BLOCK_TOKENS
    return [
        Request(str(n), list(range(n * size, (n + 1) * size)), parameters, None, block_hasher=hasher)
        for n in range(count)
    ]


class Rig:
    """A pool at work; every block that it allocates was cached, so each allocation evicts, but in the first round."""

    def __init__(self, blocks: int, requests: list[Request], watch: str) -> None:
        collector = KVCacheMetricsCollector(1.0) if watch == "vllm" else None
        self.pool = BlockPool(blocks + 1, True, BLOCK_TOKENS, metrics_collector=collector)
        self.requests = requests
        self.collector = collector
        self.hook: PoolHook | None = None
        if watch == "ours":
            self.hook = PoolHook(lambda block_id: None)
            self.hook.install(self.pool)

    def round(self) -> dict[str, float]:
        """Nanoseconds per block of each operation."""
        spent: Counter[str] = Counter()
        pool = self.pool

        def timed(name: str, action: Any, *arguments: Any) -> Any:
            began = time.perf_counter_ns()
            found = action(*arguments)
            spent[name] += time.perf_counter_ns() - began
            return found

        for request in self.requests:
            blocks = timed("evict and allocate", pool.get_new_blocks, BATCH)
            pool.cache_full_blocks(request, blocks, 0, BATCH, BLOCK_TOKENS, 0)
            timed("access", pool.touch, blocks)
            timed("release", pool.free_blocks, blocks)
            pool.free_blocks(blocks)
            if self.hook is not None:
                timed("hand over", self.hook.drain_records)
            elif self.collector is not None:
                timed("hand over", self.collector.drain_events)
        return {name: spent[name] / (len(self.requests) * BATCH) for name in OPERATIONS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--blocks", type=int, default=4096)
    options = parser.parse_args()
    requests = make_requests(options.blocks // BATCH)
    rigs = {watch: Rig(options.blocks, requests, watch) for watch in ("none", "vllm", "ours")}
    for rig in rigs.values():
        rig.round()
    found: dict[str, list[dict[str, float]]] = {watch: [] for watch in rigs}
    for _ in range(options.rounds):
        for watch, rig in rigs.items():
            found[watch].append(rig.round())
    rows = []
    for name in OPERATIONS:
        bare, theirs, ours = (median([r[name] for r in found[watch]]) for watch in ("none", "vllm", "ours"))
        rows.append([name, bare, theirs - bare, ours - bare])
    rows.append(["all", *(sum(row[column] for row in rows) for column in (1, 2, 3))])
    print("nanoseconds per block; `evict and allocate` is two events, `hand over` of five records or one event")
    print(table(["operation", "pool", "+ vLLM's", "+ ours"], rows))


if __name__ == "__main__":
    main()
