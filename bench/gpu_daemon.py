"""A real daemon with a GPU, and a worker in this process whose KV lies on it."""

from __future__ import annotations

import itertools
import time
from array import array
from typing import Any

import msgspec
from gpu_bytes import KvBytes, expect_equal
from gpu_rig import Board
from gpu_sizes import Geometry
from rig import BenchDaemon, BenchWorker, make_keys
from support.daemon import WITH_SIMULATED

from kvserver.protocol import Clear, Cleared, Status, StatusReply
from kvserver.protocol.status import DaemonStatus

CHUNK_TOKENS = 256


class Served:
    """One request of so many tokens, in whole chunks. REQUIRES: the board's KV has room for it; one that is served."""

    def __init__(self, board: Board, geometry: Geometry, tokens: int) -> None:
        self.chunks, self.blocks = tokens // CHUNK_TOKENS, geometry.blocks(tokens)
        self.payload = self.blocks * geometry.block_bytes
        self.chunk_bytes = self.payload // self.chunks
        simulated: dict[str, Any] = {"program": WITH_SIMULATED, "simulated_gpus": 1} if board.simulated else {}
        self.daemon = BenchDaemon(l1_size=2 * self.payload, chunk_tokens=CHUNK_TOKENS, **simulated)
        self.worker = BenchWorker(
            self.daemon.endpoint,
            planes=geometry.planes,
            run=geometry.run,
            num_blocks=self.blocks + 1,
            block_tokens=geometry.block_tokens,
            memory=(board.kv.fds[0], board.kv.described(0)),
        )
        self._ids = array("I", range(1, self.blocks + 1))
        self._kv = KvBytes(board, geometry.planes, geometry.run, self.blocks + 1)
        self._stored: Any = None
        self._names = itertools.count()
        self._keys = b""
        self._wait_until_pinned()

    def _wait_until_pinned(self) -> None:
        """Store until no byte of it goes to L1 that is not pinned."""
        for _ in range(200):
            before = self._unpinned_bytes()
            self.store()
            if self._unpinned_bytes() == before:
                return
            time.sleep(0.1)
        raise RuntimeError("L1 was not pinned")

    def _unpinned_bytes(self) -> int:
        status = msgspec.msgpack.decode(self.worker.client.ask(Status(), StatusReply).status, type=DaemonStatus)
        return status.gpus[0].store.unpinned_bytes

    def store(self) -> float:
        """GB/s, from the send to the reply. The chunks of the store before are forgotten first."""
        self.worker.client.ask(Clear(), Cleared)
        self._keys = make_keys(f"{next(self._names)}", self.chunks)
        self._kv.change()
        self._stored = self._kv.of(self._ids)
        began = time.perf_counter()
        self.worker.store(self._keys, self._ids)
        return self.payload / (time.perf_counter() - began) / 1e9

    def load(self) -> float:
        """What it brings back must be what was stored last, the bytes of which were changed meanwhile."""
        self._kv.change()
        began = time.perf_counter()
        self.worker.load(self._keys, self._ids)
        seconds = time.perf_counter() - began
        self.check(self.blocks)
        return self.payload / seconds / 1e9

    def check(self, blocks: int) -> None:
        """The first blocks are as they were stored."""
        stored = self._stored[: len(self._stored) * blocks // self.blocks]
        expect_equal("a load through the daemon", self._kv.of(self._ids[:blocks]), stored)

    def load_chunk(self) -> float:
        """Milliseconds."""
        began = time.perf_counter()
        self.worker.load(self._keys[:32], self._ids[: self.blocks // self.chunks])
        return (time.perf_counter() - began) * 1000

    def lookup_chunk(self) -> float:
        """Milliseconds of a request that moves no bytes."""
        began = time.perf_counter()
        assert self.worker.lookup(self._keys[:32]) == 1
        return (time.perf_counter() - began) * 1000

    def close(self) -> None:
        self.worker.client.close()
        self.daemon.close()
