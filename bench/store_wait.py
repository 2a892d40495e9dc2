"""Time that a lookup waits for a running store, beside the rest of the store's copy.

    .venv/bin/python bench/store_wait.py [--rounds 200]

One engine stores a fresh prompt of 256 MiB. Another one asks for it at a random moment of the copy, and awaits it. Each wait is divided
by what was left of the store then, as its own engine saw it end. Lookups whose store had ended do not count.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import threading
import time
from array import array
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from common import table
from rig import BenchDaemon, BenchWorker, make_keys

from kvserver.protocol import AwaitFill, LookupReply

CHUNKS, BLOCK_TOKENS, CHUNK_TOKENS = 8, 16, 256
BLOCKS = CHUNKS * CHUNK_TOKENS // BLOCK_TOKENS
PLANES, RUN = 64, 32 << 10  # 256 MiB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    daemon = BenchDaemon(l1_size="2GiB", chunk_tokens=CHUNK_TOKENS)
    try:
        stores, looks = (
            BenchWorker(daemon.endpoint, planes=PLANES, run=RUN, num_blocks=blocks, block_tokens=BLOCK_TOKENS)
            for blocks in (BLOCKS + 1, BLOCKS + 1)
        )
        blocks, rest, waits = array("I", range(1, BLOCKS + 1)), list[float](), list[float]()
        typical = 0.02
        for number in range(options.rounds):
            keys, ended = make_keys(f"wait {number}", CHUNKS), list[float]()
            thread = threading.Thread(
                target=lambda keys=keys, ended=ended: (stores.store(keys, blocks), ended.append(time.perf_counter()))
            )
            began = time.perf_counter()
            thread.start()
            time.sleep(random.uniform(0, typical))
            asked = time.perf_counter()
            found = looks.client.ask(AwaitFill(looks.lookup_message(keys), 10_000), LookupReply).hit_chunks
            answered = time.perf_counter()
            thread.join()
            looks.end_request()
            typical = ended[0] - began
            if found == CHUNKS and ended[0] > asked:
                rest.append(ended[0] - asked)
                waits.append(answered - asked)
    finally:
        daemon.close()
    ratios = [wait / left for wait, left in zip(waits, rest, strict=True)]
    ms = [round(1e3 * statistics.median(each), 2) for each in (rest, waits)]
    print(f"{len(ratios)} of {options.rounds} lookups waited; medians")
    print(table(["rest of the copy, ms", "wait, ms", "wait / rest"], [[*ms, round(statistics.median(ratios), 3)]]))


if __name__ == "__main__":
    main()
