"""Random stores, lookups, loads, cancels, clears, deaths and losses against a plain dict, byte for byte.

The server's own code decides everything: protocol structs, handlers, cache, instances and lifelines
are real, memory is really mapped and copied. Faked is only the device, so that copies end in any order,
late, half done or not at all, and the clock.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from support.properties import Dice, examples, walks

from kvserver._native import State
from kvserver.protocol import ObjectGroup

from .engines import CHAINS, CHUNK_TOKENS, GEMMA, HYBRID, LLAMA, STATEFUL, WINDOWED, Engine, Model, Rank
from .plain import needs
from .world import World

PLAIN = {"llama-0": LLAMA, "llama-1": LLAMA, "gemma-0": GEMMA, "hybrid-0": HYBRID}
GROUPED = {"llama-0": LLAMA, "windowed-0": WINDOWED, "windowed-1": WINDOWED, "stateful-0": STATEFUL}


class Walk:
    """Each step does one thing that a peer may do at any time."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = world.rng
        self.actions: dict[Callable[[], None], int] = {
            self.store: 20,
            self.load: 10,
            self.lookup: 16,
            self.lookup_and_load: 20,
            self.end_request: 4,
            self.cancel: 7,
            self.look_at_words: 24,
            self.step: 50,
            world.complete_copies: 24,
            self.free_garbage: 3,
            world.watch_lifelines: 8,
            self.connect: 8,
            self.die: 1,
            self.unregister: 1,
            self.clear: 1,
            self.pass_time: 3,
            world.fail_half: 1,
            self.lose_device: 1,
            self.replace_device: 6,
            self.rest: 1,
        }

    def run(self, steps: list[Dice]) -> None:
        actions, weights = list(self.actions), list(self.actions.values())
        for rank in list(self.world.ranks()):
            self.world.connect(rank)
        for dice in steps:
            self.rng = self.world.rng = dice
            dice.choices(actions, weights)[0]()
            self.world.check()
        self.world.end()

    # ---- choices ------------------------------------------------------------------------------

    def engine(self) -> Engine:
        return self.rng.choice(self.world.engines)

    def rank(self) -> Rank | None:
        alive = [rank for rank in self.world.ranks() if rank.connection is not None and rank.registration]
        return self.rng.choice(alive) if alive else None

    def group(self, engine: Engine) -> int:
        """An object group."""
        return self.rng.randrange(len(engine.model.groups))

    def variant(self) -> str:
        return self.rng.choice(["", "", "", "lora"])

    def keys(self, engine: Engine) -> list[bytes]:
        """The start of a chain, or now and then any part of it."""
        chain = engine.model.keys(self.rng.randrange(CHAINS))
        end = self.rng.randint(1, len(chain))
        start = self.rng.randrange(end) if self.rng.random() < 0.3 else 0
        return chain[start:end]

    def request_id(self) -> str:
        return f"request-{self.rng.randrange(4)}"

    # ---- actions ------------------------------------------------------------------------------

    def store(self) -> None:
        """What a boundary needs of each group, by all ranks; or of one group, by one. Objects may supersede others."""
        if (rank := self.rank()) is None:
            return
        engine, keys, variant = rank.engine, self.keys(rank.engine), self.variant()
        whole = self.rng.random() < 0.7
        for number in range(len(engine.model.groups)) if whole else [self.group(engine)]:
            stored = needed(keys, engine.model.groups[number]) if whole else keys
            dropped = self.keys(engine) if number and self.rng.random() < 0.5 else []
            for storing in engine.ranks if whole else [rank]:
                late = self.rng.random() < 0.03
                if stored and storing.connection is not None and storing.registration:
                    self.world.store(
                        storing, stored, variant, late, number, [key for key in dropped if key not in stored]
                    )

    def load(self) -> None:
        if (rank := self.rank()) is not None:
            self.load_of(rank, self.keys(rank.engine), self.variant(), self.group(rank.engine))

    def load_of(self, rank: Rank, keys: list[bytes], variant: str, group: int) -> None:
        blocks = rank.engine.model.object_blocks(group)
        skip, short = (self.rng.choice([0, self.rng.randrange(blocks)]) for _ in range(2))
        self.world.load(rank, keys, variant, skip, short, late=self.rng.random() < 0.03, group=group)

    def lookup(self) -> None:
        engine = self.engine()
        if engine.incarnation:
            self.world.lookup(engine, self.request_id(), self.keys(engine), self.variant())

    def lookup_and_load(self) -> None:
        if (rank := self.rank()) is not None:
            keys, variant = self.keys(rank.engine), self.variant()
            if hits := self.world.lookup(rank.engine, self.request_id(), keys, variant):
                for number, group in enumerate(rank.engine.model.groups):
                    if loaded := needed(keys[:hits], group):
                        self.load_of(rank, loaded, variant, number)

    def end_request(self) -> None:
        engine = self.engine()
        if engine.incarnation:
            self.world.end_request(engine, self.request_id())

    def cancel(self) -> None:
        rank = self.rank()
        if rank is not None and rank.operations:
            self.world.cancel(self.rng.choice(rank.operations))

    def look_at_words(self) -> None:
        if (rank := self.rank()) is not None:
            self.world.look_at_words(rank)
            self.world.notice_server_hung_up(rank)

    def step(self) -> None:
        for _ in range(self.rng.randint(1, 8)):
            self.world.device.step()

    def free_garbage(self) -> None:
        self.world.cache.step(self.rng.randint(1, 4))

    def connect(self) -> None:
        dead = [rank for rank in self.world.ranks() if rank.connection is None]
        if dead:
            self.world.connect(self.rng.choice(dead))

    def die(self) -> None:
        """One process, or all of its engine."""
        if (rank := self.rank()) is not None:
            for victim in rank.engine.ranks if self.rng.random() < 0.7 else [rank]:
                if victim.connection is not None:
                    self.world.hang_up(victim)

    def unregister(self) -> None:
        if (rank := self.rank()) is not None:
            self.world.unregister(rank)

    def clear(self) -> None:
        self.world.clear(self.rng.choice([None, *self.world.engines]))

    def pass_time(self) -> None:
        self.world.pass_time(self.rng.choice([0.1, 1.0, 5.0, 25.0]))

    def lose_device(self) -> None:
        if self.rng.random() < 0.5:
            self.world.lose_device()

    def replace_device(self) -> None:
        self.world.device.recover()

    def rest(self) -> None:
        self.world.come_to_rest()


def needed(keys: list[bytes], group: ObjectGroup) -> list[bytes]:
    """Those of the chunks that a hit at their end needs of the group."""
    return [key for chunk, key in enumerate(keys) if needs(group, chunk, len(keys), CHUNK_TOKENS)]


@pytest.mark.hypothesis
@pytest.mark.parametrize("trouble", [0.0, 0.01], ids=["whole copies", "failing copies"])
@pytest.mark.parametrize(
    ("models", "pages"), [(PLAIN, 60), (PLAIN, 200), (GROUPED, 90), (GROUPED, 300)],
    ids=["small L1", "roomy L1", "small L1 of several groups", "roomy L1 of several groups"],
)  # fmt: skip
def test_a_random_walk_agrees_with_a_plain_dict(
    tmp_path: Path, models: dict[str, Model], pages: int, trouble: float
) -> None:
    counts: Counter[str] = Counter()

    @given(steps=walks(400))
    @examples(40)
    def walk(steps: list[Dice]) -> None:
        with closing(World(Path(tempfile.mkdtemp(dir=tmp_path)), models, pages, trouble)) as world:
            Walk(world).run(steps)
        counts.update(world.counts)

    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    walk()
    # The walks went where they should go, or they would prove nothing. Where they go changes with the actions and their weights,
    # so a floor is far below what is usual.
    assert min(counts[name] for name in ("stored", "loaded", "hits", "cancels")) > 20, counts
    assert min(counts[name] for name in ("deaths", "clears", "halves", "losses")) > 3, counts
    assert pages > 100 or counts["evicted"] > 50, counts
    grouped = [f"hits of {model.name}" for model in models.values()]
    dropped = ["dropped"] if any(model.several for model in models.values()) else []
    assert min(counts[name] for name in (*grouped, *dropped)) > 0, counts
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before, "a descriptor leaks"


def test_a_store_that_is_cancelled_and_overwritten_while_it_runs_is_never_found(tmp_path: Path) -> None:
    """The walk's most important moment, once more and slowly."""
    with closing(World(tmp_path, PLAIN, pages=60)) as world:
        engine = world.engines[0]
        world.connect(engine.ranks[0])
        world.come_to_rest()
        keys = engine.model.keys(0)[:3]
        world.store(engine.ranks[0], keys, "")
        (operation,) = engine.ranks[0].operations
        world.device.run(operation.ticket, 1)
        assert operation.state == State.RUNNING
        world.cancel(operation)  # also overwrites the blocks
        assert operation.state == State.CANCELLED
        world.come_to_rest()
        assert world.lookup(engine, "r", keys, "") == 0
        world.end()
