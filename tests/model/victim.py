"""An engine that is killed in the middle of a store. Usage: python -m model.victim ENDPOINT ID SEED FIRST COUNT GPU

It fills its memory from the seed, begins to store chunks FIRST to FIRST + COUNT of the chain of that
seed, prints "copying" and waits for its end. Its parent can work out every byte that it stored.
"""

from __future__ import annotations

import random
import sys
import time

from support.worker import Worker, make_keys

CHAIN = 12
BLOCK_CHUNKS = 3  # at most so many in one store


def chain(number: int) -> list[bytes]:
    return make_keys(CHAIN, seed=f"chain {number}")


def contents(seed: int, chunks: int, chunk_blocks: int, block_bytes: int) -> list[bytes]:
    """What the victim's blocks hold, one after the other."""
    rng = random.Random(seed)
    return [rng.randbytes(block_bytes) for _ in range(chunks * chunk_blocks)]


def main() -> None:
    endpoint, instance_id = sys.argv[1:3]
    seed, first, count = map(int, sys.argv[3:6])
    worker = Worker(endpoint, instance_id=instance_id, gpu=sys.argv[6])
    blocks = worker.blocks_for(count)
    for block, content in zip(
        blocks, contents(seed, count, worker.chunk_blocks, worker.geometry.block_bytes), strict=True
    ):
        worker.memory.write(block, content)
    keys = chain(0)[first : first + count]
    worker.lookup(keys)
    worker.begin_store(keys, blocks)
    print("copying", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
