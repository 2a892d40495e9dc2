"""LMCache's tier in files beside ours, through both servers: a prompt until it is on disk, and back when L1 has forgotten it.

    KVSERVER_PEER_PYTHON=/path/to/venv/bin/python .venv/bin/python bench/l2_peer.py [FOLDER] [--rounds 9]

*put*: from the store until the last object is in the folder, as the peer's file names and our `/status` have it. *get*: from the lookup,
which fills L1, until the load has ended. In turn, each prompt is new; in the same turn the threads of `l2.py` write and read as many
bytes by O_DIRECT. Our tier uses O_DIRECT. The peer's adapter `fs`, one file at a time, reads what the page cache still has, also once after
its pages were dropped (*disk*); `fs_native` is given O_DIRECT and has four threads, ours five. Without the peer this prints that and exits with 0.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from common import alternate, median, table
from peer_files import FILES, PeerFiles
from peers import BLOCK_TOKENS, HEADS, HOW, LAYERS, RUN, installed
from rig import BenchDaemon, BenchWorker, make_keys
from support.daemon import fetch, wait_until

from kvserver.bench.storage import PlainFiles
from kvserver.protocol import KEY_BYTES, AwaitFill, LookupReply

TOKENS, CHUNK_TOKENS = 2048, 256
BLOCKS, CHUNKS = TOKENS // BLOCK_TOKENS, TOKENS // CHUNK_TOKENS
PAYLOAD = BLOCKS * 2 * LAYERS * RUN  # 256 MiB, in objects of 32
L1_GIB = 3  # a fill may use 1/8
TIER_GIB = (
    1  # the tier writes to pages that were written before, as the threads do: new ones cost a disk half as much again
)
HEADER = [
    "",
    "LMCache's adapter",
    "threads",
    "kvserver",
    "LMCache",
    "kvserver / threads",
    "LMCache / threads",
    "kvserver / LMCache",
]


class PeerTier:
    """Prompts through the peer's adapters."""

    def __init__(self, files: PeerFiles) -> None:
        self._files, self._names, self._name = files, itertools.count(), ""
        url = files.peer.url
        files.peer.connect(url, url, layers=LAYERS, heads=HEADS, blocks=BLOCKS + 1, block_tokens=BLOCK_TOKENS)

    def put(self) -> float:
        """GB/s."""
        self._files.remove()
        self._name = f"file {next(self._names)}"
        began = time.perf_counter()
        self._files.peer.ask("store", name=self._name, count=TOKENS, step=TOKENS)
        poll(lambda: self._files.objects() == CHUNKS)
        return rate(began)

    def get(self) -> float:
        self._files.forget()
        return PAYLOAD / float(self._files.peer.ask("fill", name=self._name, count=TOKENS)["seconds"]) / 1e9

    def get_from_disk(self) -> float:
        self._files.drop_pages()
        return self.get()


class OurTier:
    """Prompts through a daemon. What another engine stores, which stays in L1, takes their place there."""

    def __init__(self, folder: Path) -> None:
        self._journal = folder / "journal"
        self._daemon = BenchDaemon(
            l1_size=f"{L1_GIB}GiB", chunk_tokens=CHUNK_TOKENS, l2=f"file://{folder}?size={TIER_GIB}GiB"
        )
        wait_until(lambda: self._tier()["state"] == "ready")
        self._engine, self._other = (
            BenchWorker(
                self._daemon.endpoint,
                planes=2 * LAYERS,
                run=RUN,
                num_blocks=BLOCKS + 1,
                block_tokens=BLOCK_TOKENS,
                private=private,
            )
            for private in ("", "a benchmark")
        )
        self._blocks = array("I", range(1, BLOCKS + 1))
        self._names, self._keys = itertools.count(), b""

    def put(self) -> float:
        """GB/s."""
        self._keys, expected = self._fresh(), self._tier()["written_objects"] + CHUNKS
        began = time.perf_counter()
        self._engine.store(self._keys, self._blocks)
        return rate(began, self._last_entry(lambda: self._tier()["written_objects"] == expected))

    def _last_entry(self, done: Callable[[], bool]) -> float:
        """When the journal grew last before `done`, which is asked then only: `/status` costs CPU that a daemon on two cores writes with."""
        size, grew, asked = 0, time.perf_counter(), 0.0

        def grown() -> bool:
            nonlocal size, grew, asked
            now, found = time.perf_counter(), self._journal.stat().st_size
            if found == size and now - asked < 0.05:
                return False
            grew = now if found != size else grew
            size, asked = found, now
            return done()

        poll(grown)
        return grew

    def get(self) -> float:
        for _ in range((L1_GIB << 30) // PAYLOAD + 1):
            self._other.store(self._fresh(), self._blocks)
        hits = self._tier()["hits"]
        began = time.perf_counter()
        lookup = AwaitFill(self._engine.lookup_message(self._keys), 10_000)
        assert self._engine.client.ask(lookup, LookupReply).hit_chunks == CHUNKS, "not all was found"
        self._engine.load(self._keys, self._blocks)
        found = rate(began)
        self._engine.end_request()
        assert self._tier()["hits"] - hits == CHUNKS, "L1 had it still"
        return found

    def close(self) -> None:
        self._daemon.close()

    def _fresh(self) -> bytes:
        keys = make_keys(f"file {next(self._names)}", CHUNKS)
        assert len(keys) == CHUNKS * KEY_BYTES
        return keys

    def _tier(self) -> dict[str, Any]:
        code, body = fetch(f"http://127.0.0.1:{self._daemon.http_port}/status")
        assert code == 200, body
        found: dict[str, Any] = json.loads(body)["l2"][0]
        return found


def poll(done: Callable[[], bool]) -> None:
    """Every millisecond."""
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline, "not all is in the folder"
        time.sleep(0.001)


def rate(began: float, ended: float | None = None) -> float:
    return PAYLOAD / ((ended or time.perf_counter()) - began) / 1e9


def rows(python: str, adapter: str, folder: Path, rounds: int) -> list[list[object]]:
    """Of one adapter: GB/s of threads, ours and the peer's, and the ratios turn by turn."""
    with ExitStack() as stack:
        ours = OurTier(folder / "ours")
        stack.callback(ours.close)
        theirs = PeerTier(stack.enter_context(PeerFiles(python, adapter, folder / "theirs")))
        threads = PlainFiles(folder / "plain", CHUNKS, True, PAYLOAD // CHUNKS)
        stack.callback(threads.close)
        measures = [threads.put, ours.put, theirs.put, threads.get, ours.get, theirs.get]
        cached = not FILES[adapter]
        found = alternate(rounds, *measures, *([theirs.get_from_disk] if cached else []))
    lanes = [("put", adapter, found[:3]), ("get", f"{adapter}, page cache" if cached else adapter, found[3:6])]
    lanes += [("get", f"{adapter}, disk", [*found[3:5], found[6]])] if cached else []
    return [[what, name, *map(median, each), *ratios(each)] for what, name, each in lanes]


def ratios(lanes: list[list[float]]) -> Iterator[float]:
    """kvserver / threads, LMCache / threads, kvserver / LMCache."""
    for upper, lower in ((1, 0), (2, 0), (1, 2)):
        yield median([a / b for a, b in zip(lanes[upper], lanes[lower], strict=True)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--peer-python", default=os.environ.get("KVSERVER_PEER_PYTHON", ""))
    parser.add_argument("--adapters", nargs="+", choices=FILES, default=list(FILES))
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    if not options.peer_python or not installed(options.peer_python):
        print(f"LMCache's tier in files was not measured: it is not installed. {HOW}")
        return
    found: list[list[object]] = []
    for adapter in options.adapters:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            found += rows(options.peer_python, adapter, Path(folder), options.rounds)
    print(f"GB/s of {TOKENS} tokens, {CHUNKS} objects of {PAYLOAD // CHUNKS >> 20} MiB, medians of {options.rounds}")
    print(table(HEADER, found))


if __name__ == "__main__":
    main()
