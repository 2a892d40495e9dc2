"""The figures of the GPU benchmark as short tables: ratios to the ceiling, and half their spread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common import table
from gpu_rig import ONE_WAY, WAYS

from kvserver._native import GPU_SHORT_LOAD_BYTES, GPU_SHORT_STORE_BYTES


def crossover(rows: list[dict[str, Any]], direction: str) -> str:
    """From which run length on DMA is at least as fast as staging, at this and every longer one measured."""
    best = ""
    for row in sorted((r for r in rows if r["direction"] == direction), key=lambda r: -int(r["run"])):
        if row["dma"]["median"] < row["staged"]["median"]:
            break
        best = str(row["run"])
    return best or "above all that was measured"


def cell(figure: dict[str, Any] | None) -> str:
    return "-" if figure is None else f"{figure['ratio']:.2f} ±{figure['spread'] / 2:.0%}"


def tables(results: dict[str, list[dict[str, Any]]], left_out: list[str]) -> str:
    """Short: ratios to the ceiling, and half the spread."""
    parts = []

    def part(title: str, section: str, header: list[str], row: Callable[[dict[str, Any]], list[object]]) -> None:
        if section in results:
            parts.append(f"== {title}\n" + table(header, [row(found) for found in results[section]]))

    part("GB/s over the pinned-copy ceiling's", "transfers",
         ["geometry", "layout", "run", "tokens", "direction", "ceiling GB/s", *WAYS],
         lambda r: [r["geometry"], r["layout"], r["run"], r["tokens"], r["direction"], r["ceiling"]["median"],
                    *(cell(r[way]) for way in WAYS)])  # fmt: skip
    part("run lengths", "runs", ["run", "direction", "ceiling GB/s", "dma", "staged"],
         lambda r: [r["run"], r["direction"], r["ceiling"]["median"], cell(r["dma"]), cell(r["staged"])])  # fmt: skip
    if "runs" in results:
        now = {"store": GPU_SHORT_STORE_BYTES, "load": GPU_SHORT_LOAD_BYTES}
        best = ", ".join(f"{name} {crossover(results['runs'], name)} (it is {now[name]})" for name in ONE_WAY)
        parts.append(f"best kShortStoreBytes, kShortLoadBytes: {best}")
    part("other ways", "peers",
         ["geometry", "direction", "chosen", "by tokens", "over PCIe", "gain over tokens"],
         lambda r: [r["geometry"], r["direction"], cell(r["chosen"]), cell(r["by_tokens"]), cell(r.get("over_pcie")),
                    r["gain_over_by_tokens"]])  # fmt: skip
    part("one chunk", "chunks", ["geometry", "beside stores", "MiB", "at the ceiling ms", "p50 ms", "p99 ms"],
         lambda r: [r["geometry"], r["beside_stores"], r["bytes"] >> 20, r["at_ceiling_ms"], r["p50_ms"],
                    r["p99_ms"]])  # fmt: skip
    part("through a daemon", "daemon", ["geometry", "store", "load", "chunk MiB", "at the ceiling ms", "p50 ms", "p99 ms"],
         lambda r: [r["geometry"], cell(r["store"]), cell(r["load"]), r["chunk_bytes"] >> 20, r["at_ceiling_ms"],
                    r["p50_ms"], r["p99_ms"]])  # fmt: skip
    part("another process' work takes longer by (factor; rate reached / aimed at)", "neighbours",
         ["geometry", "direction", "work", "quiet ms", "GB/s", "dma", "staged", "over PCIe"],
         lambda r: [r["geometry"], r["direction"], r["work"], r["quiet_ms"], r["target"],
                    *(slowdown_cell(r.get(way), r["target"]) for way in ("dma", "staged", "over_pcie"))])  # fmt: skip
    part("pinning", "pinning", ["MiB", "driver s/GB", "wall s/GB", "launch p50 ms", "quiet max ms", "max beside ms"],
         lambda r: [r["bytes"] >> 20, r["driver_s_per_gb"], r["wall_s_per_gb"], r["quiet_p50_ms"], r["quiet_max_ms"],
                    r["beside_max_ms"]])  # fmt: skip
    return "\n".join(parts + [f"left out: {line}" for line in left_out])


def slowdown_cell(figures: dict[str, Any] | None, target: float) -> str:
    if figures is None:
        return "-"
    slowdown, rate = figures["slowdown"], figures["rate"]
    return f"{slowdown['median']:.2f} ±{slowdown['spread'] / 2:.0%} at {rate['median'] / target:.2f}"
