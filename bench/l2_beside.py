"""What L1 notices of L2: lookups, stores and loads of one engine, in quiet moments and while L2 writes at its limit or is read.

The ceiling is the same daemon while its L2 rests and another process reads from the same disk as fast as it can, with as many
threads, at the same priority. No tier could spare L1 what it notices of that.

Owns: the daemon, the engine that is measured, and the processes that keep L2 or the disk busy. `l2.py` prints it.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import time
from array import array
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from common import median, percentile
from rig import BenchDaemon, BenchWorker, make_keys
from support.daemon import fetch, wait_until

from kvserver.bench.storage import PlainFiles
from kvserver.protocol import KEY_BYTES, AwaitFill, LookupReply

L1_SIZE, LIMIT = "3GiB", "200MB/s"  # Beside.fill_l1() stores more
PLANES, RUN, BLOCK_TOKENS, CHUNK_BLOCKS = 8, 32 << 10, 32, 8  # 2 MiB a chunk of 256 tokens
CHUNK_BYTES = PLANES * RUN * CHUNK_BLOCKS
PROMPT, PROMPTS = 72, 6  # chunks of one, within the bound of fills; as many as are written in more than a second
OWN = 4  # chunks of the measured engine's copies; 1k tokens
SAMPLES = 120  # of each operation in a slice
READ_NICE = 5  # as the tier's threads that read
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

    def end_fills(self) -> float:
        """GB/s that were filled."""
        self._pipe.send(("end", 0))
        return float(self._pipe.recv())

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
        filled, began = 0, time.perf_counter()
        for number in itertools.cycle(of):
            if pipe.poll():
                pipe.recv()
                break
            request = AwaitFill(engine.lookup_message(make_keys(f"busy {number}", PROMPT), f"fill {number}"), 10_000)
            filled += engine.client.ask(request, LookupReply).hit_chunks
            assert engine.client.channel.send(engine.end_message(f"fill {number}"))
        pipe.send(filled * CHUNK_BYTES / (time.perf_counter() - began) / 1e9)


class PlainReader:
    """Another process that reads files and hashes them, with as many threads as the tier."""

    def __init__(self, path: Path, direct: bool) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.Process(target=_read, args=(path, direct, theirs), daemon=True)
        self._process.start()
        self._pipe.recv()

    def begin(self) -> None:
        self._pipe.send(0)

    def end(self) -> float:
        """GB/s that were read."""
        self._pipe.send(0)
        return float(self._pipe.recv())

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def _has_direct_io(folder: Path) -> bool:
    try:
        os.close(os.open(folder / "data", os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


def _read(path: Path, direct: bool, pipe: Connection) -> None:
    os.nice(READ_NICE)
    files = PlainFiles(path, PROMPT, direct, CHUNK_BYTES)
    files.put()
    pipe.send(0)
    while True:
        pipe.recv()
        rates = []
        while not pipe.poll():
            rates.append(files.get())
        pipe.recv()
        pipe.send(median(rates))


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
        self._plain = PlainReader(folder.with_name("plain"), _has_direct_io(folder))
        self.rates: list[float] = []  # GB/s of each slice in which something was read
        self._names = itertools.count()
        self._stored = 0

    def tier(self) -> dict[str, Any]:
        code, body = fetch(f"http://127.0.0.1:{self._daemon.http_port}/status")
        assert code == 200, body
        found: dict[str, Any] = json.loads(body)["l2"][0]
        return found

    def fill_l1(self) -> None:
        """From then on no operation is the first to touch its memory."""
        for _ in range(4):
            self._store()

    def _store(self) -> None:
        self._busy.store(self._stored)
        self._stored += PROMPTS

    def quiet(self) -> Millis:
        wait_until(lambda: not self.tier()["queue_objects"], 60)
        return self._slice()

    def writing(self) -> Millis:
        self._store()
        found = self._slice()
        assert self.tier()["queue_objects"], "L2 was done before the slice"
        return found

    def filling(self) -> Millis:
        self._busy.begin_fills(list(range(self._stored)))
        found = self._slice()
        self.rates.append(self._busy.end_fills())
        assert self.rates[-1] > 0, "nothing was read"
        return found

    def ceiling(self) -> Millis:
        self._plain.begin()
        found = self._slice()
        self.rates.append(self._plain.end())
        return found

    def close(self) -> None:
        self._plain.close()
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
    """Of each way to be busy and each operation: p50 and p99 quiet and busy, and their ratios; what was read."""
    beside = Beside(folder)
    try:
        table: list[list[object]] = []
        found: dict[str, list[tuple[Millis, Millis]]] = {}
        beside.fill_l1()
        found["writing"] = [(beside.quiet(), beside.writing()) for _ in range(rounds + 1)]
        # These two in turn: their ratios are compared.
        both = [((beside.quiet(), beside.filling()), (beside.quiet(), beside.ceiling())) for _ in range(rounds + 1)]
        found["filling"], found["plain reads"] = [ours for ours, _ in both], [plain for _, plain in both]
        rates = {"filling": median(beside.rates[2::2]), "plain reads": median(beside.rates[3::2])}
        for name, pairs in found.items():
            counted = pairs[1:]  # the first is there to warm up
            for what in ("lookup", "store", "load"):
                quiet = [value for each, _ in counted for value in each[what]]
                other = [value for _, each in counted for value in each[what]]
                ratio = median([median(each[what]) / median(calm[what]) for calm, each in counted])
                p99 = percentile(quiet, 0.99), percentile(other, 0.99)
                table.append([
                    name, what, len(other), median(quiet), median(other), ratio, *p99, p99[1] / p99[0], rates.get(name, ""),
                ])  # fmt: skip
        return table
    finally:
        beside.close()
