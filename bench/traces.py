"""Made-up request traces, in the form that `kvserver replay` reads: agents, chats, documents, a batch, and all at once.

    .venv/bin/python bench/traces.py agents >agents.jsonl

Each is drawn from a fixed seed, so a run can be repeated. Owns: who asks what, and when. Refuses to know: caches.
A block is BLOCK_TOKENS tokens; a prompt is a path in a tree of blocks, so equal ids are equal prefixes.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import sys
from collections.abc import Callable, Iterator

BLOCK_TOKENS = 512
Prompt = tuple[float, list[int]]  # seconds, ids of its blocks
Ids = Callable[[], int]


def grown(ids: Ids, blocks: int) -> list[int]:
    return [ids() for _ in range(blocks)]


def at_least_one(dice: random.Random, mean: float) -> int:
    """Geometric."""
    return 1 + int(dice.expovariate(1 / max(mean - 0.5, 0.01)))


def ranked(dice: random.Random, count: int, exponent: float) -> Callable[[], int]:
    """Draws a number below `count` by Zipf's law."""
    bounds = list(itertools.accumulate((rank + 1) ** -exponent for rank in range(count)))
    return lambda: dice.choices(range(count), cum_weights=bounds)[0]


def starts(dice: random.Random, a_second: float, seconds: float) -> Iterator[float]:
    now = dice.expovariate(a_second)
    while now < seconds:
        yield now
        now += dice.expovariate(a_second)


def session(
    dice: random.Random, ids: Ids, now: float, path: list[int], turns: int, pause: float, mean_blocks: float
) -> Iterator[Prompt]:
    """Prompts that each go on where the one before ended; pauses are drawn around `pause` seconds, with a long tail."""
    for _ in range(turns):
        path = path + grown(ids, at_least_one(dice, mean_blocks))
        yield now, path
        now += dice.lognormvariate(0, 1) * pause


def agents(seconds: float, dice: random.Random, ids: Ids) -> Iterator[Prompt]:
    """Eight agents with instructions and tools of 8 to 40 blocks; a task is a loop of tool calls, now and then one for a person."""
    heads = [grown(ids, dice.randint(8, 40)) for _ in range(8)]
    chosen = ranked(dice, len(heads), 0.8)
    for start in starts(dice, 0.05, seconds):
        path = heads[chosen()] + grown(ids, at_least_one(dice, 3))
        pause = dice.choice([3, 3, 3, 60])
        yield from session(dice, ids, start, path, at_least_one(dice, 14), pause, 1.6)


def chats(seconds: float, dice: random.Random, ids: Ids) -> Iterator[Prompt]:
    """Three products with short instructions; people answer after a minute or two, some come back after an hour."""
    heads = [grown(ids, blocks) for blocks in (1, 2, 4)]
    for start in starts(dice, 0.12, seconds):
        pause = dice.choice([45, 45, 90, 900])
        yield from session(dice, ids, start, list(dice.choice(heads)), at_least_one(dice, 5), pause, 1.8)


def documents(seconds: float, dice: random.Random, ids: Ids) -> Iterator[Prompt]:
    """Questions about one or two of 1,500 documents of 4 to 24 blocks, some asked much more often; what is popular moves on."""
    head, lengths = grown(ids, 2), [dice.randint(4, 24) for _ in range(1500)]
    firsts = [grown(ids, length) for length in lengths]
    seconds_of: dict[tuple[int, int], list[int]] = {}
    chosen = ranked(dice, len(firsts), 0.9)
    for start in starts(dice, 0.5, seconds):
        moved = int(start / seconds * 200)
        first, second = ((chosen() + moved) % len(firsts) for _ in range(2))
        path = head + firsts[first]
        if second != first and dice.random() < 0.4:
            pair = first, second
            path = path + seconds_of.setdefault(pair, grown(ids, lengths[second]))
        yield start, path + grown(ids, 1)


def batch(seconds: float, dice: random.Random, ids: Ids) -> Iterator[Prompt]:
    """Chats, and every half hour a job of ten minutes whose 600 prompts have only their instructions in common."""
    yield from chats(seconds, dice, ids)
    for begin in range(600, int(seconds), 1800):
        head = grown(ids, 3)
        for number in range(600):
            yield begin + number, head + grown(ids, at_least_one(dice, 10))


def everything(seconds: float, dice: random.Random, ids: Ids) -> Iterator[Prompt]:
    for kind in (agents, batch, documents):
        yield from kind(seconds, dice, ids)


KINDS: dict[str, Callable[[float, random.Random, Ids], Iterator[Prompt]]] = {
    "agents": agents, "chats": chats, "documents": documents, "batch": batch, "everything": everything,
}  # fmt: skip


def prompts(kind: str, seconds: float = 7200, seed: int = 1) -> list[Prompt]:
    """In the order of time; those that would come after the end are left out."""
    counter = itertools.count()
    drawn = KINDS[kind](seconds, random.Random(f"{kind} {seed}"), lambda: next(counter))
    numbered = ((now, number, path) for number, (now, path) in enumerate(drawn) if now < seconds)
    heap = list(numbered)
    heapq.heapify(heap)
    return [(now, path) for now, _, path in (heapq.heappop(heap) for _ in range(len(heap)))]


def line(now: float, path: list[int]) -> bytes:
    fields = {
        "timestamp": int(now * 1000),
        "input_length": len(path) * BLOCK_TOKENS,
        "output_length": 1,
        "hash_ids": path,
    }
    return json.dumps(fields).encode() + b"\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--seconds", type=float, default=7200)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    for now, path in prompts(arguments.kind, arguments.seconds, arguments.seed):
        sys.stdout.buffer.write(line(now, path))


if __name__ == "__main__":
    main()
