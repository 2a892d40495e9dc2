"""The measurements of the GPU benchmark as short tables: ratios to the ceiling, and half their spread.

    python bench/gpu_report.py OUT_STEM PART.json ... [--machine FILE] [--tests JUNIT.xml ...]

joins what the parts of a run have written into OUT_STEM.json and, as Markdown, OUT_STEM.md.
"""

from __future__ import annotations

import argparse
import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import table
from gpu_sizes import MiB

from kvserver._native import GPU_SHORT_LOAD_BYTES, GPU_SHORT_STORE_BYTES

Row = dict[str, Any]
DIRECTIONS = ("store", "load")
OURS, OTHERS = ("dma", "staged", "chosen"), ("by_blocks", "by_slots", "memcpy", "direct")
BESIDE = ("dma", "staged", "by_blocks", "direct")


def crossover(rows: list[Row], direction: str) -> str:
    """From which run length on DMA is at least as fast as staging, at this and every longer one measured."""
    best = ""
    for row in sorted((r for r in rows if r["direction"] == direction), key=lambda r: -int(r["run"])):
        if row["dma"]["median"] < row["staged"]["median"]:
            break
        best = str(row["run"])
    return best or "above all that was measured"


def cell(row: Row | None) -> str:
    return "-" if row is None else f"{row['ratio']:.2f} ±{row['spread'] / 2:.0%}"


def percentiles(row: Row) -> list[object]:
    if row["p50_ms"] is None:
        return [f"only {row['samples']} samples", "-"]
    return [row["p50_ms"], row["p99_ms"]]


def slowdown_cell(row: Row | None, target: float) -> str:
    if row is None:
        return "-"
    slowdown, rate = row["slowdown"], row["rate"]
    return f"{slowdown['median']:.2f} ±{slowdown['spread'] / 2:.0%} at {rate['median'] / target:.2f}"


def goal_cells(row: Row) -> list[object]:
    ratio = row["ratio_p99"]
    if ratio is None:
        return [f"only {row['samples']} samples", "-"]
    return [f"{ratio:.3f} (goal: {row['goal']} at most)", "met" if ratio <= row["goal"] else "MISSED"]


@dataclass
class Table:
    section: str
    title: str
    header: list[str]
    cells: Callable[[Row], list[object]]


TABLES = [
    Table("goal", "time per output token at p99 while copying, over that of quiet turns; at 0.8 of pinned memcpy",
          ["geometry", "direction", "turns", "quiet p50 ms", "beside p50 ms", "rate over memcpy's", "p99 ratio", "goal"],
          lambda r: [r["geometry"], r["direction"], r["samples"], r["quiet_p50_ms"], r["beside_p50_ms"], r["rate"],
                     *goal_cells(r)]),
    Table("transfers", "GB/s over the pinned-copy ceiling's",
          ["geometry", "layout", "run", "tokens", "direction", "ceiling GB/s", *OURS],
          lambda r: [r["geometry"], r["layout"], r["run"], r["tokens"], r["direction"], r["ceiling"]["median"],
                     *(cell(r[way]) for way in OURS)]),
    Table("runs", "run lengths", ["run", "direction", "ceiling GB/s", "dma", "staged"],
          lambda r: [r["run"], r["direction"], r["ceiling"]["median"], cell(r["dma"]), cell(r["staged"])]),
    Table("ways", "other ways, GB/s over the ceiling's; in brackets what the chosen way is over it",
          ["geometry", "run", "direction", "ceiling GB/s", *OURS, *OTHERS],
          lambda r: [r["geometry"], r["run"], r["direction"], r["ceiling"]["median"], *(cell(r[way]) for way in OURS),
                     *(f"{cell(r[way])} ({r['gain'][way]:.2f})" if way in r else "-" for way in OTHERS)]),
    Table("chunks", "one chunk",
          ["geometry", "beside stores", "MiB", "at the ceiling ms", "memcpy p50 ms", "p50 ms", "p99 ms"],
          lambda r: [r["geometry"], r["beside_stores"], r["bytes"] / MiB, r["at_ceiling_ms"], r["memcpy_p50_ms"],
                     *percentiles(r)]),
    Table("daemon", "through a daemon",
          ["geometry", "store", "load", "chunk MiB", "at the ceiling ms", "lookup p50 ms", "p50 ms", "p99 ms"],
          lambda r: [r["geometry"], cell(r["store"]), cell(r["load"]), r["chunk_bytes"] / MiB, r["at_ceiling_ms"],
                     r["lookup_p50_ms"], *percentiles(r)]),
    Table("neighbours", "another process' work takes longer by (factor; rate reached / aimed at)",
          ["geometry", "direction", "work", "quiet ms", "GB/s", *BESIDE],
          lambda r: [r["geometry"], r["direction"], r["work"], r["quiet_ms"], r["target"],
                     *(slowdown_cell(r.get(way), r["target"]) for way in BESIDE)]),
    Table("busy_runs", "run lengths, unpaced, beside another process' work",
          ["run", "work", "direction", "way", "GB/s", "over the ceiling", "GB/s alone", "work slower by", "longest turn"],
          lambda r: [r["run"], r["work"], r["direction"], r["way"], r["gb_per_second"], r["ratio"],
                     r["idle_gb_per_second"], r["slowdown"], r["longest"]]),
    Table("busy", "unpaced, beside another process' work",
          ["geometry", "work", "batches MiB", "direction", "way", "GB/s", "over the ceiling", "GB/s alone", "work slower by",
           "longest turn"],
          lambda r: [r["geometry"], r["work"], r["batch"], r["direction"], r["way"], r["gb_per_second"], r["ratio"],
                     r["idle_gb_per_second"], r["slowdown"], r["longest"]]),
    Table("busy_chunks", "loads of one chunk beside another process' work",
          ["geometry", "work", "batches MiB", "chunk MiB", "p50 ms", "p99 ms"],
          lambda r: [r["geometry"], r["work"], r["batch"], r["bytes"] / MiB, *percentiles(r)]),
    Table("pinning", "pinning", ["MiB", "driver s/GB", "wall s/GB", "launch p50 ms", "p99 ms", "quiet max ms", "max beside ms"],
          lambda r: [r["bytes"] / MiB, r["driver_s_per_gb"], r["wall_s_per_gb"], *percentiles(r), r["quiet_max_ms"],
                     r["beside_max_ms"]]),
]  # fmt: skip


def best_run(results: Row) -> str:
    now = {"store": GPU_SHORT_STORE_BYTES, "load": GPU_SHORT_LOAD_BYTES}
    best = ", ".join(f"{name} {crossover(results['runs'], name)} (it is {now[name]})" for name in DIRECTIONS)
    return f"best kShortStoreBytes, kShortLoadBytes: {best}"


def text(results: Row, left_out: list[str]) -> str:
    """For a terminal."""
    parts = []
    for found in TABLES:
        if rows := results.get(found.section):
            parts.append(f"== {found.title}\n" + table(found.header, [found.cells(row) for row in rows]))
            if found.section == "runs":
                parts.append(best_run(results))
    return "\n".join(parts + [f"left out: {line}" for line in left_out])


def markdown(joined: Row) -> str:
    simulated = joined["simulated"]
    parts = [f"# {joined['device']}, {joined['date']}, commit {joined['commit']}"]
    if simulated:
        parts.append("**SIMULATED: no GPU was used; these measurements mean nothing.**")
    if "tests" in joined:
        parts.append(", ".join(f"{name}: {value}" for name, value in joined["tests"].items()))
    for found in TABLES:
        if rows := joined.get(found.section):
            lines = [found.header, ["---"] * len(found.header)]
            lines += [[f"{c:.3g}" if isinstance(c, float) else str(c) for c in found.cells(row)] for row in rows]
            parts.append(f"## {found.title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines))
            if found.section == "runs":
                parts.append(best_run(joined))
    parts += [f"left out: {line}" for line in joined["left_out"]]
    if joined["machine"]:
        parts.append("```\n" + joined["machine"].rstrip() + "\n```")
    return "\n\n".join(parts) + "\n"


def join(parts: list[Row]) -> Row:
    """Of the same device and commit; the first one's head."""
    joined: Row = {}
    for part in parts:
        for name, value in part.items():
            joined[name] = (
                joined[name] + value if name in joined and isinstance(value, list) else joined.get(name, value)
            )
    return joined


def counts(junits: list[Path]) -> Row:
    suites = [next(ElementTree.parse(junit).getroot().iter("testsuite")) for junit in junits]
    return {
        name: sum(int(suite.attrib[name]) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stem", type=Path)
    parser.add_argument("parts", type=Path, nargs="*")
    parser.add_argument("--machine", type=Path)
    parser.add_argument("--left-out", type=Path, help="a line for each part that ended before its end")
    parser.add_argument("--tests", type=Path, nargs="+")
    parser.add_argument("--head", type=json.loads, default={}, help="device, date, commit, simulated, in JSON")
    options = parser.parse_intermixed_args()
    joined = join([{**options.head, "left_out": []}, *(json.loads(part.read_text()) for part in options.parts)])
    if options.left_out:
        joined["left_out"] += options.left_out.read_text().splitlines()
    joined["machine"] = options.machine.read_text() if options.machine else ""
    if options.tests:
        joined["tests"] = counts(options.tests)
    Path(f"{options.stem}.json").write_text(json.dumps(joined) + "\n")
    Path(f"{options.stem}.md").write_text(markdown(joined))


if __name__ == "__main__":
    main()
