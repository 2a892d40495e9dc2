"""What a router's question costs: which engine has how much of a prompt, in an index of many blocks.

python bench/match.py [--blocks 1000000] [--asked 10000] [--samples 1000] [--engines 8]

Each engine has its share of the prompts in L0, all of them have the same chunks of 16 blocks in L1. The question is
put to the native index; to another process over HTTP (msgpack, one connection that is kept), with whole hashes and with
the last 8 bytes of each, by a plain socket and by Python's own client, which takes its time too; and to plain Python: a
dict from hash to a mask of engines, walked block by block until no engine is left, without tiers and chunks.

Without HTTP, what L2 and single blocks add: each engine has its share of the prompts in L1 in chunks of 16 blocks; or the second half
of them in L2 instead; or the last chunk of each as single blocks, too.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import http.client
import os
import random
import re
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import msgspec
from common import percentile, table

from kvserver._native import PrefixIndex
from kvserver.config import Settings
from kvserver.kv_events.types import MOST_CHUNKS, KeysStored, ReaderConnected, Tier
from kvserver.observability import Observability
from kvserver.protocol import DescribeScheduler
from kvserver.routing import KVIndex, MatchPages
from kvserver.routing.block_hashes import hash_blocks
from kvserver.routing.match import MSGPACK
from kvserver.server import Server, Upkeep
from kvserver.web.pages import StatusPages

HASH_BYTES, CHUNK_BLOCKS, BLOCK_TOKENS = 32, 16, 16


def namespace_prefix(engine: int) -> bytes:
    return engine.to_bytes(64, "big")


def prompts_of(blocks: int, asked: int) -> list[bytes]:
    rng = random.Random(0)
    return [rng.randbytes(asked * HASH_BYTES) for _ in range(max(1, blocks // asked))]


def hashes(prompt: bytes) -> list[bytes]:
    return [prompt[at : at + HASH_BYTES] for at in range(0, len(prompt), HASH_BYTES)]


def filled_index(prompts: list[bytes], engines: int) -> tuple[PrefixIndex, list[tuple[int, int, int, int]]]:
    index = PrefixIndex(random.getrandbits(64), 1 << 30)
    l0, l1 = [index.add_owner() for _ in range(engines)], index.add_owner()
    for number, prompt in enumerate(prompts):
        index.add_blocks(l0[number % engines], prompt, HASH_BYTES)
        index.add_blocks(l1, b"".join(hashes(prompt)[CHUNK_BLOCKS - 1 :: CHUNK_BLOCKS]), HASH_BYTES)
    return index, [(owner, l1, -1, CHUNK_BLOCKS) for owner in l0]


class PlainIndex:
    def __init__(self, prompts: list[bytes], engines: int) -> None:
        self.engines_by_block: dict[bytes, int] = {}
        self.engines = engines
        for number, prompt in enumerate(prompts):
            for block in hashes(prompt):
                self.engines_by_block[block] = self.engines_by_block.get(block, 0) | 1 << number % engines

    def match(self, prompt: bytes) -> list[int]:
        found, alive = [0] * self.engines, (1 << self.engines) - 1
        for at in range(0, len(prompt), HASH_BYTES):
            still = alive & self.engines_by_block.get(prompt[at : at + HASH_BYTES], 0)
            if still != alive:
                for engine in range(self.engines):
                    if (alive & ~still) >> engine & 1:
                        found[engine] = at // HASH_BYTES
                if not (alive := still):
                    break
        return [len(prompt) // HASH_BYTES if alive >> n & 1 else blocks for n, blocks in enumerate(found)]


def serve(prompts: list[bytes], engines: int) -> tuple[int, int]:
    """(process, port) of one that serves an index. L0 comes from engines, which are not here: each of these has its
    share of the prompts in an L1 of its own, with chunks of one block.
    """
    read, write = os.pipe()
    if process := os.fork():
        return process, int(os.read(read, 16))
    index = KVIndex(1 << 30, follow_engines=False)
    for number in range(engines):
        scheduler = DescribeScheduler(instance_id=f"engine-{number}", incarnation="1", model_name="m", variant="")
        index.observe(ReaderConnected(1, 0, scheduler, namespace_prefix(number), 1, BLOCK_TOKENS))
    for number, prompt in enumerate(prompts):
        blocks = hashes(prompt)
        for first in range(0, len(blocks), MOST_CHUNKS):
            index.observe(KeysStored(Tier.L1, namespace_prefix(number % engines), blocks[first : first + MOST_CHUNKS]))
    pages = StatusPages(
        ("127.0.0.1", 0),
        cast(Server, SimpleNamespace()),
        Observability(Settings(), "boot"),
        MatchPages(index, _no_load),
        cast(Upkeep, None),
    )
    gc.freeze()  # as the daemon does
    gc.disable()
    os.write(write, str(pages.port).encode())
    pages.serve_forever()
    os._exit(0)


def tiers_index(prompts: list[bytes], engines: int, l2: bool, tails: bool) -> KVIndex:
    index = KVIndex(1 << 30, follow_engines=False)
    for number in range(engines):
        scheduler = DescribeScheduler(instance_id=f"engine-{number}", incarnation="1", model_name="m", variant="")
        index.observe(ReaderConnected(1, 0, scheduler, namespace_prefix(number), CHUNK_BLOCKS, BLOCK_TOKENS))
    for number, prompt in enumerate(prompts):
        at, blocks = namespace_prefix(number % engines), hashes(prompt)
        keys = blocks[CHUNK_BLOCKS - 1 :: CHUNK_BLOCKS]
        half = len(keys) // 2 if l2 else len(keys)
        index.observe(KeysStored(Tier.L1, at, keys[:half]))
        if l2:
            index.observe(KeysStored(Tier.L2, at, keys[half:]))
        if tails:
            index.observe(KeysStored(Tier.L1, at, blocks[-CHUNK_BLOCKS:], -1))
    return index


def show_tiers(options: argparse.Namespace) -> None:
    asked = options.asked // CHUNK_BLOCKS * CHUNK_BLOCKS
    prompts = prompts_of(options.blocks, asked)
    kinds = {"L1": (False, False), "L1 and L2": (True, False), "L1 and L2, single blocks": (True, True)}
    indexes = {name: tiers_index(prompts, options.engines, *kind) for name, kind in kinds.items()}
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(10):
        for name, index in indexes.items():
            engines = index.known_engines()

            def ask(prompt: bytes, index: KVIndex = index, engines: list[ReaderConnected] = engines) -> int:
                return max(match.l1_l2 for match in index.match(engines, prompt, HASH_BYTES))

            times[name] += millis(ask, prompts, options.samples // 10)
    rows: list[list[object]] = [[name, percentile(t, 0.5), percentile(t, 0.99)] for name, t in times.items()]
    print(table(["chunks of 16 blocks in", "p50 ms", "p99 ms"], rows))
    for index in indexes.values():
        index.close()


class PlainClient:
    """A connection that is kept, and nothing between it and the bytes."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def post(self, body: bytes) -> bytes:
        head = f"POST /kv/match HTTP/1.1\r\nHost: localhost\r\nContent-Type: {MSGPACK}\r\nContent-Length: {len(body)}\r\n\r\n"
        self._socket.sendall(head.encode())
        self._socket.sendall(body)
        answer = b""
        while b"\r\n\r\n" not in answer:
            answer += self._received()
        head, _, found = answer.partition(b"\r\n\r\n")
        length = int(re.search(rb"Content-Length: (\d+)", head)[1])
        while len(found) < length:
            found += self._received()
        return found

    def _received(self) -> bytes:
        received = self._socket.recv(1 << 16)
        assert received, "the connection was closed"
        return received


class LibraryClient:
    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port)

    def post(self, body: bytes) -> bytes:
        self._connection.request("POST", "/kv/match", body, {"Content-Type": MSGPACK})
        return self._connection.getresponse().read()


def _no_load() -> Future[list[dict[str, Any]]]:
    future: Future[list[dict[str, Any]]] = Future()
    future.set_result([])
    return future


def millis(ask: Callable[[bytes], int], prompts: list[bytes], samples: int) -> list[float]:
    """REQUIRES: `ask` returns the longest match, which is the whole prompt."""
    found = []
    for number in range(samples):
        prompt = prompts[number % len(prompts)]
        began = time.perf_counter()
        longest = ask(prompt)
        found.append((time.perf_counter() - began) * 1e3)
        assert longest == len(prompt) // HASH_BYTES
    return found


def show_matches(options: argparse.Namespace) -> None:
    prompts = prompts_of(options.blocks, options.asked)
    server, port = serve(prompts, options.engines)
    atexit.register(os.kill, server, signal.SIGKILL)  # also where a step below fails
    index, readers = filled_index(prompts, options.engines)
    plain = PlainIndex(prompts, options.engines)
    plain_client, library_client = PlainClient(port), LibraryClient(port)
    ends = {prompt: b"".join(block[-8:] for block in hashes(prompt)) for prompt in prompts}

    def over_http(client: PlainClient | LibraryClient, asked: bytes, hash_bytes: int) -> int:
        found = msgspec.msgpack.decode(
            client.post(msgspec.msgpack.encode({"block_hashes": asked, "hash_bytes": hash_bytes}))
        )
        return max(instance["best"] for instance in found["instances"])

    ways: dict[str, Callable[[bytes], int]] = {
        "native": lambda prompt: max(match[3] for match in index.match(prompt, HASH_BYTES, readers)),
        "HTTP, 32 bytes": lambda prompt: over_http(plain_client, prompt, HASH_BYTES),
        "HTTP, 8 bytes": lambda prompt: over_http(plain_client, ends[prompt], 8),
        "http.client, 32 bytes": lambda prompt: over_http(library_client, prompt, HASH_BYTES),
        "http.client, 8 bytes": lambda prompt: over_http(library_client, ends[prompt], 8),
        "Python dict": lambda prompt: max(plain.match(prompt)),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(10):  # in turn, so that all see the same machine
        for name, ask in ways.items():
            times[name] += millis(ask, prompts, options.samples // 10)
    rows: list[list[object]] = [[name, percentile(t, 0.5), percentile(t, 0.99)] for name, t in times.items()]
    print(table(["asked of", "p50 ms", "p99 ms"], rows))
    print(f"{len(index)} blocks: {index.memory_bytes / len(index):.1f} bytes each")


def show_hashing() -> None:
    tokens = [random.Random(0).randrange(128_000) for _ in range(100_000)]
    rows: list[list[object]] = []
    for algorithm in ("sha256", "sha256_cbor"):
        took = []
        for _ in range(5):
            began = time.perf_counter()
            blocks = len(list(hash_blocks(algorithm, bytes(32), BLOCK_TOKENS, tokens, None, "")))
            took.append((time.perf_counter() - began) / blocks * 1e6)
        rows.append([algorithm, sorted(took)[2]])
    print(table(["hashing", f"us a block of {BLOCK_TOKENS} tokens"], rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--asked", type=int, default=10_000)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--engines", type=int, default=8)
    options = parser.parse_args()
    print(f"{options.blocks} blocks, {options.asked} asked about, {options.engines} engines, {options.samples} samples")
    show_matches(options)
    show_tiers(options)
    show_hashing()


if __name__ == "__main__":
    main()
