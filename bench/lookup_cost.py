"""Time of `cache.lookup` and of its lease's end, in turn with other versions of the code.

    .venv/bin/python bench/lookup_cost.py [FOLDER ...] [--processes 7]

A lookup of 512 chunks, all hit, in an L1 of 102,400. Columns: microseconds of the lookup and of the lease's end, without sessions
and, in this version, with a session that owns the chunks. Each number is the median of the processes of its version, which take turns; a
process's is the best of its rounds. FOLDER: another version's, with its `kvserver` and the native module in that.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from common import median, table

CHUNKS, PROMPT, ROUNDS, PAGE = 102_400, 512, 400, 4096
HERE = Path(__file__).resolve()


def measure(folder: str, with_session: bool) -> None:
    """Print the two numbers of one process."""
    if folder:
        sys.meta_path[:] = [one for one in sys.meta_path if "editable" not in type(one).__module__]
        sys.path.insert(0, folder)
    from kvserver.cache import POLICIES, Cache, PagePool, one_group

    cache, more = Cache(PagePool(CHUNKS * PAGE, PAGE), POLICIES["slru"]()), {}
    if with_session:
        from kvserver.cache import SessionKey

        more = {"session": SessionKey(b"n" * 32, b"", "agent")}
    prompts = [b"".join((first + n).to_bytes(32, "big") for n in range(PROMPT)) for first in range(0, CHUNKS, PROMPT)]
    for keys in prompts:
        cache.finish_store(cache.plan_store(b"n" * 32, one_group(1), keys, PAGE, **more), copied=True)
    best = [float("inf")] * 2
    for number in range(ROUNDS):
        start = time.perf_counter()
        outcome = cache.lookup(b"n" * 32, prompts[7 * number % len(prompts)], ("e", "r"), 1e9, **more)
        looked_up = time.perf_counter()
        cache.end_lease(("e", "r"))
        times = looked_up - start, time.perf_counter() - looked_up
        assert outcome.hit_chunks == PROMPT
        best = [min(pair) for pair in zip(best, times, strict=True)]
    print(*best)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*")
    parser.add_argument("--processes", type=int, default=7)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure[0], bool(arguments.measure[1]))
        return
    versions = [*((folder, "") for folder in arguments.folders), ("", ""), ("", "session")]
    found: dict[tuple[str, str], list[list[float]]] = {version: [] for version in versions}
    for _ in range(arguments.processes):
        for version in versions:
            command = [sys.executable, str(HERE), "--measure", *version]
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found[version].append([float(text) * 1e6 for text in out.split()])
    names = {version: version[0] or f"here, {'with' if version[1] else 'without'} a session" for version in versions}
    rows = [
        [names[version], *(f"{median([run[at] for run in runs]):.1f}" for at in (0, 1))]
        for version, runs in found.items()
    ]
    print(table(["version", "lookup, us", "lease's end, us"], rows))


if __name__ == "__main__":
    main()
