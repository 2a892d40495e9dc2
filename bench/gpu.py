"""Copies between L1 and a GPU: each rate beside what one large pinned copy reaches in the same run.

    python bench/gpu.py [--out FILE.json] [--only SECTION,...] [--rounds 5] [--sizes full] [--seconds 300] [--simulated]

Sections: transfers, runs, ways, chunks, daemon, pinning, neighbours, goal, busy_runs, busy. A section that begins after --seconds is left out, and
the report names it. Bytes are compared after what is timed: a wrong one ends the run. --simulated runs the same code over the simulated GPU
with tiny sizes: its measurements mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from gpu_busy import Neighbour, busy, busy_runs, goal, neighbours
from gpu_bytes import WrongBytes
from gpu_daemon import Served
from gpu_peers import Peers
from gpu_report import text
from gpu_rig import LOAD, ONE_WAY, STORE, WAYS, Board, Ceiling, Direction, Transfer
from gpu_run import Run, latencies
from gpu_sizes import SIZES, one_plane
from gpu_ways import ROOT, build

from kvserver import _native
from kvserver._native import PIN_BYTES, HostRegion, Pinner

BOTH_WAYS: dict[str, tuple[Direction, ...]] = {"store": (STORE,), "load": (LOAD,), "both": (STORE, LOAD)}

# ---- sections ---------------------------------------------------------------------------------


def transfers(run: Run) -> None:
    """Each geometry, layout, length and direction, by each way."""
    for geometry in run.geometries:
        for tokens in run.sizes.lengths:
            transfer = Transfer(run.board, geometry, tokens)
            for name, directions in BOTH_WAYS.items():
                ways = {way: functools.partial(transfer.gb_per_second, way, *directions) for way in WAYS}
                run.add("transfers", geometry=geometry.name, layout=geometry.layout, run=geometry.run, tokens=tokens,
                        bytes=transfer.payload, direction=name, **run.compare(directions, **ways))  # fmt: skip


def runs(run: Run) -> None:
    """One plane of ever longer runs, none beside another: where DMA overtakes staging."""
    for kib in run.sizes.run_kib:
        geometry = one_plane(kib)
        transfer = Transfer(run.board, geometry, run.sizes.run_bytes // geometry.run)
        for name, direction in ONE_WAY.items():
            measures = {way: functools.partial(transfer.gb_per_second, way, direction) for way in ("dma", "staged")}
            run.add("runs", run=geometry.run, direction=name, **run.compare((direction,), **measures))


def ways(run: Run, library: Path) -> None:
    """Ours beside other ways to move the same request; see `gpu_ways`."""
    for geometry in run.per_layer:
        transfer = Transfer(run.board, geometry, run.sizes.request)
        peers = Peers(library, transfer)
        usable, refused = peers.usable()
        run.left_out += refused
        for name, direction in ONE_WAY.items():
            measures: dict[str, Callable[[], float]] = {
                way: functools.partial(transfer.gb_per_second, way, direction) for way in WAYS
            }
            measures |= {way: functools.partial(peers.gb_per_second, way, direction) for way in usable}
            row = run.add("ways", geometry=geometry.name, run=geometry.run, tokens=transfer.tokens, direction=name,
                          **run.compare((direction,), **measures))  # fmt: skip
            row["gain"] = {other: row["chosen"]["median"] / row[other]["median"] for other in usable}
        peers.close()


def chunks(run: Run) -> None:
    """Loads of one chunk of 256 tokens, alone; and beside stores without end."""
    for geometry in run.per_layer:
        transfer = Transfer(run.board, geometry, 256)
        bare = transfer.payload / run.ceiling_of(LOAD) / 1e6
        memcpy = [run.ceiling.seconds(transfer.payload, LOAD) * 1000 for _ in range(run.sizes.samples)]
        for beside in (False, True):
            times: list[float] = []
            transfer.kv.change()
            store = transfer.submit("chosen", STORE) if beside else None
            while len(times) < run.sizes.samples:
                began = time.perf_counter()
                waiting = {transfer.submit("chosen", LOAD)}
                while waiting:
                    ended = drained(transfer, "chosen")
                    waiting -= ended
                    if store in ended:
                        store = transfer.submit("chosen", STORE)
                times.append((time.perf_counter() - began) * 1000)
            if store is not None:
                run.board.wait(run.board.device("chosen"), {store})
                transfer.check("chosen", STORE)
            transfer.check("chosen", LOAD)
            run.add("chunks", geometry=geometry.name, beside_stores=beside, bytes=transfer.payload, at_ceiling_ms=bare,
                    memcpy_p50_ms=latencies(memcpy)["p50_ms"], **latencies(times))  # fmt: skip


def drained(transfer: Transfer, way: str) -> set[int]:
    """Tickets that ended; waits for one."""
    device = transfer.board.device(way)
    select.select([device.completion_fd], [], [])
    return {end[0] for end in device.drain()}


def daemon(run: Run) -> None:
    """Through a real daemon: a whole request each way, and single chunks."""
    for geometry in run.per_layer:
        with contextlib.closing(Served(run.board, geometry, min(8192, run.sizes.lengths[-1]))) as served:
            figures = {
                "store": run.compare((STORE,), store=served.store)["store"],
                "load": run.compare((LOAD,), load=served.load)["load"],
            }
            times = [served.load_chunk() for _ in range(run.sizes.samples)]
            served.check(served.blocks // served.chunks)
            lookups = [served.lookup_chunk() for _ in range(run.sizes.samples)]
        run.add("daemon", geometry=geometry.name, bytes=served.payload, **figures, chunk_bytes=served.chunk_bytes,
                at_ceiling_ms=served.chunk_bytes / run.ceiling_of(LOAD) / 1e6,
                lookup_p50_ms=latencies(lookups)["p50_ms"], **latencies(times))  # fmt: skip


def pinning(run: Run, neighbour: Neighbour) -> None:
    """What pinning costs, and what a neighbour that launches small kernels sees of it."""
    size = (1 << 20) if run.simulated else 2 * PIN_BYTES
    for _ in range(run.options.rounds):
        quiet = neighbour.milliseconds("launches", 4 * run.sizes.seconds)
        over = neighbour.begin("launches", 12 * run.sizes.seconds)
        region = HostRegion(size)
        pinner = Pinner(region, run.board.gpu, 4)
        wall = run.board.wait_pinned(pinner)
        seconds = pinner.seconds
        beside = over()
        del pinner
        run.add("pinning", bytes=size, driver_s_per_gb=seconds / size * 1e9, wall_s_per_gb=wall / size * 1e9,
                quiet_max_ms=max(quiet), beside_max_ms=max(beside), **latencies(quiet))  # fmt: skip


# ---- the end ----------------------------------------------------------------------------------

SECTIONS: dict[str, Callable[..., None]] = {
    "transfers": transfers, "runs": runs, "ways": ways, "chunks": chunks, "daemon": daemon, "pinning": pinning,
    "neighbours": neighbours, "goal": goal, "busy_runs": busy_runs, "busy": busy,
}  # fmt: skip
NEEDS_NEIGHBOUR, NEEDS_LIBRARY = {"neighbours", "goal", "busy_runs", "busy", "pinning"}, {"neighbours", "ways"}


class Needs:
    """What some sections need, made by the first of them."""

    def __init__(self, simulated: bool) -> None:
        self._simulated = simulated
        self._neighbour: Neighbour | None = None

    def of(self, section: str) -> list[Any]:
        found: list[Any] = []
        if section in NEEDS_NEIGHBOUR:
            self._neighbour = self._neighbour or Neighbour(self._simulated)
            found.append(self._neighbour)
        if section in NEEDS_LIBRARY:
            found.append(build(ROOT / "build/gpu-ways", self._simulated))
        return found

    def close(self) -> None:
        if self._neighbour is not None:
            self._neighbour.close()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="all measurements, in JSON")
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--models", default="", help="names joined by commas; all, unless given")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", choices=SIZES, default="full")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--short-store-bytes", type=int, default=_native.GPU_SHORT_STORE_BYTES)
    parser.add_argument("--short-load-bytes", type=int, default=_native.GPU_SHORT_LOAD_BYTES)
    parser.add_argument("--simulated", action="store_true")
    options = parser.parse_args()
    if options.simulated and options.out and (ROOT / "bench/results") in options.out.resolve().parents:
        parser.error("measurements of a simulation do not belong into bench/results")
    return options


def main() -> None:
    options = arguments()
    began = time.monotonic()
    if options.simulated:
        print("SIMULATED: no GPU is used; these measurements mean nothing")
    sizes = SIZES["tiny" if options.simulated else options.sizes]
    limits = {name: getattr(options, name) for name in ("short_store_bytes", "short_load_bytes")}
    board = Board(options.simulated, sizes.memory, **limits)
    run = Run(board, Ceiling(board, sizes.ceiling), sizes, options, save=write, until=began + options.seconds)
    needs = Needs(options.simulated)
    for name in options.only.split(","):
        if run.is_over(name):
            continue
        try:
            SECTIONS[name](run, *needs.of(name))
        except Exception:  # the others are worth having; WrongBytes is none
            traceback.print_exc()
            run.failed.append(name)
            run.left_out.append(f"{name}: it failed, see the log")
        print(f"{name}: done after {time.monotonic() - began:.0f} s", file=sys.stderr)
        write(run)
    needs.close()
    print(text(run.results, run.left_out))
    if options.simulated:
        print("SIMULATED: no GPU is used; these measurements mean nothing")
    board.close()
    sys.exit(bool(run.failed))


def write(run: Run) -> None:
    """All that there is."""
    if run.options.out is not None:
        head = {"command": " ".join(sys.argv), "device": run.board.name, "simulated": run.simulated, "date": now(),
                "commit": commit(), "rounds": run.options.rounds, "failed": run.failed,
                "left_out": run.left_out}  # fmt: skip
        run.options.out.write_text(json.dumps({**head, **run.results}, indent=1))


def now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%MZ")


def commit() -> str:
    """As KVSERVER_COMMIT names it, where there is no repository."""
    named = os.environ.get("KVSERVER_COMMIT")
    if named:
        return named
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    found = subprocess.run(git, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    try:
        main()
    except WrongBytes as wrong:
        print(wrong, file=sys.stderr)
        sys.exit(WrongBytes.EXIT_STATUS)
