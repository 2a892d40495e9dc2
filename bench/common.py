"""What every benchmark shares: the ceiling, percentiles and the table.

A measurement alone means little on a noisy machine, so each is printed beside a ceiling measured in the same
run, alternating with it.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvserver.bench.timing import Buffer, MemcpyCeiling, alternate, median, percentile

__all__ = ["Buffer", "MemcpyCeiling", "alternate", "median", "percentile", "table"]


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns aligned, numbers with three digits."""
    cells = [list(header)] + [[f"{c:.3g}" if isinstance(c, float) else str(c) for c in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)
