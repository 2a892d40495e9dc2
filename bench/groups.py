"""Models of several object groups: what a lookup of 128k tokens costs, and what windows and states cost in L1.

    .venv-vllm/bin/python bench/groups.py [--samples 2000]

Lookups: through a real daemon from a client process, milliseconds from before the send to after the decode, beside one full
group in the same run. "ends kept": every group but the full one has objects for the last boundary only, the usual case.
"none kept": no boundary is there, so that the search goes down over all chunks and the lookup misses.

Bytes: what is stored of each token of a conversation, in the sizes of four models, over what full attention alone has; with
the boundaries that the connector keeps, with further ones every so many tokens, and if all of every group were stored.

Parting: a long prompt, then one that begins with a random part of it, then another that begins with that part: of the common
tokens how many the second and the third find, and the bytes that the first stored over what full attention alone has.
"""

from __future__ import annotations

import argparse
import contextlib
import random
from array import array
from dataclasses import dataclass
from functools import partial

from common import percentile, table
from rig import BenchDaemon, BenchWorker, make_keys
from rpc import samples_of

from kvserver.adapters.common.boundaries import Boundaries
from kvserver.protocol import KEY_BYTES, ObjectGroup

CHUNK, BLOCK, TOKENS = 256, 32, 131072
CHUNKS = TOKENS // CHUNK
FULL = ObjectGroup("full", (0,), BLOCK)
GROUPS = {
    "1 full": (FULL,),
    "full, window 128": (FULL, ObjectGroup("window", (1,), BLOCK, tokens=127)),
    "full, window 1024": (FULL, ObjectGroup("window", (1,), BLOCK, tokens=1023)),
    "full, state": (FULL, ObjectGroup("state", (1,), BLOCK)),
    "full, window 128, window 1024, state": (
        FULL,
        ObjectGroup("window", (1,), BLOCK, tokens=127),
        ObjectGroup("window", (2,), BLOCK, tokens=1023),
        ObjectGroup("state", (3,), BLOCK),
    ),
}


def fill(worker: BenchWorker, keys: bytes, group: int, first: int, end: int) -> None:
    ids = array("I", range(1, 1 + (end - first) * worker.groups[group].object_blocks(CHUNK)))
    worker.store(keys[first * KEY_BYTES : end * KEY_BYTES], ids, group)


def lookup_rows(samples: int) -> list[list[object]]:
    rows: list[list[object]] = []
    daemon = BenchDaemon(l1_size=256 << 20, chunk_tokens=CHUNK)
    with contextlib.closing(daemon):
        for name, groups in GROUPS.items():
            worker = BenchWorker(
                daemon.endpoint,
                planes=1,
                run=64,
                num_blocks=CHUNKS * CHUNK // BLOCK + 1,
                block_tokens=BLOCK,
                groups=groups,
            )
            row: list[object] = [name]
            for kept in (True, False):
                keys = make_keys(f"{name} {kept}", CHUNKS)
                fill(worker, keys, 0, 0, CHUNKS)
                for number, group in enumerate(groups[1:] if kept else (), 1):
                    fill(worker, keys, number, group.first_needed(CHUNKS, CHUNK), CHUNKS)
                assert worker.lookup(keys) == (CHUNKS if kept or len(groups) == 1 else 0)
                times = samples_of(samples, partial(worker.lookup, keys))
                row += [percentile(times, 0.5), percentile(times, 0.99)]
            rows.append(row)
    return rows


@dataclass(frozen=True)
class Shape:
    """Bytes of a token (of a state: of the whole state) of each group."""

    groups: tuple[ObjectGroup, ...]
    bytes: tuple[int, ...]


# From the models' configurations, KV in 16 bits: layers x 2 x KV heads x head size x 2 bytes.
SHAPES = {
    "Llama 3 8B": Shape((FULL,), (32 * 2 * 8 * 128 * 2,)),
    "gpt-oss-20b": Shape(
        (FULL, ObjectGroup("window", (1,), BLOCK, tokens=127)), (12 * 2 * 8 * 64 * 2, 12 * 2 * 8 * 64 * 2)
    ),
    "Gemma 3 27B": Shape(
        (FULL, ObjectGroup("window", (1,), BLOCK, tokens=1023)), (10 * 2 * 16 * 128 * 2, 52 * 2 * 16 * 128 * 2)
    ),
    # 12 layers of full attention with 2 heads of 256; 36 gated delta nets: 32 heads of 128 x 128 in 32 bits, and 3 columns
    # of the convolution over 8192 channels in 16 bits.
    "Qwen3-Next 80B": Shape(
        (FULL, ObjectGroup("state", (1,), BLOCK)), (12 * 2 * 2 * 256 * 2, 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2))
    ),
}
TURN, ANSWER, TURNS, SYSTEM = 700, 300, 12, 2000  # tokens of a conversation
INTERVALS = (0, 16384, 4096, 1024)


def stored(shape: Shape, interval: int, everything: bool = False) -> list[int]:
    """Bytes stored of each group by the turns of one conversation, each of which begins with all that went before."""
    sums = [0] * len(shape.groups)
    present: list[set[int]] = [set() for _ in shape.groups]
    so_far = SYSTEM
    for _ in range(TURNS):
        prompt = so_far + TURN
        hit = so_far // CHUNK if so_far > SYSTEM else 0
        boundaries = Boundaries((prompt // CHUNK, (prompt - 1) // CHUNK), interval=interval // CHUNK)
        first = hit
        for computed in (prompt, *range(prompt + 1, prompt + ANSWER + 1)):
            end = computed // CHUNK
            if end <= first:
                continue
            for number, group in enumerate(shape.groups):
                wanted = range(first, end) if everything else boundaries.wanted(group, first, end, CHUNK)
                tokens = CHUNK if everything or group.kind == "full" else group.object_blocks(CHUNK) * BLOCK
                size = shape.bytes[number] * (1 if group.kind == "state" else tokens)
                sums[number] += size * len(set(wanted) - present[number])
                present[number] |= set(wanted)
            boundaries.passed(end)
            first = end
        so_far = prompt + ANSWER
    return [each // so_far for each in sums]


LONG, PAIRS = 65536, 200


def parting(shape: Shape, interval: int) -> tuple[float, float, float]:
    """(share of the common tokens that the second prompt finds, that the third finds, bytes of the first over full's)."""
    dice = random.Random(1)
    first_prompt = Boundaries((LONG // CHUNK, (LONG - 1) // CHUNK), interval=interval // CHUNK)
    kept = [set(first_prompt.wanted(group, 0, LONG // CHUNK, CHUNK)) for group in shape.groups]
    sizes = [
        size * (1 if group.kind == "state" else group.object_blocks(CHUNK) * BLOCK)
        for group, size in zip(shape.groups, shape.bytes, strict=True)
    ]
    common_tokens = found = again = 0
    for _ in range(PAIRS):
        common = dice.randrange(CHUNK, LONG)
        present = [{chunk for chunk in chunks if chunk < common // CHUNK} for chunks in kept]
        hit = _hit(shape, present, common // CHUNK)
        second = Boundaries((LONG // CHUNK, (LONG - 1) // CHUNK), common // CHUNK, interval // CHUNK)
        for chunks, group in zip(present, shape.groups, strict=True):
            chunks |= set(second.wanted(group, hit, LONG // CHUNK, CHUNK))
        common_tokens += common
        found += hit * CHUNK
        again += _hit(shape, present, common // CHUNK) * CHUNK
    full, *others = (size * len(chunks) for size, chunks in zip(sizes, kept, strict=True))
    return found / common_tokens, again / common_tokens, (full + sum(others)) / full


def _hit(shape: Shape, present: list[set[int]], chunks: int) -> int:
    return max(
        boundary
        for boundary in range(chunks + 1)
        if all(
            set(range(group.first_needed(boundary, CHUNK), boundary)) <= there
            for group, there in zip(shape.groups, present, strict=True)
        )
    )


def bytes_rows() -> list[list[object]]:
    rows: list[list[object]] = []
    for name, shape in SHAPES.items():
        row: list[object] = [name, stored(shape, 0)[0]]
        for interval in INTERVALS:
            full, *others = stored(shape, interval)
            row.append(f"{(full + sum(others)) / full:.2f}")
        full, *others = stored(shape, 0, everything=True)
        rows.append([*row, f"{(full + sum(others)) / full:.2f}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=2000)
    options = parser.parse_args()
    columns = ["groups", "ends kept: p50 ms", "p99 ms", "none kept: p50 ms", "p99 ms"]
    print(table(columns, lookup_rows(options.samples)), end="\n\n")
    columns = [
        "model",
        "bytes of full attention a token",
        "kept: ends",
        *(f"and every {n}" for n in INTERVALS[1:]),
        "all",
    ]
    print(table(columns, bytes_rows()), end="\n\n")
    rows = [
        [name, interval or "none", *(f"{value:.2f}" for value in parting(shape, interval))]
        for name, shape in SHAPES.items()
        for interval in (0, 32768, 16384, 8192, 4096, 1024)
    ]
    print(table(["model", "and every", "second finds", "third finds", "bytes"], rows))


if __name__ == "__main__":
    main()
