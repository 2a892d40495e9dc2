"""What each eviction policy finds of many traces, beside LRU and beside what an optimal one could find.

    .venv/bin/python bench/eviction.py --trace synthetic_trace.jsonl

Every row is a replay through the daemon's own cache (`kvserver replay`): hit rate in points above LRU's, by size of L1 as a share of the trace's
distinct blocks. A trace from a file is replayed whole and by halves; the made-up ones are `traces.py`'s. `best` is Belady's
optimum, which knows the future: the block whose next use is farthest leaves, and what is never used again is not stored. Every use of a block
is one of its prefix, so it never evicts a block before those behind it, and with blocks of one size no policy finds more.
"""

from __future__ import annotations

import argparse
import heapq
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import traces
from policies import TRIED

from kvserver.cache import POLICIES
from kvserver.protocol import KEY_BYTES
from kvserver.replay import Trace, read_trace, replay_sizes

SHARES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8)
LOSS, GAIN = 0.5, 2.0  # in points: what the default may lose at no size, and must gain at one
Changes = dict[str, list[tuple[float, str]]]  # by policy: points and where


def half(trace: Trace, number: int) -> Trace:
    middle = len(trace.requests) // 2
    requests = trace.requests[middle:] if number else trace.requests[:middle]
    keys = [key for request in requests for key in keys_of(request.keys)]
    most = max(request.blocks for request in requests)
    return Trace(requests, len(keys), len(set(keys)), most, trace.lost)


def keys_of(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]


def optimum(trace: Trace, blocks: int) -> float:
    """The hit rate of a cache that knows the future."""
    never = len(trace.requests)
    later: dict[bytes, int] = {}
    nexts: list[list[int]] = []
    prompts = [keys_of(request.keys) for request in trace.requests]
    for number in range(never - 1, -1, -1):
        nexts.append([later.get(key, never) for key in prompts[number]])
        later.update(dict.fromkeys(prompts[number], number))
    resident: dict[bytes, tuple[int, int]] = {}
    farthest: list[tuple[int, int, bytes]] = []
    hits = 0
    for prompt, used in zip(prompts, reversed(nexts), strict=True):
        hits += next((place for place, key in enumerate(prompt) if key not in resident), len(prompt))
        for place, (key, when) in enumerate(zip(prompt, used, strict=True)):
            if when == never:
                resident.pop(key, None)
                continue
            resident[key] = -when, -place
            heapq.heappush(farthest, (-when, -place, key))
        while len(resident) > blocks:
            when, place, key = heapq.heappop(farthest)
            if resident.get(key) == (when, place):
                del resident[key]
    return hits / trace.blocks


def all_traces(files: Sequence[str], seeds: int) -> Iterator[tuple[str, Trace]]:
    for file in files:
        with Path(file).open("rb") as lines:
            whole = read_trace(lines, file)
        name = Path(file).stem
        yield name, whole
        yield f"{name}, first half", half(whole, 0)
        yield f"{name}, second half", half(whole, 1)
    for kind in traces.KINDS:
        for seed in range(1, seeds + 1):
            lines = [traces.line(now, path) for now, path in traces.prompts(kind, seed=seed)]
            yield f"{kind}, seed {seed}", read_trace(lines, kind)


def rates(trace: Trace, sizes: list[int], policy: str) -> list[float]:
    return [100 * result.hit_rate for result in replay_sizes(trace, sizes, [policy])]


def compare(name: str, trace: Trace, policies: list[str], changes: Changes) -> None:
    sizes = [max(1, round(trace.distinct_blocks * share)) for share in SHARES]
    lru = rates(trace, sizes, "lru")
    rows = [(f"{name}: lru", [f"{rate:.1f}" for rate in lru])]
    for policy in policies:
        by_size = [rate - of_lru for rate, of_lru in zip(rates(trace, sizes, policy), lru, strict=True)]
        rows.append((policy, [f"{change:+.1f}" for change in by_size]))
        changes[policy] += [(change, f"{name} at {share:.1%}") for change, share in zip(by_size, SHARES, strict=True)]
    best = [100 * optimum(trace, blocks) - of_lru for blocks, of_lru in zip(sizes, lru, strict=True)]
    for label, cells in [*rows, ("best", [f"{change:+.1f}" for change in best])]:
        print("|", label, "|", " | ".join(cells), "|", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", action="append", default=[], metavar="FILE", help="a trace in Mooncake's format")
    parser.add_argument("--seeds", type=int, default=3, help="of each made-up kind")
    arguments = parser.parse_args()
    POLICIES.update(TRIED)
    policies = [name for name in POLICIES if name != "lru"]
    changes: Changes = {policy: [] for policy in policies}
    print("| trace, policy |", " | ".join(f"{share:.1%}" for share in SHARES), "|")
    print("| --- |", " | ".join("---" for _ in SHARES), "|")
    for name, trace in all_traces(arguments.trace, arguments.seeds):
        compare(name, trace, policies, changes)
    print(f"\n| policy | worst | best | mean | sizes that lose more than {LOSS} |\n| --- | --- | --- | --- | --- |")
    for policy, found in changes.items():
        (worst, where), (best, there) = min(found), max(found)
        losers = sum(change < -LOSS for change, _ in found)
        mean = sum(change for change, _ in found) / len(found)
        print(f"| {policy} | {worst:+.1f}, {where} | {best:+.1f}, {there} | {mean:+.2f} | {losers} of {len(found)} |")
        print(f"{policy}: {'may' if not losers and best >= GAIN else 'may not'} be the default", file=sys.stderr)


if __name__ == "__main__":
    main()
