"""The native copier alone: store and load of one request, against memcpy at the same thread count.

python bench/copier.py [--tokens 8192] [--rounds 9]
"""

from __future__ import annotations

import argparse

from common import MemcpyCeiling, alternate, median, table

from kvserver._native import Direction
from kvserver.bench.copies import CopierRig, llama_8b


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    rows: list[list[object]] = []
    for threads in (1, 2):
        for layout in ("per layer", "K and V apart", "head-major", "cross-layer"):
            geometry = llama_8b()[layout]
            rig = CopierRig(geometry, options.tokens, threads)
            ceiling = MemcpyCeiling(rig.payload, threads)
            memcpy, store, load = (
                median(values)
                for values in alternate(
                    options.rounds,
                    ceiling.gb_per_second,
                    lambda r=rig: r.gb_per_second(Direction.STORE),
                    lambda r=rig: r.gb_per_second(Direction.LOAD),
                )
            )
            rows.append([threads, layout, geometry.run, memcpy, store, load, store / memcpy, load / memcpy])
    print(table(["threads", "layout", "run", "memcpy GB/s", "store", "load", "store ratio", "load ratio"], rows))


if __name__ == "__main__":
    main()
