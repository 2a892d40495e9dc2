"""An engine of one worker in a process of its own, for tests that kill or stop it, or fork in it.

`EngineProcess` is the test's end, `python -m support.engine_process ENDPOINT OPTIONS` the other: it registers, then
answers each line of its input, `["command", argument, ...]` in JSON, by one line.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from kvserver._native import State
from kvserver.protocol import AwaitFill, LookupReply, Plane, Reply, Retrieved, Stored

from .gpu_memory import SIMULATED, by_ipc
from .memory import Geometry
from .worker import Operation, Worker, make_keys

PLANES, RUN, BLOCKS = (8, 4096 + 64, 257) if SIMULATED else (64, 32 << 10, 1025)


def many_layers() -> Geometry:
    """As an engine of many layers has it: one memory for the first half of the planes, one for each other."""
    half = PLANES // 2
    planes = [Plane(0, p * BLOCKS * RUN, RUN, RUN) for p in range(half)]
    planes += [Plane(1 + p, 0, RUN, RUN) for p in range(half)]
    return Geometry(BLOCKS, 16, (half * BLOCKS * RUN,) + (BLOCKS * RUN,) * half, tuple(planes))


class EngineProcess:
    """`options` are a Worker's. `in_torch`: many layers in torch's memory on cuda:0, handed over by legacy IPC; where the GPU is
    simulated, memfds whose paths are the handles.
    """

    def __init__(self, endpoint: str, in_torch: bool = False, **options: Any) -> None:
        command = [
            sys.executable,
            "-m",
            "support.engine_process",
            endpoint,
            json.dumps({"in_torch": in_torch, **options}),
        ]
        folder = Path(__file__).parents[1]
        self.process = subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._answer() == "ready"

    def ask(self, command: str, *arguments: Any) -> Any:
        """One of Commands' methods."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, *arguments]) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the engine ended with {self.process.wait(10)}, see its errors above"
        return json.loads(line)

    @property
    def pid(self) -> int:
        return self.process.pid

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; returns when the process has ended."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Commands:
    """Chunks are named by the seed of their keys; they fill blocks from `first` on."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.operations: list[Operation] = []

    def fill(self) -> None:
        self.worker.memory.fill()

    def poison(self, byte: int, first: int, count: int) -> None:
        for block in self._blocks(first, count):
            self.worker.memory.write(block, bytes([byte]) * self.worker.geometry.block_bytes)

    def read(self, first: int, count: int) -> list[str]:
        """Each block's bytes, in hex."""
        return [block.hex() for block in self.worker.memory.blocks(self._blocks(first, count))]

    def digest(self, first: int, count: int) -> str:
        return hashlib.sha256(b"".join(self.worker.memory.blocks(self._blocks(first, count)))).hexdigest()

    def store(self, seed: str, first: int, count: int) -> int:
        """How many chunks were stored."""
        self.begin_store(seed, first, count)
        reply = self._reply()
        assert isinstance(reply, Stored), reply
        return reply.stored

    def load(self, seed: str, first: int, count: int) -> int:
        """How many chunks were loaded."""
        self.begin_load(seed, first, count)
        reply = self._reply()
        assert isinstance(reply, Retrieved), reply
        assert self.operations[-1].state == State.DONE
        return reply.chunks

    def _reply(self) -> Reply:
        return self.operations[-1].reply(60)

    def lookup(self, seed: str, count: int) -> int:
        return self.worker.lookup(make_keys(count, seed), request_id=seed)

    def begin_fill(self, seed: str, count: int, wait_ms: int = 5000) -> int:
        """The number of the message; its reply is not awaited."""
        message = self.worker.lookup_message(make_keys(count, seed), request_id=seed)
        return self.worker.send(AwaitFill(message, wait_ms))

    def fill_hits(self, seed: str, count: int, wait_ms: int) -> int:
        """How many chunks L1 has after a fill."""
        reply = self.worker.reply_to(self.begin_fill(seed, count, wait_ms), 60)
        assert isinstance(reply, LookupReply), reply
        return reply.hit_chunks

    def begin_store(self, seed: str, first: int, count: int, skip: int = 0) -> None:
        """Of the chunks of this seed, those behind the first `skip`."""
        keys = make_keys(skip + count, seed)[skip:]
        self.operations.append(self.worker.begin_store(keys, self._blocks(first, count)))

    def begin_load(self, seed: str, first: int, count: int, seconds: float = 30.0) -> None:
        deadline_ns = time.monotonic_ns() + int(seconds * 1e9)
        operation = self.worker.begin_load(make_keys(count, seed), self._blocks(first, count), deadline_ns=deadline_ns)
        self.operations.append(operation)

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
            self._reply()
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

    def fork(self, by: str) -> list[int]:
        """[a child that runs on, forked by Python or by C; the inode of the lifeline]."""
        child = os.fork() if by == "python" else ctypes.CDLL(None).fork()
        if child == 0:
            time.sleep(120)
            os._exit(0)
        assert self.worker.attachment is not None
        return [child, os.fstat(self.worker.attachment.fileno()).st_ino]

    def _blocks(self, first: int, count: int) -> list[int]:
        return self.worker.blocks_for(count, first)


def main() -> None:
    options = json.loads(sys.argv[2])
    place = {"geometry": many_layers(), "allocate": by_ipc} if options.pop("in_torch") else {}
    commands = Commands(Worker(sys.argv[1], **options, **place))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(commands, name)(*arguments)), flush=True)


if __name__ == "__main__":
    main()
