"""The native copier alone: store and load of one request, against memcpy at the same thread count.

python bench/copier.py [--tokens 8192] [--rounds 9] [--l1-folders /dev/shm ...]

With folders, each a tmpfs: against the same with L1 in private memory, as without --l1-file, in GB a processor second of 2 threads,
which counts on a machine that others use, too.
"""

from __future__ import annotations

import argparse
import time

from common import MemcpyCeiling, alternate, median, table

from kvserver._native import Direction
from kvserver.bench.copies import CopierRig, llama_8b


def gb_per_cpu_second(rig: CopierRig, direction: Direction) -> float:
    began = time.process_time()
    rig.gb_per_second(direction)
    return rig.payload / (time.process_time() - began) / 1e9


def beside_private(folders: list[str], tokens: int, rounds: int) -> list[list[object]]:
    rows: list[list[object]] = []
    for folder in folders:
        for layout, geometry in llama_8b().items():
            private, file = CopierRig(geometry, tokens, 2), CopierRig(geometry, tokens, 2, folder)
            runs = [
                lambda rig=rig, way=way: gb_per_cpu_second(rig, way)
                for way in (Direction.STORE, Direction.LOAD)
                for rig in (private, file)
            ]
            store, file_store, load, file_load = (median(values) for values in alternate(rounds, *runs))
            rows.append([folder, layout, geometry.run, store, load, file_store / store, file_load / load])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--l1-folders", nargs="+", default=[])
    options = parser.parse_args()
    if options.l1_folders:
        header = ["folder", "layout", "run", "private: store GB/CPU s", "load", "of it: store", "load"]
        print(table(header, beside_private(options.l1_folders, options.tokens, options.rounds)))
        return
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
