"""Time of `cache.lookup` and of its lease's end, in turn with other versions of the code.

    .venv/bin/python bench/lookup_cost.py [FOLDER ...] [--processes 7]

A lookup of 512 chunks, all hit, in an L1 of 102,400. Columns: microseconds of the lookup and of the lease's end, without sessions
and, in this version, with sessions, each of which owns the chunks of one prompt. Each number is the median of the processes of its version, which take turns; a
process's is the best of its rounds. The last column: milliseconds of a lookup that shares 16,384 chunks which one session owned, once per
process. FOLDER: another version's, with its `kvserver` and the native module in that; FOLDER+ for one with sessions.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from common import median, table

CHUNKS, PROMPT, ROUNDS, PAGE = 102_400, 512, 400, 4096
SHARED = 16_384
HERE = Path(__file__).resolve()


def measure(folder: str, with_session: bool) -> None:
    """Print the seconds of one process."""
    if folder:
        sys.meta_path[:] = [one for one in sys.meta_path if "editable" not in type(one).__module__]
        sys.path.insert(0, folder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "kvserver"]:
            del sys.modules[name]  # this version's, which `common` imported
    from kvserver.cache import POLICIES, Cache, PagePool, one_group

    assert not folder or sys.modules["kvserver"].__path__[0].startswith(folder)
    cache = Cache(PagePool(CHUNKS * PAGE, PAGE), POLICIES["slru"]())
    prompts = [b"".join((first + n).to_bytes(32, "big") for n in range(PROMPT)) for first in range(0, CHUNKS, PROMPT)]
    users: list[dict[str, object]] = [{} for _ in prompts]
    if with_session:
        from kvserver.cache import SessionKey

        users = [{"session": SessionKey(b"n" * 32, b"", f"agent {number}")} for number in range(len(prompts))]
    for keys, user in zip(prompts, users, strict=True):
        cache.finish_store(cache.plan_store(b"n" * 32, one_group(1), keys, PAGE, **user), copied=True)
    best = [float("inf")] * 2
    for number in range(ROUNDS):
        chosen = 7 * number % len(prompts)
        start = time.perf_counter()
        outcome = cache.lookup(b"n" * 32, prompts[chosen], ("e", "r"), 1e9, **users[chosen])
        looked_up = time.perf_counter()
        cache.end_lease(("e", "r"))
        times = looked_up - start, time.perf_counter() - looked_up
        assert outcome.hit_chunks == PROMPT
        best = [min(pair) for pair in zip(best, times, strict=True)]
    keys = b"".join(number.to_bytes(32, "big") for number in range(SHARED))
    cache = Cache(PagePool(SHARED * PAGE, PAGE), POLICIES["slru"]())
    more = {"session": SessionKey(b"n" * 32, b"", "long")} if with_session else {}
    cache.finish_store(cache.plan_store(b"n" * 32, one_group(1), keys, PAGE, **more), copied=True)
    start = time.perf_counter()
    cache.lookup(b"n" * 32, keys, ("e", "other"), 1e9)
    print(*best, time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*")
    parser.add_argument("--processes", type=int, default=7)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure[0], bool(arguments.measure[1]))
        return
    folders = [(folder.removesuffix("+"), "session" * folder.endswith("+")) for folder in arguments.folders]
    versions = [*folders, ("", ""), ("", "session")]
    found: dict[tuple[str, str], list[list[float]]] = {version: [] for version in versions}
    for _ in range(arguments.processes):
        for version in versions:
            command = [sys.executable, str(HERE), "--measure", *version]
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found[version].append([float(text) * unit for text, unit in zip(out.split(), (1e6, 1e6, 1e3), strict=True)])
    names = {version: f"{version[0] or 'here'}, {'with' if version[1] else 'without'} sessions" for version in versions}
    rows = [
        [names[version], *(f"{median([run[at] for run in runs]):.1f}" for at in (0, 1, 2))]
        for version, runs in found.items()
    ]
    print(table(["version", "lookup, us", "lease's end, us", "first share, ms"], rows))


if __name__ == "__main__":
    main()
