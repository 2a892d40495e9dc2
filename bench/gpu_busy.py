"""The GPU computes for another process while we copy: what that costs the other process, and what it costs the copies."""

from __future__ import annotations

import contextlib
import functools
import json
import select
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common import percentile
from gpu_peers import CHUNK_TOKENS, Peers
from gpu_rig import LOAD, ONE_WAY, Direction, Paced, Transfer
from gpu_run import ENOUGH, Run, latencies, rate_of, summary
from gpu_sizes import one_plane
from gpu_ways import BY_CHUNKS

from kvserver._native import Outcome

WORKS = ("decode", "prefill")
GOAL_RATE, GOAL_RATIO = 0.8, 1.03
ROUNDS = 5
CHUNK_SECONDS = 5.0  # at most, for the samples of one row


class Neighbour:
    """`bench/gpu_neighbour.py`; returns when it has warmed up."""

    def __init__(self, simulated: bool) -> None:
        command = [sys.executable, str(Path(__file__).with_name("gpu_neighbour.py")), *["--simulated"] * simulated]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def begin(self, work: str, seconds: float) -> Callable[[], list[float]]:
        """What returns the milliseconds of each turn, when it is over."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([work, seconds]) + "\n")
        self.process.stdin.flush()
        return self._answer

    def milliseconds(self, work: str, seconds: float) -> list[float]:
        return self.begin(work, seconds)()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the neighbour died"
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


class Unpaced:
    """Copies a request again and again until it is left, two of it queued at any time; `gb_per_second` is what it reached."""

    def __init__(self, transfer: Transfer, way: str, direction: Direction) -> None:
        self._transfer, self._way, self._direction = transfer, way, direction
        self._over = threading.Event()
        self._bytes = 0
        self._failed = ""
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        transfer = self._transfer
        device = transfer.board.device(self._way, transfer.batching)
        queued = {transfer.submit(self._way, self._direction) for _ in range(2)}
        while queued:
            select.select([device.completion_fd], [], [])
            for ticket, outcome, _, _, what in device.drain():
                queued.discard(ticket)
                self._bytes += transfer.payload
                if outcome != Outcome.DONE:
                    self._failed = what
                elif not self._over.is_set():
                    queued.add(transfer.submit(self._way, self._direction))

    def __enter__(self) -> Unpaced:
        self._transfer.kv.change()
        self._began = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.gb_per_second = self._bytes / (time.perf_counter() - self._began) / 1e9
        assert not self._failed, self._failed
        self._transfer.check(self._way, self._direction)


# ---- at one rate, by each way -----------------------------------------------------------------


def neighbours(run: Run, neighbour: Neighbour, library: Path) -> None:
    """How much longer another process' work takes while we copy, by each way at the same rate."""
    for geometry in run.per_layer[0::2]:
        transfer = Transfer(run.board, geometry, run.sizes.request)
        peers = Peers(library, transfer)
        others = [way for way in ("by_blocks", "direct") if way in peers.usable()[0]]
        for name, direction in ONE_WAY.items():
            ways: dict[str, Callable[[], int]] = {
                way: functools.partial(moved, transfer, way, direction) for way in ("dma", "staged")
            }
            ways |= {way: functools.partial(peers.move, way, direction) for way in others}
            rate = 0.8 * min(statistics.median(rate_of(copy)() for _ in range(5)) for copy in ways.values())
            for work in WORKS:
                found = slowdowns(run, neighbour, work, ways, rate, functools.partial(checked, transfer, direction))
                run.add("neighbours", geometry=geometry.name, run=geometry.run, direction=name, work=work, target=rate,
                        **found)  # fmt: skip
        peers.close()


@contextlib.contextmanager
def checked(transfer: Transfer, direction: Direction, way: str) -> Iterator[None]:
    """What was copied by this way within it arrived."""
    transfer.kv.change()
    yield
    transfer.check(way, direction, CHUNK_TOKENS // transfer.geometry.block_tokens if way in BY_CHUNKS else 1)


def moved(transfer: Transfer, way: str, direction: Direction) -> int:
    transfer.seconds(way, direction)
    return transfer.payload


def slowdowns(
    run: Run,
    neighbour: Neighbour,
    work: str,
    ways: dict[str, Callable[[], int]],
    rate: float,
    check: Callable[[str], contextlib.AbstractContextManager[None]],
) -> dict[str, Any]:
    """{way: the median turn's time over that of the round's quiet turns}, with the rates that were reached."""
    seconds = run.sizes.seconds
    found: dict[str, dict[str, list[float]]] = {way: {"slowdown": [], "longest": [], "rate": []} for way in ways}
    quiet_ms = []
    for _ in range(run.options.rounds):
        quiet = neighbour.milliseconds(work, seconds)
        quiet_ms.append(statistics.median(quiet))
        for way, copy in ways.items():
            with check(way), Paced(copy, rate) as paced:
                beside = neighbour.milliseconds(work, seconds)
            found[way]["slowdown"].append(statistics.median(beside) / statistics.median(quiet))
            found[way]["longest"].append(max(beside) / statistics.median(quiet))
            found[way]["rate"].append(paced.gb_per_second)
    return {
        "quiet_ms": statistics.median(quiet_ms),
        **{way: {name: summary(values) for name, values in kinds.items()} for way, kinds in found.items()},
    }


# ---- as fast as it goes, by size of batch -----------------------------------------------------


def busy(run: Run, neighbour: Neighbour) -> None:
    """Unpaced copies and single chunks beside decode and prefill, by more and larger batches."""
    for batching in run.sizes.batches:
        for geometry in run.per_layer:
            if run.is_over(f"busy, {geometry.name}, batches of {batching} MiB"):
                continue
            transfer = Transfer(run.board, geometry, run.sizes.request, batching)
            chunk = Transfer(run.board, geometry, 256, batching)
            for work in WORKS:
                for name, direction in ONE_WAY.items():
                    for way in ("dma", "staged"):
                        run.add("busy", geometry=geometry.name, work=work, batch=str(batching), direction=name, way=way,
                                **beside(run, neighbour, work, transfer, way, direction))  # fmt: skip
                run.add("busy_chunks", geometry=geometry.name, work=work, batch=str(batching), bytes=chunk.payload,
                        **latencies(chunks_beside(run, neighbour, work, chunk)))  # fmt: skip
        run.board.drop_devices()


def busy_runs(run: Run, neighbour: Neighbour) -> None:
    """One plane of short runs by each way, unpaced, beside decode and prefill: which way a busy GPU wants."""
    for kib in run.sizes.busy_run_kib:
        transfer = Transfer(run.board, one_plane(kib), run.sizes.run_bytes // (kib << 10))
        for work in WORKS:
            for name, direction in ONE_WAY.items():
                for way in ("dma", "staged"):
                    run.add("busy_runs", run=kib << 10, work=work, direction=name, way=way,
                            **beside(run, neighbour, work, transfer, way, direction))  # fmt: skip


def beside(
    run: Run, neighbour: Neighbour, work: str, transfer: Transfer, way: str, direction: Direction
) -> dict[str, Any]:
    quiet = neighbour.milliseconds(work, run.sizes.seconds)
    with Unpaced(transfer, way, direction) as alone:
        time.sleep(run.sizes.seconds)
    with Unpaced(transfer, way, direction) as copies:
        turns = neighbour.milliseconds(work, run.sizes.seconds)
    return {
        "quiet_ms": statistics.median(quiet),
        "slowdown": statistics.median(turns) / statistics.median(quiet),
        "longest": max(turns) / statistics.median(quiet),
        "gb_per_second": copies.gb_per_second,
        "idle_gb_per_second": alone.gb_per_second,
        "ratio": copies.gb_per_second / run.ceiling_of(direction),
    }


def chunks_beside(run: Run, neighbour: Neighbour, work: str, chunk: Transfer) -> list[float]:
    """Milliseconds of loads of one chunk, by the way that the device chooses."""
    times: list[float] = []
    until = time.monotonic() + CHUNK_SECONDS
    chunk.kv.change()
    while len(times) < run.sizes.samples and time.monotonic() < until:
        turns = neighbour.begin(work, run.sizes.seconds)
        over = time.monotonic() + run.sizes.seconds
        while time.monotonic() < over and len(times) < run.sizes.samples:
            times.append(chunk.seconds("chosen", LOAD) * 1000)
        turns()
    chunk.check("chosen", LOAD)
    return times


def goal(run: Run, neighbour: Neighbour) -> None:
    """The time of a token at p99 while we copy at 0.8 of a pinned memcpy, over that of quiet turns.

    The control is a memcpy of as many bytes at that rate: what any copy costs.
    """
    for geometry in run.per_layer:
        transfer = Transfer(run.board, geometry, run.sizes.request)
        for name, direction in ONE_WAY.items():
            copy = functools.partial(moved, transfer, "chosen", direction)
            run.add("goal", geometry=geometry.name, direction=name,
                    **_goal(run, neighbour, direction, copy, checked(transfer, direction, "chosen")))  # fmt: skip
            if geometry is run.per_layer[0]:
                copy = functools.partial(moved_plainly, run, transfer.payload, direction)
                run.add("goal", geometry="one memcpy", direction=name,
                        **_goal(run, neighbour, direction, copy, contextlib.nullcontext()))  # fmt: skip


def moved_plainly(run: Run, size: int, direction: Direction) -> int:
    run.ceiling.seconds(size, direction)
    return size


def _goal(
    run: Run,
    neighbour: Neighbour,
    direction: Direction,
    copy: Callable[[], int],
    check: contextlib.AbstractContextManager[None],
) -> dict[str, Any]:
    rate = GOAL_RATE * run.ceiling_of(direction)
    turn_ms = statistics.median(neighbour.milliseconds("decode", run.sizes.seconds))
    wanted = ENOUGH if run.sizes.samples >= ENOUGH else run.sizes.samples
    seconds = 1.1 * wanted * turn_ms / 1000 / ROUNDS
    quiet: list[float] = []
    copying: list[float] = []
    rates = []
    with check:
        for _ in range(ROUNDS):
            quiet += neighbour.milliseconds("decode", seconds)
            with Paced(copy, rate) as paced:
                copying += neighbour.milliseconds("decode", seconds)
            rates.append(paced.gb_per_second)
    enough = min(len(quiet), len(copying)) >= ENOUGH
    return {
        "samples": min(len(quiet), len(copying)),
        "quiet_p50_ms": statistics.median(quiet),
        "beside_p50_ms": statistics.median(copying),
        "ratio_p99": percentile(copying, 0.99) / percentile(quiet, 0.99) if enough else None,
        "goal": GOAL_RATIO,
        "rate": statistics.median(rates) / rate * GOAL_RATE,
    }
