"""Aligned runs of N chunks as objects of a shared tier, beside one object a chunk: hits, requests and bytes of traces. No store, no timing.

    .venv/bin/python bench/l2_runs.py [TRACE.jsonl ...]

A run is named by its last key, so another daemon finds it only if its prompt has all of the run. What is behind the last whole run
stays single; those that a longer prompt completes are written again as a run. Each prompt is looked up and stored by a daemon that
has nothing in L1, whole, and nothing expires. Owns: the rules of both forms. Refuses to know: how a store is asked.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import agents
import traces
from common import table

from kvserver.l2.remote.search import chain_length

BLOCK_TOKENS, CHUNK_TOKENS, AT_ONCE = 512, 256, 16
RUNS = (4, 8, 16, 32)
Ids = Sequence[int]  # of a prompt's chunks; equal ids are equal prefixes


class Bucket:
    """Objects of one form; `run`: chunks of a run, 1: all are single."""

    def __init__(self, run: int) -> None:
        self._run, self._runs, self._single = run, set[int](), set[int]()
        self.counts = Counter[str]()

    def serve(self, ids: Ids) -> None:
        counts, ends = self.counts, ids[self._run - 1 :: self._run]
        found = self._leading(ends, self._runs)
        tail = ids[found * self._run :][: self._run - 1]
        singles = self._leading(tail, self._single)
        counts["chunks"] += len(ids)
        counts["hits"] += found * self._run + singles
        counts["GET"] += found + singles
        self._put(ends, self._runs, self._run)
        self._put(ids[len(ends) * self._run :], self._single, 1)

    def _leading(self, ids: Ids, there: set[int]) -> int:
        def exist(places: Sequence[int]) -> list[bool]:
            self.counts["HEAD"] += len(places)
            return [ids[place] in there for place in places]

        return chain_length(len(ids), AT_ONCE, exist, first_alone=True) if ids else 0

    def _put(self, ids: Ids, there: set[int], chunks: int) -> None:
        new = [id for id in ids if id not in there]
        there.update(new)
        self.counts["PUT"] += len(new)
        self.counts["written"] += len(new) * chunks


def chunks_of(blocks: Iterable[int]) -> list[int]:
    parts = BLOCK_TOKENS // CHUNK_TOKENS
    return [block * parts + part for block in blocks for part in range(parts)]


def of_file(path: Path) -> Iterator[list[int]]:
    for line in path.read_text().splitlines():
        yield chunks_of(json.loads(line)["hash_ids"])


def rows(name: str, prompts: Iterable[list[int]]) -> list[list[object]]:
    buckets = [Bucket(run) for run in (1, *RUNS)]
    for ids in prompts:
        for bucket in buckets:
            bucket.serve(ids)
    single = buckets[0].counts
    return [
        [name, run, 100 * counts["hits"] / counts["chunks"], 100 * (single["hits"] - counts["hits"]) / counts["chunks"]]
        + [1000 * counts[what] / counts["chunks"] for what in ("PUT", "GET", "HEAD")]
        + [single["PUT"] / counts["PUT"], requests(single) / requests(counts), counts["written"] / single["written"]]
        for run, counts in zip((1, *RUNS), (bucket.counts for bucket in buckets), strict=True)
    ]


def requests(counts: Counter[str]) -> int:
    return counts["PUT"] + counts["GET"] + counts["HEAD"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="*", type=Path, help="in the form that `kvserver replay` reads")
    found: list[list[object]] = []
    for path in parser.parse_args().trace:
        found += rows(path.stem, of_file(path))
    found += rows("coding agents", (chunks_of(prompt.ids) for prompt in agents.prompts(1)))
    for kind in traces.KINDS:
        found += rows(kind, (chunks_of(path) for _, path in traces.prompts(kind)))
    header = ["trace", "run", "hits %", "points lost", "PUT", "GET", "HEAD", "PUTs fewer", "requests fewer", "bytes"]
    print(f"Requests a 1000 chunks of {CHUNK_TOKENS} tokens that prompts have.")
    print(table(header, found))


if __name__ == "__main__":
    main()
