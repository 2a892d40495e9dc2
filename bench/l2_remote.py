"""Tiers of L2 in shared stores, beside their client library's own loop with a checksum of the same bytes, in the same run.

    .venv/bin/python bench/l2_remote.py [--size MIB ...] [--only KIND]

The servers are those of the tests, on this machine: Valkey, Mooncake, and moto for S3, which is slow itself. `loop`: one thread that calls the
library and XXH3; `threads`: as many as the tier has lanes, each with a client. The tier does what they do, and gathers from and
scatters to L1; before its puts it has probed, as a lookup does. Expected is 0.85 of the faster one. Of S3 it prints the requests
that a prompt costs, too, without those of ids.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import select
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias, cast

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from common import alternate, median, table
from l2_s3_parts import start_store
from support.l1_memory import PAGE, name, within
from support.mooncake import MooncakeStore
from support.s3 import CREDENTIALS, S3Server
from support.shared_tiers import SharedStore, TierDaemon
from support.valkey import ValkeyStore

from kvserver._native import checksum
from kvserver.config import parse_tiers
from kvserver.l2 import TierOutcome
from kvserver.l2.remote.buffer import LaneBuffer
from kvserver.l2.remote.make import LANES, store_of
from kvserver.l2.remote.mooncake import MooncakeUrl
from kvserver.l2.remote.store import StoreClient

ROUNDS, TOTAL_BYTES = 9, 64 << 20
CHUNKS, CHUNK_BYTES = 1000, 256 << 10  # of a prompt whose requests of S3 are counted
AT_ONCE = {"put": 16, "get": 64}  # as the daemon has them under way
Connect = Callable[[], StoreClient]
Buffer: TypeAlias = "bytes | memoryview"


class Loop:
    """Threads that call the client library and the checksum, and nothing else."""

    def __init__(self, connect: Connect, threads: int, size: int, count: int) -> None:
        self._clients = [connect() for _ in range(threads)]
        self._buffers = [memoryview(bytearray(size)) for _ in range(threads)]
        self._values: list[Buffer] = [os.urandom(size) for _ in range(count)]  # as L1: not in the CPU's caches
        self._places: list[tuple[str, Buffer]] = []

    def put(self) -> float:
        self._places = [(uuid.uuid4().hex, value) for value in self._values]
        return self._run(self._put)

    def get(self) -> float:
        return self._run(self._get)

    def _put(self, number: int, where: str, value: Buffer) -> None:
        checksum(value)
        assert self._clients[number].put([where], [memoryview(value)]) == [None]

    def _get(self, number: int, where: str, value: Buffer) -> None:
        (found,) = self._clients[number].get([where], [self._buffers[number]])
        assert isinstance(found, memoryview), found
        checksum(self._values[0])  # as many bytes, and as near

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def _run(self, step: Callable[[int, str, Buffer], None]) -> float:
        """GB/s."""
        waiting = list(self._places)

        def work(number: int) -> None:
            while True:
                try:
                    where, value = waiting.pop()
                except IndexError:
                    return
                step(number, where, value)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(len(self._clients))]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sum(map(len, self._values)) / (time.perf_counter() - began) / 1e9


class MooncakeLoop(Loop):
    """The library in this process, with buffers that it knows."""

    def __init__(self, url: MooncakeUrl, threads: int, size: int, count: int) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._memory = mmap.mmap(-1, (count + threads) * size)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._stores = []
        for _ in range(threads):
            store = MooncakeDistributedStore()
            master = f"{url.settings['host']}:{url.settings['port']}"
            assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", master) == 0
            assert store.register_buffer(self._address, len(self._memory)) == 0
            self._stores.append(store)
        super().__init__(lambda: cast(StoreClient, None), threads, 0, 0)
        for at in range(count):
            self._memory[at * size : (at + 1) * size] = os.urandom(size)
        self._values = [memoryview(self._memory)[at * size : (at + 1) * size] for at in range(count)]
        self._size = size

    def _put(self, number: int, where: str, value: Buffer) -> None:
        checksum(value)
        at = ctypes.addressof(ctypes.c_char.from_buffer(value))
        assert self._stores[number].batch_put_from([where], [at], [self._size]) == [0]

    def _get(self, number: int, where: str, value: Buffer) -> None:
        at = self._address + (len(self._values) + number) * self._size
        assert self._stores[number].batch_get_into([where], [at], [self._size]) == [self._size]
        checksum(self._values[0])

    def close(self) -> None:
        for store in self._stores:
            store.close()


class Tier:
    def __init__(self, url: str, size: int, count: int) -> None:
        self._daemon = TierDaemon(url, pages=(count + 4) * (size // PAGE + 2))
        self._daemon.until_open()
        self._memory = [self._daemon.l1.object(size) for _ in range(count)]
        self._bytes, self._first = size * count, 0

    def put(self) -> float:
        self._first += len(self._memory)
        self._daemon.probe(list(range(self._first, self._first + len(self._memory))))
        put = self._daemon.tier.put
        return self._run("put", lambda number, memory: put(name(number), memory, b"", within(100)))

    def get(self) -> float:
        return self._run("get", lambda number, memory: self._daemon.tier.get(name(number), memory, within(100)))

    def close(self) -> None:
        self._daemon.tier.close(within(5))

    def _run(self, what: str, begin: Callable[..., int]) -> float:
        """GB/s."""
        began, open_, todo = time.perf_counter(), 0, list(enumerate(self._memory, self._first))[::-1]
        while todo or open_:
            while todo and open_ < AT_ONCE[what]:
                begin(*todo.pop())
                open_ += 1
            select.select([self._daemon.tier.completion_fd], [], [], 1)
            for end in self._daemon.tier.drain():
                assert end.outcome is TierOutcome.DONE, end
                open_ -= 1
        return self._bytes / (time.perf_counter() - began) / 1e9


def measure(kind: str, url: str, size: int) -> list[list[object]]:
    lanes, count = LANES[kind], max(2 * LANES[kind], TOTAL_BYTES // size)
    (parsed,) = parse_tiers([url])
    loops: list[Loop]
    if kind == "mooncake":
        loops = [MooncakeLoop(MooncakeUrl(parsed), number, size, count) for number in (1, lanes)]
    else:
        connect = store_of(parsed)[1]
        loops = [Loop(lambda: connect(LaneBuffer()), number, size, count) for number in (1, lanes)]
    tier = Tier(url, size, count)
    rows = []
    for what in ("put", "get"):
        found = alternate(ROUNDS, *(getattr(each, what) for each in (*loops, tier)))
        ours, best = median(found[2]), max(median(found[0]), median(found[1]))
        rows.append([kind, size / (1 << 20), what, median(found[0]), median(found[1]), ours, ours / best])
    for each in (*loops, tier):
        each.close()
    return rows


def requests_of_s3() -> list[list[object]]:
    """HEADs, PUTs and GETs of a prompt that one daemon looks up, writes and looks up again, and another one looks up and reads."""
    pipe, server, _, url = start_store(1e6)
    daemons = [TierDaemon(url) for _ in range(2)]
    rows: list[list[object]] = []

    def count(what: str, work: Callable[[], object]) -> None:
        pipe.send("counts")
        pipe.recv()
        work()
        pipe.send("counts")
        counts, _ = pipe.recv()
        rows.append([what, *(counts.get(method, 0) for method in ("HEAD", "PUT", "GET"))])

    for daemon in daemons:
        daemon.until_open()
    writer, reader = daemons
    prompt, memory = list(range(CHUNKS)), [daemon.l1.object(CHUNK_BYTES) for daemon in daemons]
    count("looked up, absent", lambda: writer.probe(prompt))
    count("written", lambda: [writer.put(name(number), memory[0]) for number in prompt])
    count("looked up again", lambda: writer.probe(prompt))
    count("looked up by another daemon", lambda: reader.probe(prompt))
    count("read", lambda: [reader.get(name(number), memory[1]) for number in prompt])
    for daemon in daemons:
        daemon.tier.close(within(5))
    pipe.send(False)
    server.join()
    return rows


def start(kind: str, folder: Path) -> SharedStore:
    if kind == "mooncake":  # evicts what was not used for a while
        return MooncakeStore(folder, memory="4GB", lease_ms=60_000)
    return ValkeyStore(folder) if kind == "valkey" else S3Server()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, nargs="+", default=[0.0625, 0.25, 2, 16], help="MiB of an object")
    parser.add_argument("--only", choices=list(LANES))
    arguments = parser.parse_args()
    os.environ.update(CREDENTIALS)
    rows: list[list[object]] = []
    for kind in [arguments.only] if arguments.only else LANES:
        for mebibytes in arguments.size:
            with tempfile.TemporaryDirectory() as folder:
                store = start(kind, Path(folder))
                try:
                    url = store.url_of("bench", "timeout=60s", *(["expiry=60s"] if kind == "valkey" else []))
                    rows += measure(kind, url, int(mebibytes * (1 << 20)))
                finally:
                    store.close()
    print(table(["kind", "MiB", "", "loop GB/s", "threads", "tier", "tier/best"], rows))
    if arguments.only in (None, "s3"):
        print(table([f"a prompt of {CHUNKS} chunks", "HEAD", "PUT", "GET"], requests_of_s3()))


if __name__ == "__main__":
    main()
