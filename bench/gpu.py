"""Copies between L1 and a GPU: each figure beside what one large pinned copy reaches in the same run.

    python bench/gpu.py [--out FILE.json] [--only SECTION,...] [--rounds 5] [--seconds 200] [--simulated]

Sections: transfers, runs, neighbours, chunks, daemon, peers, pinning. A section that begins after --seconds is left out, and says
so. --simulated runs the same code over the simulated GPU with tiny sizes: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import functools
import json
import select
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import alternate, percentile
from gpu_daemon import Served
from gpu_peers import ByTokens, OverPcie
from gpu_report import tables
from gpu_rig import LOAD, ONE_WAY, STORE, WAYS, Board, Ceiling, Direction, Geometry, Paced, Transfer, geometries, torch

from kvserver._native import PIN_BYTES, HostRegion, Pinner

BOTH_WAYS: dict[str, tuple[Direction, ...]] = {"store": (STORE,), "load": (LOAD,), "both": (STORE, LOAD)}


@dataclass
class Run:
    """One run of the benchmark: how much of everything, and what was found."""

    board: Board
    ceiling: Ceiling
    options: argparse.Namespace
    results: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def simulated(self) -> bool:
        return bool(self.options.simulated)

    def add(self, section: str, **row: Any) -> dict[str, Any]:
        self.results.setdefault(section, []).append(row)
        return row

    def compare(self, directions: tuple[Direction, ...], **measures: Callable[[], float]) -> dict[str, Any]:
        """GB/s of each and of the ceiling, in turn: {name: {median, spread, ratio, all}}."""
        names = ["ceiling", *measures]
        found = alternate(
            self.options.rounds, functools.partial(self.ceiling.gb_per_second, *directions), *measures.values()
        )
        top = statistics.median(found[0])
        return {name: {**summary(values), "ratio": statistics.median(values) / top}
                for name, values in zip(names, found, strict=True)}  # fmt: skip


def summary(values: list[float]) -> dict[str, Any]:
    """`spread`: from the least to the most, over the median."""
    median = statistics.median(values)
    return {"median": median, "spread": (max(values) - min(values)) / median, "all": values}


# ---- sections ---------------------------------------------------------------------------------


def transfers(run: Run) -> None:
    """Each geometry, layout, length and direction, by each way."""
    for geometry in geometries(run.simulated):
        for tokens in (256, 512) if run.simulated else (256, 2048, 8192, 32768):
            transfer = Transfer(run.board, geometry, tokens)
            for name, directions in BOTH_WAYS.items():
                ways = {way: functools.partial(transfer.gb_per_second, way, *directions) for way in WAYS}
                run.add("transfers", geometry=geometry.name, layout=geometry.layout, run=geometry.run, tokens=tokens,
                        bytes=transfer.payload, direction=name, **run.compare(directions, **ways))  # fmt: skip


def runs(run: Run) -> None:
    """One plane of ever longer runs, none beside another: where DMA overtakes staging."""
    kibs = [4, 64] if run.simulated else [4, 8, 12, 16, 20, 24, 28, 32, 48, 64, 96, 128, 256, 512, 1024]
    payload = (1 << 20) if run.simulated else (256 << 20)
    for kib in kibs:
        geometry = Geometry("runs", "one plane", 1, kib << 10, 1)
        transfer = Transfer(run.board, geometry, payload // geometry.run)
        for name, direction in ONE_WAY.items():
            ways = {way: functools.partial(transfer.gb_per_second, way, direction) for way in ("dma", "staged")}
            run.add("runs", run=geometry.run, direction=name, **run.compare((direction,), **ways))


def peers(run: Run) -> None:
    """Our chosen way beside what torch can do."""
    if torch is None:
        run.left_out.append("peers: there is no torch")
        return
    for geometry in geometries(run.simulated)[::2]:
        transfer = Transfer(run.board, geometry, 512 if run.simulated else 8192)
        others: dict[str, Any] = {"by_tokens": ByTokens(run.board, transfer)}
        over_pcie = try_over_pcie(run, transfer)
        if over_pcie is not None:
            others["over_pcie"] = over_pcie
        for name, direction in ONE_WAY.items():
            measures = {other: rate_of(functools.partial(peer.run, direction)) for other, peer in others.items()}
            row = run.add("peers", geometry=geometry.name, run=geometry.run, tokens=transfer.blocks * geometry.block_tokens,
                          direction=name, **run.compare((direction,), chosen=functools.partial(
                              transfer.gb_per_second, "chosen", direction), **measures))  # fmt: skip
            for other in others:
                row[f"gain_over_{other}"] = row["chosen"]["median"] / row[other]["median"]


def try_over_pcie(run: Run, transfer: Transfer) -> OverPcie | None:
    """torch may refuse a tensor of host memory."""
    try:
        found = OverPcie(run.board, transfer)
        found.run(STORE)
    except Exception as error:
        run.left_out.append(f"a kernel over pinned memory, {transfer.geometry.name}: {error}")
        return None
    return found


def rate_of(copy: Callable[[], int]) -> Callable[[], float]:
    def gb_per_second() -> float:
        began = time.perf_counter()
        moved = copy()
        return moved / (time.perf_counter() - began) / 1e9

    return gb_per_second


def chunks(run: Run) -> None:
    """Loads of one chunk of 256 tokens, alone; and beside stores without end."""
    samples = 20 if run.simulated else 1000
    for geometry in geometries(run.simulated)[::2]:
        transfer = Transfer(run.board, geometry, 256)
        top = statistics.median(run.ceiling.gb_per_second(LOAD) for _ in range(run.options.rounds))
        bare = transfer.payload / top / 1e6
        for beside in (False, True):
            times: list[float] = []
            store = transfer.submit("chosen", STORE) if beside else None
            while len(times) < samples:
                began = time.perf_counter()
                waiting = {transfer.submit("chosen", LOAD)}
                while waiting:
                    ended = drained(run.board, "chosen")
                    waiting -= ended
                    if store in ended:
                        store = transfer.submit("chosen", STORE)
                times.append((time.perf_counter() - began) * 1000)
            if store is not None:
                run.board.wait(run.board.devices["chosen"], {store})
            run.add("chunks", geometry=geometry.name, beside_stores=beside, bytes=transfer.payload, at_ceiling_ms=bare,
                    p50_ms=percentile(times, 0.5), p99_ms=percentile(times, 0.99), samples=len(times))  # fmt: skip


def daemon(run: Run) -> None:
    """Through a real daemon: a whole request each way, and single chunks."""
    for geometry in geometries(run.simulated)[::2]:
        served = Served(run.board, geometry, 512 if run.simulated else 8192)
        figures = {
            "store": run.compare((STORE,), store=served.store)["store"],
            "load": run.compare((LOAD,), load=served.load)["load"],
        }
        top = statistics.median(run.ceiling.gb_per_second(LOAD) for _ in range(run.options.rounds))
        times = [served.load_chunk() for _ in range(20 if run.simulated else 1000)]
        served.close()
        run.add("daemon", geometry=geometry.name, bytes=served.payload, **figures, chunk_bytes=served.chunk_bytes,
                at_ceiling_ms=served.chunk_bytes / top / 1e6, p50_ms=percentile(times, 0.5),
                p99_ms=percentile(times, 0.99), samples=len(times))  # fmt: skip


def drained(board: Board, way: str) -> set[int]:
    """Tickets that ended; waits for one."""
    device = board.devices[way]
    select.select([device.completion_fd], [], [])
    return {end[0] for end in device.drain()}


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


def neighbours(run: Run, neighbour: Neighbour) -> None:
    """How much longer another process' work takes while we copy, by each way at the same rate."""
    seconds = 0.02 if run.simulated else 0.25
    for geometry in geometries(run.simulated)[0:4:2]:
        transfer = Transfer(run.board, geometry, 256 if run.simulated else 2048)
        over_pcie = None if torch is None else try_over_pcie(run, transfer)
        copies: dict[str, dict[str, Callable[[], int]]] = {name: {} for name in ONE_WAY}
        for name, direction in ONE_WAY.items():
            for way in ("dma", "staged"):
                copies[name][way] = functools.partial(moved, transfer, way, direction)
            if over_pcie is not None:
                copies[name]["over_pcie"] = functools.partial(over_pcie.run, direction)
        for name, ways in copies.items():
            rate = 0.8 * min(statistics.median(rate_of(copy)() for _ in range(5)) for copy in ways.values())
            for work in ("decode", "matmul"):
                run.add("neighbours", geometry=geometry.name, run=geometry.run, direction=name, work=work, target=rate,
                        **slowdowns(run, neighbour, work, ways, rate, seconds))  # fmt: skip


def moved(transfer: Transfer, way: str, direction: Direction) -> int:
    transfer.seconds(way, direction)
    return transfer.payload


def slowdowns(
    run: Run, neighbour: Neighbour, work: str, ways: dict[str, Callable[[], int]], rate: float, seconds: float
) -> dict[str, Any]:
    """{way: the median turn's time over that of the round's quiet turns}, with the rates that were reached."""
    found: dict[str, dict[str, list[float]]] = {way: {"slowdown": [], "longest": [], "rate": []} for way in ways}
    quiet_ms = []
    for _ in range(run.options.rounds):
        quiet = neighbour.milliseconds(work, seconds)
        quiet_ms.append(statistics.median(quiet))
        for way, copy in ways.items():
            with Paced(copy, rate) as paced:
                beside = neighbour.milliseconds(work, seconds)
            found[way]["slowdown"].append(statistics.median(beside) / statistics.median(quiet))
            found[way]["longest"].append(max(beside) / statistics.median(quiet))
            found[way]["rate"].append(paced.gb_per_second)
    return {
        "quiet_ms": statistics.median(quiet_ms),
        **{way: {name: summary(values) for name, values in kinds.items()} for way, kinds in found.items()},
    }


def pinning(run: Run, neighbour: Neighbour) -> None:
    """What pinning costs, and what a neighbour that launches small kernels sees of it."""
    size = (1 << 20) if run.simulated else 8 * PIN_BYTES
    for _ in range(run.options.rounds):
        quiet = neighbour.milliseconds("launches", 0.05 if run.simulated else 1.0)
        over = neighbour.begin("launches", 0.1 if run.simulated else 3.0)
        region = HostRegion(size)
        pinner = Pinner(region, run.board.gpu, 4)
        wall = run.board.wait_pinned(pinner)
        seconds = pinner.seconds
        beside = over()
        del pinner
        run.add("pinning", bytes=size, driver_s_per_gb=seconds / size * 1e9, wall_s_per_gb=wall / size * 1e9,
                quiet_p50_ms=statistics.median(quiet), quiet_max_ms=max(quiet), beside_max_ms=max(beside))  # fmt: skip


# ---- the end ----------------------------------------------------------------------------------

SECTIONS: dict[str, Callable[..., None]] = {
    "transfers": transfers, "runs": runs, "neighbours": neighbours, "chunks": chunks, "daemon": daemon, "peers": peers, "pinning": pinning,
}  # fmt: skip
WITH_NEIGHBOUR = {"neighbours", "pinning"}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="all figures, in JSON")
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--simulated", action="store_true")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    began = time.monotonic()
    gib = 1 << 30
    board = Board(
        options.simulated, (96 << 20) if options.simulated else 9 * gib, (96 << 20) if options.simulated else 9 * gib
    )
    ceiling = Ceiling(board, (1 << 20) if options.simulated else gib // 2)
    run = Run(board, ceiling, options)
    neighbour: Neighbour | None = None
    for name in options.only.split(","):
        if time.monotonic() - began > options.seconds:
            run.left_out.append(f"{name}: --seconds {options.seconds:.0f} were over")
            continue
        try:
            if name in WITH_NEIGHBOUR:
                neighbour = neighbour or Neighbour(options.simulated)
                SECTIONS[name](run, neighbour)
            else:
                SECTIONS[name](run)
        except Exception:  # the others are worth having
            traceback.print_exc()
            run.failed.append(name)
            run.left_out.append(f"{name}: it failed, see above")
        print(f"{name}: done after {time.monotonic() - began:.0f} s", file=sys.stderr)
        write(run)
    if neighbour is not None:
        neighbour.close()
    if options.simulated:
        print("SIMULATED: these figures say nothing about speed")
    print(tables(run.results, run.left_out))
    board.close()
    sys.exit(bool(run.failed))


def write(run: Run) -> None:
    if run.options.out is not None:
        head = {"command": " ".join(sys.argv), "device": run.board.name, "simulated": run.simulated,
                "rounds": run.options.rounds, "left_out": run.left_out}  # fmt: skip
        run.options.out.write_text(json.dumps({**head, **run.results}, indent=1))


if __name__ == "__main__":
    main()
