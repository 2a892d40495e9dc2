"""Random stores, fills, loads, clears, deaths and daemons that end, over L1, a file tier and a store that lies, byte for byte.

As `test_random_walk`, with L2 behind L1: the daemon's own parts write to it and read from it, the files are real. Below the file tier
calls hang and bits flip; the shared store hangs, fails, forgets, goes back in time, and returns other bytes than it was given.
"""

from __future__ import annotations

import errno
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies
from msgspec import structs
from support.faulty_store import FAULTS
from support.memory import Geometry
from support.properties import Dice, examples, walks

from kvserver.l2.remote import generations

from .engines import GEMMA, LLAMA, STATEFUL, WINDOWED, Engine, Model
from .test_random_walk import Walk, needed
from .tiered_world import VARIANTS, Storage, TieredWorld


def enlarged(model: Model, times: int) -> Model:
    """With longer runs: its objects have several pages, and end within one."""
    old = model.geometry
    planes = tuple(
        structs.replace(
            plane,
            offset=plane.offset * times,
            stride_bytes=plane.stride_bytes * times,
            run_bytes=plane.run_bytes * times - 1,
        )
        for plane in old.planes
    )
    sizes = tuple(size * times for size in old.sizes)
    return replace(model, geometry=Geometry(old.num_blocks, old.block_tokens, sizes, planes))


PLAIN = {"llama-0": enlarged(LLAMA, 70), "llama-1": enlarged(LLAMA, 70), "gemma-0": enlarged(GEMMA, 90)}
GROUPED = {"windowed-0": enlarged(WINDOWED, 60), "stateful-0": enlarged(STATEFUL, 60)}


class TieredWalk(Walk):
    """What may happen to a daemon with L2, beside what may happen to one without. `worlds` makes the next daemon's."""

    world: TieredWorld

    def __init__(self, make_world: Callable[[], TieredWorld]) -> None:
        self._make_world = make_world
        self.world = make_world()
        self.counts: Counter[str] = Counter()
        super().__init__(self.world)
        self.actions = {
            action: weight for action, weight in self.actions.items() if getattr(action, "__self__", None) is self
        } | {
            self.store: 30,
            self.cancel: 3,
            self.look_at_words: 30,
            self.step: 10,
            self.copies_end: 60,
            self.fill: 30,
            self.fill_and_load: 30,
            self.load_filled: 10,
            self.fail_half: 1,
            self.look: 8,
            self.fail_store: 6,
            self.recover: 8,
            self.hang_store: 3,
            self.refuse_writes: 3,
            self.hang_disk: 2,
            self.hang_sync: 2,
            self.fill_disk: 2,
            self.lose_data: 2,
            self.go_on: 10,
            self.forget: 3,
            self.go_back: 6,
            self.flip: 3,
            self.evict_l1: 8,
            self.end_daemon: 2,
        }

    def run(self, steps: list[Dice]) -> None:
        actions, weights = list(self.actions), list(self.actions.values())
        self.begin_daemon()
        for dice in steps:
            self.rng = self.world.rng = dice
            self.world.go_on()
            dice.choices(actions, weights)[0]()
            self.world.sync()
            if dice.random() < 0.1:
                self.world.check()
        self.world.end()

    def begin_daemon(self) -> None:
        """On a busy machine a whole walk could be over before the store was found."""
        self.go_on()
        self.world.until(
            lambda: "opening" not in (self.world.file.state, self.world.remote.state), "a tier does not open"
        )
        for rank in list(self.world.ranks()):
            self.world.connect(rank)

    # ---- L2 -----------------------------------------------------------------------------------

    def fill(self) -> None:
        engine = self.engine()
        if engine.incarnation:
            wait_ms = self.rng.choice([0, 5, 50, 2000, 10_000])
            self.world.await_fill(engine, self.request_id(), self.keys(engine), self.variant(), wait_ms)

    def fill_and_load(self) -> None:
        """As an engine does, but that it may send anything meanwhile."""
        if (rank := self.rank()) is None:
            return
        request_id, keys, variant = self.request_id(), self.keys(rank.engine), self.variant()
        self.world.await_fill(rank.engine, request_id, keys, variant, 10_000)
        for _ in range(self.rng.randint(1, 30)):
            self.copies_end()
        if hits := self.world.lookup(rank.engine, request_id, keys, variant):
            for number, group in enumerate(rank.engine.model.groups):
                if loaded := needed(keys[:hits], group):
                    self.load_of(rank, loaded, variant, number)

    def load_filled(self) -> None:
        """The load of a request, after which what was read for it counts no more."""
        self.world.request_id = self.request_id()
        self.load()
        self.world.request_id = ""

    def keys(self, engine: Engine) -> list[bytes]:
        """The start of one of two chains, or now and then a part of it."""
        chain = engine.model.keys(self.rng.randrange(2))
        end = self.rng.randint(1, len(chain))
        return chain[self.rng.randrange(end) if self.rng.random() < 0.15 else 0 : end]

    def variant(self) -> str:
        return self.rng.choice(["", *VARIANTS])

    def evict_l1(self) -> None:
        """Stores of another model's chunks push out what L2 has."""
        self.world.evict(self.rng.randint(1, self.world.cache.pool.pages))

    def copies_end(self) -> None:
        for _ in range(self.rng.randint(0, 8)):
            self.world.device.step()
        self.world.complete_copies()

    def fail_half(self) -> None:
        self.world.fail_half()

    def look(self) -> None:
        self.world.watch_lifelines()

    # ---- faults -------------------------------------------------------------------------------

    def fail_store(self) -> None:
        self.counts["faults"] += 1
        self.world.storage.store.fail(*self.rng.choices(FAULTS, k=self.rng.randint(1, 2)))

    def hang_store(self) -> None:
        self.counts["hangs"] += 1
        self.world.storage.store.hang(True)

    def refuse_writes(self) -> None:
        """As a replica, and as one whose user may not delete."""
        self.counts["refused writes"] += 1
        self.world.storage.store.read_only = True

    def hang_disk(self) -> None:
        self.counts["hangs"] += 1
        self.world.disk.file.hang(True)

    def hang_sync(self) -> None:
        self.counts["hung syncs"] += 1
        self.world.disk.hang_syncs(True)

    def fill_disk(self) -> None:
        self.counts["full disks"] += 1
        self.world.disk.errors["write"] = errno.ENOSPC

    def lose_data(self) -> None:
        self.counts["lost files"] += 1
        self.world.storage.lose_data()
        self.world.pass_time(1.0)

    def go_on(self) -> None:
        self.world.storage.store.hang(False)
        self.world.storage.put_back()
        self.world.storage.store.read_only = False
        self.world.disk.go_on()

    def recover(self) -> None:
        """The store is found again, if it was not there."""
        self.go_on()
        self.world.recover()

    def forget(self) -> None:
        """Or mix up."""
        store = self.world.storage.store
        self.rng.choice([store.forget_ids, store.mix_up, lambda: store.forget(0.5)])()

    def go_back(self) -> None:
        self.counts["old ids"] += 1
        self.world.storage.store.go_back()

    def flip(self) -> None:
        self.counts["flips"] += 1
        self.world.storage.flip(self.rng)

    def end_daemon(self) -> None:
        """By SIGKILL or SIGTERM; the next one has the same folder and store."""
        self.counts["daemons"] += 1
        if self.rng.random() < 0.5:
            self.world.killed()
        else:
            self.go_on()
            self.world.terminated()
        self.close()
        self.world.storage.restarted()
        self.world = self._make_world()
        self.begin_daemon()

    def close(self) -> None:
        self.world.close()
        self.counts.update(self.world.counts)


@pytest.mark.hypothesis
@pytest.mark.parametrize(
    ("models", "pages", "size"), [(PLAIN, 120, "1MiB"), (PLAIN, 120, "4MiB"), (GROUPED, 160, "4MiB")],
    ids=["small file tier", "one group", "several groups"],
)  # fmt: skip
def test_a_random_walk_over_l1_and_l2_agrees_with_a_plain_dict(
    tmp_path: Path, models: dict[str, Model], pages: int, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generations, "IDS_SECONDS", 0.05)  # ids that were replaced are met within a walk
    counts: Counter[str] = Counter()

    @given(steps=walks(300), shared_first=strategies.booleans())
    @examples(20)
    def walk(steps: list[Dice], shared_first: bool) -> None:
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            storage = Storage(Path(folder) / "l2", size, shared_first)

            def make_world() -> TieredWorld:
                return TieredWorld(Path(tempfile.mkdtemp(dir=folder)), models, pages, storage, trouble=0.005)

            walking = TieredWalk(make_world)
            try:
                walking.run(steps)
            finally:
                storage.store.heal()
                walking.close()
            counts.update(walking.counts)

    def met() -> bool:
        """What is chance where threads choose the moment: reads of each tier, whole or damaged, and a damaged one."""
        tiers = ("file", "valkey")
        damaged = sum(counts[f"corrupt of {kind}"] for kind in tiers)
        return damaged > 0 and all(counts[f"hits of {kind}"] + counts[f"corrupt of {kind}"] for kind in tiers)

    for _ in range(5):  # as a rule once; on a busy machine the store may have answered no fill in time
        if not met():
            walk()
    assert met(), counts
    assert min(counts[name] for name in ("stored", "loaded", "fills", "filled hits", "adopted")) > 20, counts
    often = (
        "faults",
        "hangs",
        "hung syncs",
        "full disks",
        "lost files",
        "flips",
        "old ids",
        "refused writes",
        "daemons",
        "clears",
    )
    assert min(counts[name] for name in often) > 3, counts
