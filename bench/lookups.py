"""Lookups while eight engines work: a real daemon, and in turn with it a bare server that answers the same messages.

    python bench/lookups.py [--chunks 100000 300000 1000000] [--rates 50 100 200 400 600] [--knee 300000] [--lookups 10000]

Each engine has a connection of its own, on which requests arrive at random (Poisson), whether or not earlier ones were
answered; times count from when a request should have been sent. Prompts have 1k to 128k tokens, log-uniform. Two thirds are
beginnings of documents in L1, one sixth part from one on the way, one sixth are new. Of those with a hit a quarter is
loaded; each request ends half a second after its lookup (exponential), which ends its lease. Each engine stores 2,048 new
tokens ten times a second. L1 is full, so a store evicts. A slot is one page.

The first of `--rates` with every number of `--chunks`, the others with `--knee` chunks. Each server has five slices; every number
is the median of theirs, also *most* and *turn*, the longest of a slice. Columns: lookups a second; how many chunks of the
prompts were found; *p50*, *p99*, *most* of the lookups in milliseconds; the longest *turn* of the loop (of late: up to 20 seconds);
CPU time of the loop's thread for each lookup with all that belongs to it, its share of a core, and that of the whole process; the
same of the bare server. *late*: p99 of how much later than it should this process sent a lookup, which is part of both
servers' times; *sender CPU*: its own. *kept waiting*: share of time in which the loop's thread could run and had no core.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import multiprocessing
import random
import select
import tempfile
import time
from array import array
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec
import zmq
from common import median, percentile, table
from rig import BenchDaemon, BenchWorker, cpu_seconds

from kvserver.protocol import KEY_BYTES, LookupReply, Retrieve, Status, StatusReply, Store, decode_reply, encode
from kvserver.protocol.messages import Error

ENGINES, CHUNK_TOKENS, BLOCK_TOKENS, RUN_BYTES = 8, 256, 16, 64
CHUNK_BLOCKS = CHUNK_TOKENS // BLOCK_TOKENS
DOCUMENT, SHORTEST = 512, 4  # chunks of the longest and of the shortest prompt
LOADED, LIFE_SECONDS = 0.25, 0.5
STORES_A_SECOND, STORED = 10, 8  # of each engine, chunks of one
SLICES, SLICE_SECONDS, WORDS = 5, 3.0, 1 << 16
LAG_SECONDS = 21.0  # until the daemon shows turns that are no older
LONGEST_TURN = b"longest turn"


@cache
def blocks_of(chunks: int) -> array[int]:
    return array("I", range(1, 1 + chunks * CHUNK_BLOCKS))


# ---- what the engines send --------------------------------------------------------------------


class Engines:
    """What is in L1, and what each engine sends. The daemon's; a bare server answers the same messages."""

    def __init__(self, endpoint: str, chunks: int) -> None:
        self.random = random.Random(chunks)
        self.workers = [
            BenchWorker(
                endpoint, planes=1, run=RUN_BYTES, num_blocks=1 + DOCUMENT * CHUNK_BLOCKS, block_tokens=BLOCK_TOKENS,
                instance_id=f"engine-{number}", words=WORDS,
            )
            for number in range(ENGINES)
        ]  # fmt: skip
        self._numbers = itertools.count()
        self.documents = [self.random.randbytes(DOCUMENT * KEY_BYTES) for _ in range(chunks // DOCUMENT)]
        for number, keys in enumerate(self.documents):
            self.workers[number % ENGINES].store(keys, blocks_of(DOCUMENT))

    def prompt(self) -> tuple[bytes, int]:
        """Keys, and how many of them are a document's."""
        chunks = round(math.exp(self.random.uniform(math.log(SHORTEST), math.log(DOCUMENT))))
        kind = self.random.randrange(6)
        known = chunks if kind < 4 else self.random.randrange(1, chunks) if kind == 4 else 0
        keys = self.random.choice(self.documents)[: known * KEY_BYTES]
        return keys + self.random.randbytes((chunks - known) * KEY_BYTES), known

    def plan(self, lookups: int, rate: float) -> Plan:
        """That many lookups, `rate` a second from each engine, and what belongs to them. In the order of time."""
        plan = Plan()
        steps: list[tuple[float, int, int, bytes, str]] = []  # time, engine, its kind of message, keys, request id
        for engine in range(ENGINES):
            at = 0.0
            for _ in range(lookups // ENGINES):
                at += self.random.expovariate(rate)
                name = f"cmpl-{next(self._numbers):032x}-0"
                keys, known = self.prompt()
                steps.append((at, engine, LOOKUP, keys, name))
                plan.known[name] = known if self.random.random() < LOADED else 0
                steps.append((at + self.random.expovariate(1 / LIFE_SECONDS), engine, END, b"", name))
            end, at = at, 0.0
            while (at := at + self.random.expovariate(STORES_A_SECOND)) < end:
                steps.append((at, engine, STORE, self.random.randbytes(STORED * KEY_BYTES), ""))
        for at, engine, kind, keys, name in sorted(steps):
            worker = self.workers[engine]
            if kind == LOOKUP:
                raw = encode(worker.lookup_message(keys, name))
                plan.chunks += len(keys) // KEY_BYTES
            else:
                raw = encode(worker.end_message(name)) if kind == END else b""
            plan.steps.append(Step(at, engine, kind, keys, raw, plan.known.get(name, 0)))
        return plan

    def copy(self, step: Step, kind: type[Store] | type[Retrieve], chunks: int, number: int) -> bytes:
        worker = self.workers[step.engine]
        return encode(
            worker.copy_message(step.keys[: chunks * KEY_BYTES], blocks_of(chunks), kind, word=number % WORDS)
        )


LOOKUP, END, STORE, LOAD = range(4)


@dataclass(slots=True)
class Step:
    at: float
    engine: int
    kind: int
    keys: bytes
    raw: bytes
    loaded: int  # chunks that are loaded if the lookup finds them


@dataclass
class Plan:
    steps: list[Step] = field(default_factory=list)
    known: dict[str, int] = field(default_factory=dict)
    chunks: int = 0  # that are looked up


class Times(NamedTuple):
    """Seconds: the clock, of a process, of its first thread as it ran and as it waited for a core, of this process."""

    elapsed: float
    cpu: float
    loop_cpu: float
    loop_waited: float
    own_cpu: float


def times(pid: int) -> Times:
    ran, waited, _ = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()
    return Times(time.monotonic(), cpu_seconds(pid), int(ran) * 1e-9, int(waited) * 1e-9, time.process_time())


@dataclass
class Found:
    """What one server did with one plan."""

    looked_up: int  # chunks
    hits: int = 0
    seconds: list[float] = field(default_factory=list)  # of each lookup
    late: list[float] = field(default_factory=list)
    turn: float = 0.0  # the longest
    spent: Times | None = None  # until the last lookup was sent
    answered: int = 0  # lookups, until then

    def columns(self) -> list[float]:
        assert self.spent is not None
        elapsed, cpu, loop_cpu, waited, own_cpu = self.spent
        return [
            *(percentile(self.seconds, share) * 1e3 for share in (0.5, 0.99, 1.0)), self.turn * 1e3,
            loop_cpu / self.answered * 1e6, loop_cpu / elapsed, cpu / elapsed,
            percentile(self.late, 0.99) * 1e3, own_cpu / elapsed, waited / elapsed,
        ]  # fmt: skip


class Connections:
    """A DEALER for each engine, with queues that take whatever is sent: an engine keeps what its queue has no space for."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self.sockets = [self._context.socket(zmq.DEALER) for _ in range(ENGINES)]
        for each in self.sockets:
            each.set_hwm(0)
            each.connect(endpoint)
        self._by_fd = {each.fd: each for each in self.sockets}

    def wait(self, seconds: float) -> None:
        select.select(self._by_fd, [], [], seconds)

    def replies(self) -> list[list[bytes]]:
        found = []
        for each in self.sockets:
            while each.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                found.append(each.recv_multipart(zmq.NOBLOCK))
        return found

    def close(self) -> None:
        self._context.destroy(0)


def drive(plan: Plan, engines: Engines, connections: Connections, pid: int) -> Found:
    """Send all of the plan in time, and wait for every answer. AssertionError if one is an error, or does not come."""
    steps, waiting = plan.steps, set[int]()
    answers: list[tuple[Step, bytes]] = []
    last = max(number for number, step in enumerate(steps) if step.kind == LOOKUP)
    found, before, began = Found(plan.chunks), times(pid), time.monotonic()

    def send(number: int, step: Step, kind: int, raw: bytes) -> None:
        connections.sockets[step.engine].send_multipart([(number << 2 | kind).to_bytes(8, "little"), raw])
        waiting.add(number << 2 | kind)

    def receive() -> None:
        for name, raw in connections.replies():
            answered = int.from_bytes(name, "little")
            waiting.remove(answered)
            number, kind = answered >> 2, answered & 3
            step = steps[number]
            answers.append((step, raw))
            if kind == LOOKUP:
                found.seconds.append(time.monotonic() - began - step.at)
                if step.loaded:
                    hits = min(step.loaded, decode_reply(raw).hit_chunks)  # type: ignore[union-attr]
                    if hits:
                        send(number, step, LOAD, engines.copy(step, Retrieve, hits, number))

    for number, step in enumerate(steps):
        while (left := began + step.at - time.monotonic()) > 0:
            connections.wait(left)
            receive()
        if step.kind == LOOKUP:
            found.late.append(-left)
        raw = step.raw or engines.copy(step, Store, STORED, number)
        send(number, step, step.kind, raw)
        if step.kind == END:
            waiting.remove(number << 2 | END)
        if number == last:
            found.spent = Times(*(now - then for now, then in zip(times(pid), before, strict=True)))
            found.answered = len(found.seconds)
        receive()
    deadline = time.monotonic() + 60
    while waiting:
        assert time.monotonic() < deadline, f"{len(waiting)} messages were not answered"
        connections.wait(0.1)
        receive()
    for _, raw in answers:
        reply = decode_reply(raw)
        assert not isinstance(reply, Error), reply
        if isinstance(reply, LookupReply):
            found.hits += reply.hit_chunks
    return found


# ---- the servers ------------------------------------------------------------------------------


def bare_server(endpoint: str) -> None:
    """Receives what the daemon does and answers what it would, and does nothing else."""
    reply = encode(LookupReply(hit_chunks=DOCUMENT))
    router = zmq.Context().socket(zmq.ROUTER)
    router.set_hwm(0)
    router.bind(endpoint)
    longest = 0.0
    while True:
        router.poll()
        began = time.monotonic()
        for _ in range(64):
            try:
                peer, number, message = router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if message == LONGEST_TURN:
                router.send_multipart([peer, number, msgspec.msgpack.encode(longest)])
                longest = began = math.inf
            elif int.from_bytes(number, "little") & 3 != END:
                router.send_multipart([peer, number, reply])
        longest = max(longest if longest < math.inf else 0.0, time.monotonic() - began)


class Rig:
    def __init__(self, chunks: int) -> None:
        self.chunks = chunks - chunks % DOCUMENT
        self.daemon = BenchDaemon(l1_size=self.chunks * 4096, chunk_tokens=CHUNK_TOKENS)
        self.engines = Engines(self.daemon.endpoint, self.chunks)
        self._folder = tempfile.TemporaryDirectory(prefix="kve-")
        endpoint = f"ipc://{self._folder.name}/e"
        self._bare = multiprocessing.get_context("spawn").Process(target=bare_server, args=(endpoint,), daemon=True)
        self._bare.start()
        self._to_daemon, self._to_bare = Connections(self.daemon.endpoint), Connections(endpoint)

    def _daemon_turn(self) -> float:
        status = self.engines.workers[0].client.ask(Status(), StatusReply).status
        return float(msgspec.msgpack.decode(status)["loop_lag_seconds"])

    def _bare_turn(self) -> float:
        self._to_bare.sockets[0].send_multipart([bytes(8), LONGEST_TURN])
        return float(msgspec.msgpack.decode(self._to_bare.sockets[0].recv_multipart()[1]))

    def row(self, lookups: int, rate: float) -> list[object]:
        """Both servers in turn, in slices."""
        assert self._bare.pid is not None
        found: tuple[list[Found], list[Found]] = [], []
        subjects = (
            (found[0], self.daemon.process.pid, self._to_daemon, self._daemon_turn),
            (found[1], self._bare.pid, self._to_bare, self._bare_turn),
        )
        lookups = max(lookups // SLICES, round(SLICE_SECONDS * rate * ENGINES))
        time.sleep(LAG_SECONDS)
        self._bare_turn()
        for results, pid, connections, longest_turn in subjects * SLICES:
            results.append(drive(self.engines.plan(lookups, rate), self.engines, connections, pid))
            results[-1].turn = longest_turn()
        ours, bare = (list(map(median, zip(*(of.columns() for of in each), strict=True))) for each in found)
        hits = sum(of.hits for of in found[0]) / sum(of.looked_up for of in found[0])
        return [self.chunks, round(rate * ENGINES), hits, *ours, *bare[:7]]

    def close(self) -> None:
        self._to_bare.close()
        self._to_daemon.close()
        self._bare.terminate()
        self._bare.join()
        self.daemon.close()
        self._folder.cleanup()


SHOWN = ["p50 ms", "p99", "most", "turn", "loop us", "loop CPU", "daemon CPU"]
HEADER = ["chunks", "lookups/s", "hits", *SHOWN, "late", "sender CPU", "kept waiting", "bare: p50", *SHOWN[1:-1], "CPU"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, nargs="*", default=[100_000, 300_000, 1_000_000])
    parser.add_argument("--rates", type=float, nargs="+", default=[50, 100, 200, 400, 600])
    parser.add_argument("--knee", type=int, default=300_000)
    parser.add_argument("--lookups", type=int, default=10_000)
    options = parser.parse_args()
    gc.disable()
    rows = []
    for chunks in options.chunks:
        rig = Rig(chunks)
        for rate in options.rates if chunks == options.knee else options.rates[:1]:
            rows.append(rig.row(options.lookups, rate))
            print(table(HEADER, rows[-1:]), flush=True)
        rig.close()
    print(table(HEADER, rows))


if __name__ == "__main__":
    main()
