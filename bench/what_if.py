"""What other sizes of L1 would have found: errors against exact caches of each size, memory, and what a lookup costs.

    python bench/what_if.py [--objects 1000 10000 100000 1000000 10000000] [--trace TRACE.jsonl] [--cost]

Each row is one workload whose distinct objects are about `--objects`, L1 has room for a sixteenth of them. Prompts are *documents*
(a quarter new ones, else beginnings of known ones, popularity 1/rank), *far* (whole documents, all equally popular) or *chat*
(conversations that grow). *hot*: behind 32 chunks that all prompts share. Objects of documents and far are a page, of chat three; *2
models*: every second document has objects of 7 pages, the others of 2. *hybrid*: a window of two chunks (a page each) and a state
(6 pages) at prompts' ends, where full attention's hit ended, and every 64 chunks; *all boundaries*: at every chunk, a state of 2
pages. Columns: hit rate in L1 by the reference; errors in points at the sizes 0.25 to 8 and unlimited; the 90th percentile of these seven, which is the largest; share of older chunks that is sampled
in the end; MiB of the table; microseconds a chunk of a prompt in the event thread. `--trace`: prompts of a Mooncake trace instead,
with an L1 of 1/256 to 1/4 of its blocks.

`--cost`: what the curve adds to a lookup (`what_if_cost.py`).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import subprocess
import tempfile
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import what_if_cost
from common import table
from what_if_cost import CHUNK_TOKENS, PAGE

from kvserver.cache import Groups, LookupOutcome
from kvserver.events import ChunksStored, Event, LookupEnded, NamespaceFormed, RequestEnded
from kvserver.protocol import KEY_BYTES, ObjectGroup
from kvserver.telemetry import WhatIfCurve
from kvserver.telemetry.what_if import SIZES

HOT, LONGEST = 32, 128  # chunks
MiB = 1 << 20
L1 = SIZES.index(1)
Prompts = Iterator["array[int]"]  # numbers of chunks


class Hybrid(NamedTuple):
    """A model with a window and a state beside full attention, and where they are stored. Chunks and pages; no window: no hybrid."""

    window: int = 0
    window_pages: int = 0
    state_pages: int = 0
    interval: int = 1 << 30

    @property
    def groups(self) -> tuple[ObjectGroup, ...]:
        full = ObjectGroup("full", (0,), CHUNK_TOKENS)
        if not self.window:
            return (full,)
        window = ObjectGroup("window", (1,), CHUNK_TOKENS, tokens=(self.window - 1) * CHUNK_TOKENS + 2)
        return full, window, ObjectGroup("state", (2,), CHUNK_TOKENS)


PLAIN = Hybrid()


class Reference:
    """Exact caches of all sizes: bench/native/cache_sizes.cpp."""

    def __init__(self, l1_pages: int, pages: array[int], policy: str, hybrid: Hybrid) -> None:
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "cache_sizes.so"
            source = Path(__file__).parent / "native" / "cache_sizes.cpp"
            subprocess.run(["c++", "-std=c++20", "-O2", "-shared", "-fPIC", source, "-o", library], check=True)
            self._calls = ctypes.CDLL(str(library))
        self._calls.make_caches.restype = ctypes.c_void_p
        self._calls.resident.restype = ctypes.c_size_t
        self._pages, sizes = pages, [int(size * l1_pages) for size in SIZES] + [1 << 60]
        self._sizes = (ctypes.c_uint64 * len(sizes))(*sizes)
        self._hits = (ctypes.c_uint64 * len(sizes))()
        self._interval, self._stored = ctypes.c_size_t(hybrid.interval), array("B", bytes(HOT + LONGEST))
        self._caches = ctypes.c_void_p(
            self._calls.make_caches(
                self._sizes,
                ctypes.c_size_t(len(sizes)),
                _address(pages),
                ctypes.c_size_t(len(pages)),
                ctypes.c_bool(policy == "slru"),
                *map(ctypes.c_uint32, hybrid[:3]),
            )
        )

    def serve(self, prompt: array[int]) -> tuple[list[int], array[int]]:
        """Where the hit ends, by size; for each chunk a bit for each object that L1 stored."""
        count, stored = ctypes.c_size_t(len(prompt)), self._stored
        if len(stored) < len(prompt):
            stored.frombytes(bytes(len(prompt)))
        arguments = count, self._interval, self._hits, ctypes.c_size_t(L1), _address(stored)
        self._calls.serve(self._caches, _address(prompt), *arguments)
        return list(self._hits), stored[: len(prompt)]

    @property
    def objects(self) -> int:
        """That it has served."""
        return int(self._calls.resident(self._caches))

    def close(self) -> None:
        self._calls.free_caches(self._caches)


def _address(of: array[int]) -> ctypes.c_void_p:
    return ctypes.c_void_p(of.buffer_info()[0])


# ---- workloads ----------------------------------------------------------------------------------


def documents(objects: int, hot: bool, draw: random.Random) -> Prompts:
    """A quarter of the prompts are new documents, the others beginnings of known ones, of popularity 1 / rank."""
    length = LONGEST if objects >= 10_000 else 16
    lengths: list[int] = []
    total = 0
    while total < objects:
        new = not lengths or draw.random() < 0.25
        if new:
            lengths.append(draw.randint(1, length))
            total += lengths[-1]
        which = len(lengths) - 1 if new else int(len(lengths) ** draw.random()) - 1
        first = HOT + which * LONGEST
        prompt = array("I", range(HOT) if hot else ())
        prompt.extend(range(first, first + (lengths[which] if new else draw.randint(1, lengths[which]))))
        yield prompt


def far(objects: int, hot: bool, draw: random.Random) -> Prompts:
    """Whole documents, all equally popular: most are used again after as many others as there are."""
    length = LONGEST if objects >= 10_000 else 16
    lengths = [draw.randint(1, length) for _ in range(2 * objects // length)]
    for _ in range(3 * len(lengths)):
        which = draw.randrange(len(lengths))
        first = HOT + which * LONGEST
        yield array("I", [*(range(HOT) if hot else ()), *range(first, first + lengths[which])])


def chat(objects: int, hot: bool, draw: random.Random) -> Prompts:
    """A tenth of the prompts begin a conversation; the others go on with one, most likely with one of the latest."""
    going: list[tuple[int, int]] = []  # first object, length
    conversations = total = 0
    while total < objects:
        if len(going) < 4 or draw.random() < 0.1:
            going.append((HOT + conversations * LONGEST, 0))
            conversations += 1
        back = min(int(draw.expovariate(8 / len(going))), len(going) - 1)
        first, length = going.pop(-1 - back)
        longer = min(LONGEST, length + draw.randint(1, 12))
        total += longer - length
        prompt = array("I", range(HOT) if hot else ())
        prompt.extend(range(first, first + longer))
        yield prompt
        if longer < LONGEST:
            going.append((first, longer))


def of_trace(path: Path) -> tuple[list[array[int]], int]:
    numbers: dict[int, int] = {}
    prompts = []
    for line in path.read_text().splitlines():
        ids = [numbers.setdefault(id, len(numbers)) for id in json.loads(line)["hash_ids"]]
        prompts.append(array("I", ids))
    return prompts, len(numbers)


# ---- accuracy -----------------------------------------------------------------------------------


class Measured(NamedTuple):
    """Hit rates of exact caches and errors in points, by size; `seconds` of the event thread for `looked_up` chunks."""

    objects: int
    true: list[float]
    errors: list[float]
    sample_rate: float
    memory_bytes: int
    seconds: float
    looked_up: int

    @property
    def p90(self) -> float:
        return sorted(map(abs, self.errors))[int(0.9 * len(self.errors))]

    def cells(self) -> list[str]:
        return [
            f"{self.objects:,}",
            f"{100 * self.true[SIZES.index(1)]:.1f}%",
            *(f"{error:+.2f}" for error in self.errors),
            f"{self.p90:.2f}",
            f"{self.sample_rate:.3f}",
            f"{self.memory_bytes / MiB:.1f}",
            f"{1e6 * self.seconds / self.looked_up:.2f}",
        ]


def measure(prompts: Prompts, pages: array[int], l1_pages: int, policy: str, hybrid: Hybrid = PLAIN) -> Measured:
    """The curve gets the events of an L1 that is the reference's."""
    reference, curve = (
        Reference(l1_pages, pages, policy, hybrid),
        WhatIfCurve(l1_pages, PAGE, policy, hybrid.interval * CHUNK_TOKENS),
    )
    true, looked_up, seconds = [0] * (len(SIZES) + 1), 0, 0.0
    groups = Groups(hybrid.groups, 1, CHUNK_TOKENS).objects
    spec = type("Spec", (), {"object_groups": hybrid.groups, "chunk_tokens": CHUNK_TOKENS, "engine_names": ("", "")})
    curve.handle(NamespaceFormed(0, "i", "m", b"", (spec,)))  # type: ignore[arg-type]
    for number, prompt in enumerate(prompts):
        hits, stored = reference.serve(prompt)
        true = [a + b for a, b in zip(true, hits, strict=True)]
        looked_up += len(prompt)
        found, of_model = hits[L1], pages[prompt[-1]]
        namespace = b"%d" % of_model
        words = array("Q", bytes(KEY_BYTES * len(prompt)))
        words[:: KEY_BYTES // 8] = array("Q", prompt)
        keys = words.tobytes()
        now, outcome = number * 1_000_000, LookupOutcome(len(prompt), found)
        events: list[Event] = [LookupEnded(now, "i", "m", "r", 0, keys, outcome, CHUNK_TOKENS, namespace)]
        for place, (group, each) in enumerate(zip(groups, (of_model, *hybrid[1:3]), strict=False)):
            ready = b"".join(
                [keys[at * KEY_BYTES : (at + 1) * KEY_BYTES] for at, bits in enumerate(stored) if bits >> place & 1]
            )
            if ready:
                events.append(ChunksStored(now, "i", "m", namespace, ready, group, each))
        events.append(RequestEnded(now, "i", "m", "r"))
        began = time.perf_counter()
        for event in events:
            curve.handle(event)
        seconds += time.perf_counter() - began
    objects = reference.objects
    reference.close()
    curve.tick()
    status = curve.status()
    rates = [hits / looked_up for hits in true]
    errors = [
        100 * (one.would_hit_tokens / CHUNK_TOKENS / looked_up - rate)
        for one, rate in zip(status.sizes, rates, strict=True)
    ]
    return Measured(objects, rates, errors, status.sample_rate, status.memory_bytes, seconds, looked_up)


HEAD = ("objects", "in L1", *(f"{size:g}" for size in SIZES), "unlimited", "p90", "sampled", "MiB", "us/chunk")


WORKLOADS = {
    "documents": (documents, False, (1,)),
    "documents, hot": (documents, True, (1,)),
    "documents, hot, 2 models": (documents, True, (2, 7)),
    "far": (far, False, (1,)),
    "far, hot, 2 models": (far, True, (2, 7)),
    "chat": (chat, False, (3,)),
    "chat, hot": (chat, True, (3,)),
}
HYBRIDS = {
    "documents, hybrid": (documents, True, (2,), Hybrid(2, 1, 6, 64)),
    "far, hybrid": (far, True, (2,), Hybrid(2, 1, 6, 64)),
    "chat, hybrid": (chat, True, (2,), Hybrid(2, 1, 6, 64)),
    "documents, all boundaries": (documents, True, (2,), Hybrid(2, 1, 2, 1)),
}


def synthetic(name: str, objects: int, policy: str, part: int = 16) -> Measured:
    """L1 has space for a `part`-th of the objects."""
    workload, hot, models, *hybrid = (WORKLOADS | HYBRIDS)[name]
    # A document and what is before it are of one model: what all share is the first one's.
    pages = array("I", [models[0]]) * (HOT + LONGEST * (objects // (50 if objects >= 10_000 else 4) + 100))
    prompts = workload(objects, hot, random.Random(objects))
    if len(models) > 1:
        for first in range(HOT + LONGEST, len(pages) - LONGEST, 2 * LONGEST):
            pages[first : first + LONGEST] = array("I", [models[1]]) * LONGEST
        prompts = (prompt if pages[prompt[-1]] == models[0] else prompt[HOT:] for prompt in prompts)
    average = sum(models) / len(models)
    return measure(prompts, pages, int(objects * average) // part, policy, *hybrid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objects", type=int, nargs="*", default=[1000, 10_000, 100_000, 1_000_000, 10_000_000])
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--policy", choices=("lru", "slru"), default="lru")
    parser.add_argument("--cost", action="store_true")
    arguments = parser.parse_args()
    if arguments.cost:
        what_if_cost.in_a_daemon()
        what_if_cost.alone()
        return
    rows = []
    if arguments.trace:
        prompts, blocks = of_trace(arguments.trace)
        pages = array("I", [1]) * blocks
        rows = [
            (f"L1 1/{part}", *measure(iter(prompts), pages, blocks // part, arguments.policy).cells())
            for part in (256, 64, 16, 4)
        ]
    for objects in () if arguments.trace else arguments.objects:
        for name in WORKLOADS | HYBRIDS:
            rows.append((name, *synthetic(name, objects, arguments.policy).cells()))
            print(" | ".join(rows[-1]), flush=True)
    print(table(("workload", *HEAD), rows))


if __name__ == "__main__":
    main()
