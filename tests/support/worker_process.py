"""A worker in a process of its own, for tests that kill it. Usage: python -m support.worker_process ENDPOINT ID [GPU]

It stores `CHUNKS` chunks, leases them, begins a store of others and a load, prints "copying" and waits.
"""

from __future__ import annotations

import sys
import time

from support.worker import Worker, make_keys

CHUNKS = 3
STORED = make_keys(CHUNKS, seed="stored by the victim")
UNFINISHED = make_keys(CHUNKS, seed="left unfinished by the victim")


def main() -> None:
    worker = Worker(sys.argv[1], instance_id=sys.argv[2], gpu="".join(sys.argv[3:]))
    worker.store(STORED, worker.blocks_for(CHUNKS))
    worker.lookup(STORED)
    worker.begin_store(UNFINISHED, worker.blocks_for(CHUNKS, first=20))
    worker.begin_load(STORED, worker.blocks_for(CHUNKS, first=40))
    print("copying", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
