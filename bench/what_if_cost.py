"""What the what-if curve adds to a lookup of 512 chunks, all hit, and its request's end: `bench/what_if.py --cost`.

First of real daemons in turn, one with the curve and one without: p50 and p99 of lookups one after the other, and the CPU time of the
loop and of all other threads for each; of a third one the CPU time of the event thread in the curve itself, the stores of its 200 prompts
included. Then the parts alone, beside the same lookup in a cache without a daemon (medians): on the loop (a longer event), in the event
thread with the interpreter's lock, and in the event thread in all.
"""

from __future__ import annotations

import itertools
import random
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

from common import median, percentile, table
from rig import BenchDaemon, BenchWorker

from kvserver.cache import Cache, LookupOutcome, one_group
from kvserver.cache.eviction import LeastRecentlyUsed
from kvserver.cache.pages import PagePool
from kvserver.events import ChunksStored, LookupEnded, RequestEnded
from kvserver.protocol import KEY_BYTES
from kvserver.telemetry import WhatIfCurve

PAGE, CHUNK_TOKENS = 4096, 256
LOOKED_UP, DOCUMENTS, ROUNDS, LOOKUPS_A_ROUND = 512, 200, 25, 200
WITHOUT = """
import sys
from kvserver.telemetry import WhatIfCurve
WhatIfCurve.handle = lambda self, event: None
from kvserver.__main__ import main
sys.exit(main())
"""

TIMED = """
import atexit, sys, time
from kvserver.telemetry import WhatIfCurve
handle, clock, sums = WhatIfCurve.handle, time.thread_time_ns, [0, 0]
def timed(self, event):
    first = clock()
    began = clock()
    handle(self, event)
    sums[0] += clock() - began
    sums[1] += began - first
WhatIfCurve.handle = timed
atexit.register(lambda: print(*sums, file=open(%r, "w")))
from kvserver.__main__ import main
sys.exit(main())
"""


class LookedUp:
    """A daemon whose L1 has `DOCUMENTS` prompts, and the times of lookups of them."""

    def __init__(self, program: Sequence[str] = ()) -> None:
        self._daemon = BenchDaemon(program, l1_size=2 * LOOKED_UP * DOCUMENTS * PAGE, chunk_tokens=CHUNK_TOKENS)
        blocks = LOOKED_UP * CHUNK_TOKENS // 16
        self._worker = BenchWorker(self._daemon.endpoint, planes=1, run=64, num_blocks=1 + blocks, block_tokens=16)
        draw = random.Random(1)
        self._documents = [draw.randbytes(LOOKED_UP * KEY_BYTES) for _ in range(DOCUMENTS)]
        for keys in self._documents:
            self._worker.store(keys, array("I", range(1, 1 + blocks)))
        self.micros: list[float] = []
        self.cpu: list[tuple[float, float]] = []  # microseconds of the loop's and of other threads a lookup, by round

    def round(self) -> None:
        before = self._cpu_micros()
        for keys in random.choices(self._documents, k=LOOKUPS_A_ROUND):
            began = time.perf_counter_ns()
            found = self._worker.lookup(keys)
            self.micros.append((time.perf_counter_ns() - began) / 1e3)
            assert found == LOOKED_UP
            self._worker.end_request()
        time.sleep(0.1)  # the event thread ends
        (loop, others), (loop_before, others_before) = self._cpu_micros(), before
        self.cpu.append(((loop - loop_before) / LOOKUPS_A_ROUND, (others - others_before) / LOOKUPS_A_ROUND))

    def _cpu_micros(self) -> tuple[float, float]:
        pid = self._daemon.process.pid
        ran = {
            int(task.name): int((task / "schedstat").read_text().split()[0]) / 1e3
            for task in Path(f"/proc/{pid}/task").iterdir()
        }
        return ran[pid], sum(ran.values()) - ran[pid]

    def shown(self) -> list[float]:
        return [percentile(self.micros, 0.5), percentile(self.micros, 0.99), *map(median, zip(*self.cpu, strict=True))]

    def close(self) -> None:
        self._daemon.close()


def in_a_daemon() -> None:
    """The curve's own time is the CPU time of its thread while it handles events, less that of reading the clock."""
    with tempfile.NamedTemporaryFile("r") as found:
        timed = (sys.executable, "-c", TIMED % found.name)
        servers = LookedUp(), LookedUp((sys.executable, "-c", WITHOUT)), LookedUp(timed)
        for _ in range(ROUNDS):
            for server in servers:
                server.round()
        for server in servers:
            server.close()
        own, clock = (float(nanos) / 1e3 / ROUNDS / LOOKUPS_A_ROUND for nanos in found.read().split())
    ours, without, _ = (server.shown() for server in servers)
    rows = [("with the curve", *ours), ("without", *without)]
    rows.append(("ratio", *(a / b for a, b in zip(ours, without, strict=True))))
    print(table(("a lookup of 512 chunks, us", "p50", "p99", "CPU of the loop", "of other threads"), rows))
    print(
        f"the curve in the event thread: {own - clock:.1f} us of CPU, {100 * (own - clock) / without[0]:.1f}% of p50 without it"
    )


class NoTable:
    """A table that does nothing: what is left has the interpreter's lock."""

    sample_rate, memory_bytes = 1.0, 0

    def lookup(self, *_: object) -> None:
        pass

    def use(self, *_: object) -> None:
        pass

    def __len__(self) -> int:
        return 0


def micros(call: Callable[[], object], times: int = 2000) -> float:
    found = []
    for _ in range(times):
        began = time.perf_counter_ns()
        call()
        found.append((time.perf_counter_ns() - began) / 1e3)
    return median(found)


def alone() -> None:
    cache = Cache(PagePool(LOOKED_UP * (DOCUMENTS + 1) * PAGE, PAGE), LeastRecentlyUsed())
    draw, curve = random.Random(1), WhatIfCurve(LOOKED_UP * (DOCUMENTS + 1), PAGE)
    documents = [draw.randbytes(LOOKED_UP * KEY_BYTES) for _ in range(DOCUMENTS)]
    for number, keys in enumerate(documents):
        cache.finish_store(cache.plan_store(b"n", one_group(1), keys, PAGE), copied=True)
        curve.handle(ChunksStored(number, "i", "m", b"n", keys, pages=1))
    owner, ended = ("i", "r"), RequestEnded(0, "i", "m", "r")
    fields = [
        (0, "i", "m", "r", 0, keys, LookupOutcome(LOOKED_UP, LOOKED_UP), CHUNK_TOKENS, b"n", 0, "")
        for keys in documents
    ]
    events = [LookupEnded(*one, b"", 16) for one in fields]
    next_keys, next_event = itertools.cycle(documents).__next__, itertools.cycle(events).__next__

    def lookup() -> None:
        cache.lookup(b"n", next_keys(), owner, 1e9)
        cache.end_lease(owner)

    def handle() -> None:
        curve.handle(next_event())
        curve.handle(ended)

    whole = micros(lookup)
    longer = micros(lambda: [LookupEnded(*fields[0], b"", 16) for _ in range(1000)], 50) / 1000
    shorter = micros(lambda: [LookupEnded(*fields[0]) for _ in range(1000)], 50) / 1000
    all_of_it = micros(handle)
    curve._table = NoTable()  # type: ignore[assignment]
    locked = micros(handle)
    print(f"a lookup of {LOOKED_UP} chunks in a cache, all hit, and its lease's end: {whole:.1f} us")
    for name, part in (
        ("on the loop", longer - shorter), ("event thread with the lock", locked), ("event thread", all_of_it)
    ):  # fmt: skip
        print(f"{name}: {part:.2f} us, {100 * part / whole:.2f}% of it")
