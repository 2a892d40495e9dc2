"""What L1 notices of L2: lookups, stores and loads of one engine, in quiet moments and while L2 writes at its limit or is read.

Owns: the daemon, the engine that is measured, and the process that keeps L2 busy. `l2.py` prints it.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import time
from array import array
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from common import median, percentile
from rig import BenchDaemon, BenchWorker, make_keys
from support.daemon import fetch, wait_until

from kvserver.protocol import KEY_BYTES, AwaitFill, LookupReply

L1_SIZE, LIMIT = "3GiB", "200MB/s"
PLANES, RUN, BLOCK_TOKENS, CHUNK_BLOCKS = 8, 32 << 10, 32, 8  # 2 MiB a chunk of 256 tokens
PROMPT, PROMPTS = 72, 6  # chunks of one, within the bound of fills; as many as are written in more than a second
OWN = 4  # chunks of the measured engine's copies; 1k tokens
SAMPLES = 120  # of each operation in a slice
Millis = dict[str, list[float]]


class Busy:
    """Another process with an engine, which keeps L2 busy."""

    def __init__(self, endpoint: str) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.Process(target=_serve, args=(endpoint, theirs), daemon=True)
        self._process.start()

    def store(self, first: int) -> None:
        """Prompts that L2 then writes; returns when L1 has them."""
        self._pipe.send(("store", first))
        self._pipe.recv()

    def begin_fills(self, prompts: list[int]) -> None:
        """Fill these from L2 one after the other, again and again, until end_fills()."""
        self._pipe.send(("fill", prompts))

    def end_fills(self) -> int:
        """Returns the chunks that were filled."""
        self._pipe.send(("end", 0))
        return int(self._pipe.recv())

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def _serve(endpoint: str, pipe: Connection) -> None:
    engine = BenchWorker(
        endpoint, planes=PLANES, run=RUN, num_blocks=PROMPT * CHUNK_BLOCKS + 1, block_tokens=BLOCK_TOKENS
    )
    blocks = array("I", range(1, PROMPT * CHUNK_BLOCKS + 1))
    while True:
        what, of = pipe.recv()
        if what == "store":
            for number in range(of, of + PROMPTS):
                engine.store(make_keys(f"busy {number}", PROMPT), blocks)
            pipe.send(0)
            continue
        filled = 0
        for number in itertools.cycle(of):
            if pipe.poll():
                pipe.recv()
                break
            request = AwaitFill(engine.lookup_message(make_keys(f"busy {number}", PROMPT), f"fill {number}"), 10_000)
            filled += engine.client.ask(request, LookupReply).hit_chunks
            assert engine.client.channel.send(engine.end_message(f"fill {number}"))
        pipe.send(filled)


class Beside:
    """The measured engine is private: L2 has nothing of it."""

    def __init__(self, folder: Path) -> None:
        l2 = f"file://{folder}?size=10GiB&write_limit={LIMIT}"
        self._daemon = BenchDaemon(l1_size=L1_SIZE, l2=l2)
        wait_until(lambda: self.tier()["state"] == "ready")
        self._engine = BenchWorker(
            self._daemon.endpoint, planes=PLANES, run=RUN, num_blocks=OWN * CHUNK_BLOCKS + 1, block_tokens=BLOCK_TOKENS,
            private="a benchmark",
        )  # fmt: skip
        self._blocks = array("I", range(1, OWN * CHUNK_BLOCKS + 1))
        self._busy = Busy(self._daemon.endpoint)
        self._names = itertools.count()
        self._stored = 0

    def tier(self) -> dict[str, Any]:
        code, body = fetch(f"http://127.0.0.1:{self._daemon.http_port}/status")
        assert code == 200, body
        found: dict[str, Any] = json.loads(body)["l2"][0]
        return found

    def quiet(self) -> Millis:
        wait_until(lambda: not self.tier()["queue_objects"], 60)
        return self._slice()

    def writing(self) -> Millis:
        self._busy.store(self._stored)
        self._stored += PROMPTS
        found = self._slice()
        assert self.tier()["queue_objects"], "L2 was done before the slice"
        return found

    def filling(self) -> Millis:
        self._busy.begin_fills(list(range(self._stored)))
        found = self._slice()
        assert self._busy.end_fills() > PROMPT, "nothing was read"
        return found

    def close(self) -> None:
        self._busy.close()
        self._daemon.close()

    def _slice(self) -> Millis:
        """Milliseconds of each operation, in turn."""
        found: Millis = {"lookup": [], "store": [], "load": []}
        for _ in range(SAMPLES):
            keys = make_keys(f"own {next(self._names)}", OWN)
            for what, operation in (
                ("store", lambda: self._engine.store(keys, self._blocks)),  # noqa: B023
                ("lookup", lambda: self._engine.lookup(keys)),  # noqa: B023
                ("load", lambda: self._engine.load(keys, self._blocks)),  # noqa: B023
            ):
                began = time.perf_counter()
                operation()
                found[what].append((time.perf_counter() - began) * 1000)
            self._engine.end_request()
        assert len(keys) == OWN * KEY_BYTES
        return found


def rows(folder: Path, rounds: int) -> list[list[object]]:
    """Of each way to be busy and each operation: p50 and p99 quiet and busy, and their ratios."""
    beside = Beside(folder)
    try:
        table: list[list[object]] = []
        for name in ("writing", "filling"):
            busy: Callable[[], Millis] = getattr(beside, name)
            pairs = [(beside.quiet(), busy()) for _ in range(rounds + 1)][1:]  # the first does not count
            for what in ("lookup", "store", "load"):
                quiet = [value for each, _ in pairs for value in each[what]]
                other = [value for _, each in pairs for value in each[what]]
                ratio = median([median(each[what]) / median(calm[what]) for calm, each in pairs])
                p99 = percentile(quiet, 0.99), percentile(other, 0.99)
                table.append([name, what, len(other), median(quiet), median(other), ratio, *p99, p99[1] / p99[0]])
        return table
    finally:
        beside.close()
