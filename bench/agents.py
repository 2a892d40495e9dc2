"""Made-up traces of coding agents, drawn from published statistics, in the form that `kvserver replay` reads.

    .venv/bin/python bench/agents.py --seed 1 >agents.jsonl   # deterministic: a seed has one trace
    .venv/bin/python bench/agents.py --table                  # three seeds beside the published figures

A session is a loop of turns: a prompt goes on where the last prompt and its output ended, with what a tool or a person added. At
the end of its window the context is compacted: a new prompt has the head, a summary and a few last messages. Some turns start
subagents, and the parent waits until they end. Half of the sessions with subagents give them their own session_id, half do not.

Published figures, and where they are from:
- TraceLab (arXiv 2606.30560 and its repository): 357,161 turns of Claude Code and Codex. Times, appended tokens, compactions.
- vLLM's blog of 2026-09-08: median 43 turns, 142k tokens in, 444 out, hits above 95%, 44% of sessions with subagents.
- Assumed, as no figure is published: heads, summaries, tasks of subagents, how often a turn starts some, how many, windows.

Owns: who sends what, and when. Refuses to know: caches. Times in seconds, lengths in tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

BLOCK_TOKENS = 512
SEEDS = (1, 2, 3)
SECONDS = 4 * 3600.0
SESSIONS_A_SECOND = 40 / 3600
TURNS = 43, 1.1  # median and sigma of a lognormal, as in all pairs below
OUTPUT, APPENDED = (444, 0.6), (850, 1.3)
GENERATES, RUNS_A_TOOL, PERSON = (4.9, 1.1), (0.1, 3.3), (84, 2.1)  # seconds
BY_A_PERSON = 0.108  # of turns
FIRST_MESSAGE = 45_000, 0.8  # with the files that it brings
SUMMARY, LAST_MESSAGES = (6_000, 0.5), (10_000, 0.5)
WINDOWS, WINDOW_WEIGHTS = (200_000, 272_000, 1_000_000), (4, 2, 4)
COMPACTS_AT = 0.9
HEADS, SUBAGENT_HEADS = range(10_000, 25_000), range(5_000, 12_000)
WITH_SUBAGENTS, STARTS_SOME = 0.62, 0.05  # of sessions that may start some; of their turns
AT_ONCE, THEIR_TURNS = 3, 30  # at most, all that one parent waits for
TASK = 3_000, 0.7


class Prompt(NamedTuple):
    """`waited`: turns of subagents since this session's last own turn."""

    seconds: float
    session_id: str
    ids: tuple[int, ...]  # of whole blocks
    tokens: int
    output: int
    waited: int = 0
    compacted: bool = False
    subagent: bool = False


@dataclass
class Context:
    """A growing prompt; equal ids are equal prefixes."""

    new_id: Callable[[], int]
    ids: list[int] = field(default_factory=list)
    tokens: int = 0

    def add(self, tokens: float) -> None:
        self.tokens += max(1, int(tokens))
        self.ids += [self.new_id() for _ in range(self.tokens // BLOCK_TOKENS - len(self.ids))]


class Agents:
    def __init__(self, seed: int) -> None:
        self.dice = random.Random(f"agents {seed}")
        self.ids = itertools.count()
        self.heads = [self.head(HEADS) for _ in range(8)]
        self.subagent_heads = [self.head(SUBAGENT_HEADS) for _ in range(4)]

    def head(self, lengths: range) -> list[int]:
        return [next(self.ids) for _ in range(self.dice.choice(lengths) // BLOCK_TOKENS)]

    def draw(self, median_sigma: tuple[float, float]) -> float:
        return median_sigma[0] * math.exp(self.dice.gauss(0, median_sigma[1]))

    def context(self, head: list[int], tokens: float) -> Context:
        context = Context(lambda: next(self.ids), list(head), len(head) * BLOCK_TOKENS)
        context.add(tokens)
        return context

    def loop(self, now: float, id: str, context: Context, turns: int) -> Iterator[Prompt]:
        """Turns of one subagent."""
        for _ in range(turns):
            output = self.draw(OUTPUT)
            yield Prompt(now, id, tuple(context.ids), context.tokens, int(output), subagent=True)
            now += self.draw(GENERATES) + self.draw(RUNS_A_TOOL)
            context.add(output + self.draw(APPENDED))

    def subagents(self, now: float, ids: Iterator[str]) -> list[Prompt]:
        total, count = self.dice.randint(1, THEIR_TURNS), self.dice.randint(1, AT_ONCE)
        shares = [total // count + (number < total % count) for number in range(count)]
        prompts: list[Prompt] = []
        for turns in filter(None, shares):
            context = self.context(self.dice.choice(self.subagent_heads), self.draw(TASK))
            prompts += self.loop(now, next(ids), context, turns)
        return sorted(prompts)

    def session(self, now: float, number: int) -> Iterator[Prompt]:
        dice, head, id = self.dice, self.dice.choice(self.heads), f"s{number}"
        context = self.context(head, self.draw(FIRST_MESSAGE))
        window = dice.choices(WINDOWS, WINDOW_WEIGHTS)[0] * COMPACTS_AT
        spawns = STARTS_SOME if dice.random() < WITH_SUBAGENTS else 0
        own_ids = dice.random() < 0.5
        names = (f"{id}.{child}" if own_ids else id for child in itertools.count())
        waited, compacted = 0, False
        for _ in range(max(1, int(self.draw(TURNS)))):
            output = self.draw(OUTPUT)
            yield Prompt(now, id, tuple(context.ids), context.tokens, int(output), waited, compacted)
            waited, compacted = 0, False
            now += self.draw(GENERATES)
            if dice.random() < spawns:
                prompts = self.subagents(now, names)
                yield from prompts
                waited, now = len(prompts), prompts[-1].seconds + self.draw(GENERATES)
            else:
                now += self.draw(PERSON if dice.random() < BY_A_PERSON else RUNS_A_TOOL)
            context.add(output + self.draw(APPENDED))
            if context.tokens > window:
                context, compacted = self.context(head, self.draw(SUMMARY) + self.draw(LAST_MESSAGES)), True


def all_prompts(seed: int, seconds: float = SECONDS) -> list[Prompt]:
    """All prompts of the sessions that begin in this time, in the order of time."""
    agents, start = Agents(seed), 0.0
    found: list[Prompt] = []
    for number in itertools.count():
        start += agents.dice.expovariate(SESSIONS_A_SECOND)
        if start >= seconds:
            break
        found += agents.session(start, number)
    return sorted(found, key=lambda prompt: prompt.seconds)


def prompts(seed: int, seconds: float = SECONDS) -> list[Prompt]:
    """The prompts of a trace that ends after `seconds`, in order of time."""
    return [prompt for prompt in all_prompts(seed, seconds) if prompt.seconds < seconds]


def figures(found: Sequence[Prompt]) -> dict[str, str]:
    """The figures of whole sessions, by name. Subagents count for hits only."""
    own = [prompt for prompt in found if not prompt.subagent]
    sessions: defaultdict[str, list[Prompt]] = defaultdict(list)
    for prompt in own:
        sessions[prompt.session_id].append(prompt)
    turns = sorted(len(of) for of in sessions.values())
    grown = sorted(
        after.tokens - before.tokens - before.output
        for of in sessions.values()
        for before, after in itertools.pairwise(of)
        if not after.compacted
    )
    gaps = sorted(
        after.seconds - before.seconds
        for of in sessions.values()
        for before, after in itertools.pairwise(of)
        if not after.waited
    )
    hits = 1 - len({id for prompt in found for id in prompt.ids}) / sum(len(prompt.ids) for prompt in found)
    with_subagents = len({prompt.session_id for prompt in own if prompt.waited}) / len(sessions)
    compacted, some = sum(prompt.compacted for prompt in own), len({p.session_id for p in own if p.compacted})
    return {
        "turns of a session, p50, p90, mean": f"{middle(turns)}, {nth(turns, 90)}, {sum(turns) / len(turns):.0f}",
        "tokens in, p50": f"{middle(sorted(prompt.tokens for prompt in own)) / 1000:.0f}k",
        "tokens out, p50": str(middle(sorted(prompt.output for prompt in own))),
        "appended, p50, p90": f"{middle(grown) / 1000:.2f}k, {nth(grown, 90) / 1000:.1f}k",
        "hits without a limit": f"{hits:.1%}",
        "sessions with subagents": f"{with_subagents:.0%}",
        "compactions in 1,000 turns; sessions with some": f"{1000 * compacted / len(own):.1f}; {some / len(sessions):.0%}",
        "seconds from turn to turn, p50, p90, p99": ", ".join(f"{nth(gaps, n):.0f}" for n in (50, 90, 99)),
    }


PUBLISHED = (
    "43; 15, 135, 83",
    "142k",
    "444",
    "0.8 to 1k, 3 to 8k",
    "95.8%, above 95%",
    "44%",
    "4.3; 10%",
    "5 to generate + 0.1 for a tool or 84 for a person (p50)",
)


def middle(ordered: Sequence[int]) -> int:
    return ordered[len(ordered) // 2]


def nth(ordered: Sequence[float], percent: int) -> float:
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


def print_table() -> None:
    of_seeds = [figures(all_prompts(seed)) for seed in SEEDS]
    print("| figure | published | " + " | ".join(f"seed {seed}" for seed in SEEDS) + " |")
    print("| --- | --- |" + " --- |" * len(SEEDS))
    for name, published in zip(of_seeds[0], PUBLISHED, strict=True):
        print(f"| {name} | {published} | " + " | ".join(of[name] for of in of_seeds) + " |")


def last_prompts(seed: int, seconds: float = SECONDS) -> set[Prompt]:
    """The last prompts of all sessions: their harness knows that they are over."""
    return set({prompt.session_id: prompt for prompt in all_prompts(seed, seconds)}.values())


def line(prompt: Prompt, ends_session: bool) -> bytes:
    fields = {
        "timestamp": int(prompt.seconds * 1000),
        "input_length": prompt.tokens,
        "output_length": prompt.output,
        "hash_ids": prompt.ids,
        "chunk_tokens": BLOCK_TOKENS,
        "session_id": prompt.session_id,
        "ends_session": ends_session,
        "waited": prompt.waited,
    }
    return json.dumps(fields).encode() + b"\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    if arguments.table:
        print_table()
        return
    ends = last_prompts(arguments.seed, arguments.seconds)
    for prompt in prompts(arguments.seed, arguments.seconds):
        sys.stdout.buffer.write(line(prompt, prompt in ends))


if __name__ == "__main__":
    main()
