"""When an engine that was quiet sees the answer to a lookup and the end of a load: by the load's state word, and by the reply.

    .venv/bin/python bench/load_end.py [--samples 500] [--pause 0.03]

One daemon, one worker, three chunks of some 100 KB; before each sample both sleep, as beside a step of a model, so that
their threads must be woken and find little of theirs in the CPU's caches. Milliseconds from before the message is sent, at four percentiles.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
os.environ.setdefault("KVSERVER_BIN", str(ROOT / ".venv/bin/kvserver"))  # before the import that reads it

from common import percentile, table  # noqa: E402
from support.daemon import Daemon  # noqa: E402
from support.worker import Worker, make_keys  # noqa: E402

from kvserver._native import State  # noqa: E402

PERCENTILES = 0.1, 0.25, 0.5, 0.75


def sample(worker: Worker, keys: list[bytes], request_id: str) -> tuple[float, float, float]:
    """(answer to the lookup, end of the load by its word, by its reply), in seconds."""
    blocks = worker.blocks_for(len(keys))
    began = time.monotonic()
    assert worker.lookup(keys, request_id) == len(keys)
    answered = time.monotonic() - began
    message = worker.load_message(keys, blocks)
    began = time.monotonic()
    load = worker.begin(message)
    assert worker.words.wait(message.word, 10)
    seen = time.monotonic() - began
    assert load.state == State.DONE
    load.reply()
    replied = time.monotonic() - began
    worker.end_request(request_id)
    return answered, seen, replied


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--pause", type=float, default=0.03, help="seconds")
    options = parser.parse_args()
    daemon = Daemon(l1_size="256MiB", chunk_tokens=256)
    try:
        daemon.start()
        with Worker(daemon.endpoint) as worker:
            keys = make_keys(3)
            worker.store(keys, worker.blocks_for(3))
            found = []
            for number in range(options.samples):
                time.sleep(options.pause)
                found.append(sample(worker, keys, f"r{number}"))
    finally:
        daemon.close()
    names = "lookup", "load, by its state word", "load, by its reply"
    rows: list[list[object]] = [
        [name, *(1000 * percentile(list(times), share) for share in PERCENTILES)]
        for name, times in zip(names, zip(*found, strict=True), strict=True)
    ]
    print(table(["what", *(f"p{share * 100:.0f} ms" for share in PERCENTILES)], rows))


if __name__ == "__main__":
    main()
