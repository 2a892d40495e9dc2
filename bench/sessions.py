"""Hits of the traces of `agents.py` at small sizes of L1: slru without sessions and with, and a bound that no such rule can exceed.

    .venv/bin/python bench/sessions.py [--seeds 1 2 3]

*deleted*: with session_id; the harness deletes a conversation when it is over, and a subagent's own session when the subagent ends.

Sizes: a quarter of the trace's distinct blocks, and shares of the most blocks that are *live* at a time, which is between their
first and last use. *parents*: hits of the first turns after a wait for subagents. *bound*: an LRU that knows the future and frees a
block at its last use. Rates are of tokens, whole blocks.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Container, Sequence
from typing import NamedTuple

import agents

from kvserver.protocol import KEY_BYTES
from kvserver.replay.bare_l1 import BareL1


class Rates(NamedTuple):
    all: float
    parents: float

    def __str__(self) -> str:
        return f"{self.all:.1%}, {self.parents:.1%}"


class Found:
    def __init__(self) -> None:
        self.hits, self.of = [0, 0], [0, 0]

    def add(self, prompt: agents.Prompt, hits: int) -> None:
        for number in range(1 + bool(prompt.waited)):
            self.hits[number] += hits
            self.of[number] += len(prompt.ids)

    @property
    def rates(self) -> Rates:
        all, parents = (hits / max(1, of) for hits, of in zip(self.hits, self.of, strict=True))
        return Rates(all, parents)


def replayed(
    prompts: Sequence[agents.Prompt], keys: Sequence[bytes], blocks: int, ends: Container[agents.Prompt] | None = None
) -> Rates:
    """`ends`: last prompts of sessions, which are deleted then; None: without sessions."""
    l1, found = BareL1(blocks, "slru"), Found()
    for prompt, of_prompt in zip(prompts, keys, strict=True):
        id = prompt.session_id if ends is not None else ""
        found.add(prompt, l1.serve(of_prompt, prompt.seconds, session_id=id).l1)
        if ends is not None and prompt in ends:
            l1.delete(id)
    return found.rates


def bound(prompts: Sequence[agents.Prompt], last_use: dict[int, int], blocks: int) -> Rates:
    resident: OrderedDict[int, None] = OrderedDict()
    found = Found()
    for number, prompt in enumerate(prompts):
        found.add(prompt, next((n for n, id in enumerate(prompt.ids) if id not in resident), len(prompt.ids)))
        for id in reversed(prompt.ids):
            resident.pop(id, None)
            if last_use[id] > number:
                resident[id] = None
        while len(resident) > blocks:
            resident.popitem(last=False)
    return found.rates


def most_live(prompts: Sequence[agents.Prompt], last_use: dict[int, int]) -> int:
    live: set[int] = set()
    most = 0
    for number, prompt in enumerate(prompts):
        live.update(prompt.ids)
        live.difference_update([id for id in prompt.ids if last_use[id] == number])
        most = max(most, len(live))
    return most


def keys_of(prompt: agents.Prompt) -> bytes:
    return b"".join([id.to_bytes(KEY_BYTES, "little") for id in prompt.ids])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=agents.SEEDS)
    arguments = parser.parse_args()
    header = ["seed", "requests", "L1, blocks", "slru", "deleted", "bound"]
    print(f"| {' | '.join(header)} |\n|{' --- |' * len(header)}")
    for seed in arguments.seeds:
        prompts = agents.prompts(seed)
        keys = [keys_of(prompt) for prompt in prompts]
        ends = agents.last_prompts(seed)
        last_use = {id: number for number, prompt in enumerate(prompts) for id in prompt.ids}
        live = most_live(prompts, last_use)
        sizes = {"1/4 of distinct": len(last_use) // 4, "1/2 of live": live // 2, "1/4 of live": live // 4}
        for name, blocks in sizes.items():
            rates = (
                replayed(prompts, keys, blocks),
                replayed(prompts, keys, blocks, ends),
                bound(prompts, last_use, blocks),
            )
            print(f"| {seed} | {len(prompts):,} | {name}: {blocks:,} | {' | '.join(map(str, rates))} |", flush=True)


if __name__ == "__main__":
    main()
