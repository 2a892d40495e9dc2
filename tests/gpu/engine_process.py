"""An engine with KV in GPU memory, in a process of its own. Usage: python -m gpu.engine_process ENDPOINT [BLOCKS]

It registers, then answers each line of its input, `["method", argument, ...]` in JSON, by one line. Memory is torch's
on cuda:0, handed over by legacy IPC; where the GPU is simulated, a memfd whose path is the handle.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from typing import Any

from support.gpu_memory import SIMULATED, by_ipc
from support.worker import Geometry, Operation, Worker, make_keys

from kvserver._native import State
from kvserver.protocol import Plane, Retrieved, Stored

BLOCK_TOKENS = 16
PLANES, RUN = (8, 4096 + 64) if SIMULATED else (64, 32 << 10)
BLOCKS = 257 if SIMULATED else 1025


def geometry(blocks: int = BLOCKS) -> Geometry:
    """As an engine of many layers has it: one memory for the first half of the planes, one for each other."""
    half = PLANES // 2
    planes = [Plane(0, p * blocks * RUN, RUN, RUN) for p in range(half)]
    planes += [Plane(1 + p, 0, RUN, RUN) for p in range(half)]
    return Geometry(blocks, BLOCK_TOKENS, (half * blocks * RUN,) + (blocks * RUN,) * half, tuple(planes))


class Commands:
    """What the test may ask. Chunks are named by the seed of their keys; they fill blocks from `first` on."""

    def __init__(self, endpoint: str, blocks: int) -> None:
        self.worker = Worker(endpoint, geometry(blocks), allocate=by_ipc)
        self.operations: list[Operation] = []

    def number(self) -> int:
        return self.worker.number

    def fill(self) -> None:
        self.worker.memory.fill()

    def poison(self, byte: int, first: int, count: int) -> None:
        for block in self._blocks(first, count):
            self.worker.memory.write(block, bytes([byte]) * self.worker.geometry.block_bytes)

    def digest(self, first: int, count: int) -> str:
        return hashlib.sha256(b"".join(self.worker.memory.blocks(self._blocks(first, count)))).hexdigest()

    def store(self, seed: str, first: int, count: int) -> int:
        """How many chunks were stored."""
        reply = self.begin_and_wait("begin_store", seed, first, count)
        assert isinstance(reply, Stored), reply
        return reply.stored

    def load(self, seed: str, first: int, count: int) -> int:
        """How many chunks were loaded."""
        reply = self.begin_and_wait("begin_load", seed, first, count)
        assert isinstance(reply, Retrieved), reply
        assert self.operations[-1].state == State.DONE
        return reply.chunks

    def lookup(self, seed: str, count: int) -> int:
        return self.worker.lookup(make_keys(count, seed), request_id=seed)

    def begin_and_wait(self, method: str, seed: str, first: int, count: int) -> Any:
        getattr(self, method)(seed, first, count)
        return self.operations[-1].reply(60)

    def begin_store(self, seed: str, first: int, count: int) -> None:
        self._begin(self.worker.begin_store, seed, first, count)

    def begin_load(self, seed: str, first: int, count: int, seconds: float = 30.0) -> None:
        self._begin(self.worker.begin_load, seed, first, count, deadline_ns=time.monotonic_ns() + int(seconds * 1e9))

    def _begin(self, begin: Any, seed: str, first: int, count: int, **changes: Any) -> None:
        self.operations.append(begin(make_keys(count, seed), self._blocks(first, count), **changes))

    def state(self) -> str:
        """Of the last operation."""
        return self.operations[-1].state.name

    def wait_for(self, *states: str) -> str:
        """Spin until the last operation is in one of them; the state."""
        operation = self.operations[-1]
        until = time.monotonic() + 60
        while operation.state.name not in states:
            assert time.monotonic() < until, f"still {operation.state.name}"
        return operation.state.name

    def cancel_load(self) -> str:
        """As an adapter does at a deadline; the state after it."""
        operation = self.operations[-1]
        if not operation.move(State.PENDING, State.CANCELLED):
            operation.move(State.RUNNING, State.CANCELLING)
        return operation.state.name

    def stale_loads(self, seed: str, first: int, count: int, rounds: int) -> int:
        """Load again and again into poisoned blocks; how often the word was DONE and a byte was not there.

        What arrives last is looked at first.
        """
        last_block = self._blocks(first, count)[-1]
        expected, last = self.digest(first, count), self.worker.memory.read(last_block)
        stale = 0
        for turn in range(rounds):
            self.poison(turn % 251, first, count)
            self.begin_load(seed, first, count)
            assert self.wait_for("DONE", "FAILED") == "DONE"
            stale += self.worker.memory.read(last_block) != last or self.digest(first, count) != expected
            self.operations[-1].reply(60)
        return stale

    def store_after_event(self, seed: str, first: int, count: int, busy_ms: float) -> None:
        """As an adapter stores: the GPU computes for a while, and Store is sent when its event has fired."""
        wait = self._compute(busy_ms)

        def send() -> None:
            wait()
            self.begin_store(seed, first, count)

        threading.Thread(target=send, daemon=True).start()

    def _compute(self, milliseconds: float) -> Any:
        if SIMULATED:
            return lambda: time.sleep(milliseconds / 1000)
        import torch

        torch.cuda._sleep(int(milliseconds * 2_000_000))  # cycles
        event = torch.cuda.Event(blocking=True)
        event.record()
        return event.synchronize

    def _blocks(self, first: int, count: int) -> list[int]:
        return self.worker.blocks_for(count, first)


def main() -> None:
    commands = Commands(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else BLOCKS)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(commands, name)(*arguments)), flush=True)


if __name__ == "__main__":
    main()
