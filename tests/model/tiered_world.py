"""A world with L2 behind L1: a real file tier, and a tier whose store is faulty; both outlive the world, as they outlive a daemon.

What L1 has without a store was read from L2. It is compared with what was stored under its name, of all ranks together, and from
then on counts as stored.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import select
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.faulty_store import FaultyStore
from support.file_tiers import FaultyDisk, size_of
from support.slots import pages_of
from support.turns import repeat

from kvserver._native import HostRegion, Outcome
from kvserver.cache import Chunk
from kvserver.cache.groups import one_group
from kvserver.config import parse_size, parse_tiers
from kvserver.l2.files.make import make_file_tier
from kvserver.l2.remote.tier import RemoteTier
from kvserver.protocol import (
    AwaitFill,
    Clear,
    Cleared,
    Durability,
    Error,
    ErrorCode,
    Lookup,
    LookupReply,
    Reply,
)
from kvserver.tiering import ConfiguredTier

from .engines import Call, Engine, Model, Operation
from .plain import Entry, Name, Slot
from .world import World

PAGE_BYTES = 4096
_WAIT_SECONDS = 20.0  # for what must end by itself
_LANES = 3
VARIANTS = {"": Durability.ANYWHERE, "lora": Durability.MACHINE}

Whole = dict[Slot, list[bytes]]  # an object: the blocks of each of its slots


@dataclass
class Version:
    """An object that was READY once, and the clears of its namespace since then."""

    whole: Whole
    clears: set[int] = field(default_factory=set)


@dataclass
class Storage:
    """What is left of a daemon when it ends: its folder, the store, and what a test knows of them."""

    folder: Path
    size: str  # of the data file
    shared_first: bool  # preferred by the first daemon, the folder by the second, and so on
    store: FaultyStore = field(default_factory=FaultyStore)
    versions: defaultdict[tuple[Name, int], list[Version]] = field(default_factory=lambda: defaultdict(list))
    daemons: int = 0  # so far
    clears: int = 0
    done_clears: set[int] = field(default_factory=set)

    def stored(self, name: Name, group: int, whole: Whole) -> None:
        if not any(version.whole == whole and not version.clears for version in self.versions[name, group]):
            self.versions[name, group].append(Version(whole))

    def clear(self, base: bytes) -> int:
        """Returns the number of the clear."""
        self.clears += 1
        for ((namespace, _), _), versions in self.versions.items():
            if namespace.startswith(base):
                for version in versions:
                    version.clears.add(self.clears)
        return self.clears

    def restarted(self) -> None:
        """What was cleared stays so if that was acknowledged; else it may be there or not."""
        for versions in self.versions.values():
            for version in versions:
                version.clears &= self.done_clears

    @property
    def _away(self) -> Path:
        return self.folder.with_name("away")

    def lose_data(self) -> None:
        """As a folder that was removed, but for the ids of the shared store, which outlast the daemon."""
        if not self._away.exists():
            (self.folder / "data").rename(self._away)

    def put_back(self) -> None:
        if self._away.exists():
            self._away.rename(self.folder / "data")

    def kill(self) -> None:
        """Copy the folder as it is now, in which the next daemon begins. The end of the old one changes only its own."""
        self.put_back()
        copied = self.folder.with_name(f"{self.folder.name}+")
        copied.mkdir(0o700)
        for name in ("ids-valkey", "generations", "generations.copy", "journal", "data"):
            with contextlib.suppress(FileNotFoundError):  # it was opening
                shutil.copy(self.folder / name, copied / name)
        self.folder = copied

    def flip(self, dice: random.Random) -> None:
        """A bit of some pages or of all, near the beginning of the data file, where records are."""
        with (self._away if self._away.exists() else self.folder / "data").open("r+b") as file:
            for page in dice.sample(range(1, 256), k=dice.choice([4, 16, 64, 255])):
                at = page * PAGE_BYTES + dice.randrange(PAGE_BYTES)
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([byte[0] ^ 1 << dice.randrange(8)]))


@dataclass(eq=False, kw_only=True)
class Clearing(Call):
    storage: Storage
    number: int
    least: int  # chunks of L1

    def respond(self, reply: Reply) -> None:
        super().respond(reply)
        if isinstance(reply, Cleared):
            assert reply.chunks >= self.least
            self.storage.done_clears.add(self.number)
        else:
            assert self.error == ErrorCode.STORAGE.value, reply


@dataclass(eq=False, kw_only=True)
class Fill(Call):
    world: TieredWorld
    engine: Engine
    lookup: Lookup

    def respond(self, reply: Reply) -> None:
        super().respond(reply)
        self.world.filled(self, reply)


class TieredWorld(World):
    page_bytes = PAGE_BYTES

    def __init__(self, folder: Path, models: dict[str, Model], pages: int, storage: Storage, trouble: float) -> None:
        self.storage = storage
        self.disk = FaultyDisk()
        self._passed = 0.0
        self.request_id = ""  # of copies
        super().__init__(folder, models, pages, trouble)
        # From the beginning: what an earlier daemon wrote is found before anything is stored.
        self.models |= {engine.namespace(variant): engine.model for engine in self.engines for variant in VARIANTS}

    def begins(self) -> float:
        return time.monotonic()

    def make_tiers(self, folder: Path, l1: HostRegion) -> Sequence[ConfiguredTier]:
        file, remote = parse_tiers(
            [
                f"file://{self.storage.folder}?size={size_of(parse_size(self.storage.size))}&timeout=10s",
                "valkey://store/p?timeout=500ms",
            ]
        )
        self.file = make_file_tier(file, l1, PAGE_BYTES, self.disk)
        self.remote = RemoteTier(remote, "p", l1, PAGE_BYTES, self.storage.store.connect, _LANES, folder=file.path)
        configured = [ConfiguredTier(self.file, file), ConfiguredTier(self.remote, remote)]
        self.storage.daemons += 1
        return configured[::-1] if self.storage.daemons % 2 == self.storage.shared_first else configured

    def go_on(self) -> None:
        """The clock moves between two steps only, so that the server and the plain model read the same time."""
        self.now = time.monotonic() + self._passed

    def pass_time(self, seconds: float) -> None:
        self._passed += seconds
        self.go_on()
        super().pass_time(seconds=0.0)

    # ---- fills --------------------------------------------------------------------------------

    def await_fill(self, engine: Engine, request_id: str, keys: list[bytes], variant: str, wait_ms: int) -> None:
        lookup = self.lookup_message(engine, request_id, keys, variant)
        fill = Fill(world=self, engine=engine, lookup=lookup)
        self.calls.append(fill)
        self.ask(AwaitFill(lookup, wait_ms), fill)
        if fill.reply is None:
            self.counts["fills"] += 1
            if self.loadable(fill):
                self.lease(fill)

    def filled(self, fill: Fill, reply: Reply) -> None:
        """In the midst of a step: the copies that have ended with it come first."""
        if isinstance(reply, Error):
            assert not self.registered(fill.engine), reply
            return
        assert isinstance(reply, LookupReply), reply
        if not self.loadable(fill):
            assert reply.hit_chunks == 0, reply
            return
        self.follow_drained()
        self.sync()
        assert (reply.hit_chunks, reply.full_chunks) == self.lease(fill), reply
        self.counts["filled hits"] += reply.hit_chunks > 0

    def loadable(self, fill: Fill) -> bool:
        """Whether all ranks could load a hit."""
        instance = self.parts.instances.by_id.get(fill.engine.instance_id)
        known = instance is not None and instance.namespace_of(fill.lookup.variant) is not None
        return known and not self.device.lost

    def lease(self, fill: Fill) -> tuple[int, int]:
        """What the server has leased for it, of what L1 has now: that boundary, as a lookup's reply has it."""
        lookup = fill.lookup
        keys = [lookup.keys[at : at + 32] for at in range(0, len(lookup.keys), 32)]
        return self.lease_boundary(fill.engine, lookup.request_id, keys, lookup.variant)

    def durability(self, variant: str) -> Durability:
        return VARIANTS[variant]

    def wire(self, operation: Operation, variant: str) -> dict[str, Any]:
        return super().wire(operation, variant) | {"request_id": self.request_id}

    def evict(self, pages: int) -> None:
        """Something else of L1 needs so many pages for a moment, as far as they can be had."""
        plan = self.cache.plan_store(b"something else", one_group(1), bytes(32), pages * PAGE_BYTES)
        self.cache.finish_store(plan, copied=False)

    # ---- objects that were read from L2 -------------------------------------------------------

    def sync(self) -> None:
        """Follow what L1 has evicted and read since the last call."""
        self.counts["evicted"] += self.plain.drop_evicted(self.record)
        for entry in self.plain.entries.values():
            self.drop_incomplete(entry)
        for chunk in self.cache.index:
            name = (chunk.namespace.id, chunk.key)
            model = self.models.get(name[0])
            if model is None or not chunk.ready:
                continue
            for group in range(len(model.groups)):
                if chunk.ready >> group & 1 and not self.plain.ready(name, group):
                    self.adopt(model, name, chunk, group)

    def drop_incomplete(self, entry: Entry) -> None:
        """A fill frees the slots of an object that lacks a rank's bytes, before it reads the whole object."""
        for slot in [slot for slot in entry.done if not entry.chunk.has_slot(entry.slots.index(slot))]:
            assert not entry.ready(slot[0]), "an object that was stored whole has lost a slot"
            del entry.done[slot]

    def adopt(self, model: Model, name: Name, chunk: Chunk, group: int) -> None:
        slots = [slot for slot in model.slots if slot[0] == group]
        found = {slot: self.l1_bytes(chunk, model.slots.index(slot)) for slot in slots}
        versions = [version for version in self.storage.versions[name, group] if not version.clears]
        for version in versions:
            parts = {slot: model.object_bytes(group, version.whole[slot]) for slot in slots}
            if all(found[slot].startswith(parts[slot]) for slot in slots):
                entry = self.plain.entries.setdefault(name, Entry(model.slots, chunk))
                assert entry.chunk is chunk
                entry.done.update(version.whole)
                self.counts["adopted"] += 1
                return
        raise AssertionError(f"L2 returned bytes that none of {len(versions)} versions of the object has had")

    def l1_bytes(self, chunk: Chunk, number: int) -> bytes:
        return b"".join(self.device.read_l1(page) for page in pages_of(chunk.slot(number)))

    def ended(self, operation: Operation, outcome: Outcome) -> None:
        super().ended(operation, outcome)
        self.note_whole(operation)

    def published(self, operation: Operation, slots: int) -> None:
        super().published(operation, slots)
        self.note_whole(operation)

    def note_whole(self, operation: Operation) -> None:
        """L2 may have the objects of the store that are READY."""
        group = operation.group
        for name, entry, _ in operation.entries:
            if self.plain.entries.get(name) is entry and entry.ready(group):
                whole = {slot: blocks for slot, blocks in entry.done.items() if slot[0] == group}
                self.storage.stored(name, group, whole)

    # ---- clears -------------------------------------------------------------------------------

    def clear(self, engine: Engine | None) -> None:
        """Its reply comes once it is durable, or cannot be."""
        self.counts["clears"] += 1
        base: bytes | None = None
        if engine is not None and engine.known:
            base = engine.namespace("") if engine.ready else b""
        if engine is not None and not engine.known:
            assert isinstance(self.answer(Clear(engine.instance_id)), Error)
            return
        number = self.storage.clear(base or b"") if base != b"" else 0
        clearing = Clearing(storage=self.storage, number=number, least=self.plain.clear(base))
        self.calls.append(clearing)
        self.ask(Clear(engine.instance_id if engine is not None else "", shared=True), clearing)

    # ---- turns --------------------------------------------------------------------------------

    def complete_copies(self) -> None:
        super().complete_copies()
        self.sync()
        self.parts.upkeep.step()
        self.sync()

    def busy(self) -> bool:
        parts = self.parts
        copies = parts.tickets.open_tickets or parts.stores.waiting
        return bool(
            copies or parts.storage.tiers.open_tickets or parts.storage.fills.open or parts.storage.spill.waiting
        )

    def until(self, reached: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _WAIT_SECONDS
        while not reached():
            assert time.monotonic() < deadline, what
            select.select(self.parts.upkeep.completion_fds, [], [], 0.02)
            self.pass_time(0.05)
            self.copies_end()

    def recover(self) -> None:
        """All that L2 has begun ends, but for what the next faults are about."""
        for _ in range(10):
            if self.remote.state == "ready" and not self.parts.storage.tiers.open_tickets:
                return
            self.pass_time(0.3)
            select.select(self.parts.upkeep.completion_fds, [], [], 0.01)
            self.complete_copies()

    def come_to_rest(self) -> None:
        self.storage.store.heal()
        self.storage.put_back()
        self.disk.go_on()
        self.until(lambda: not self.busy(), "a ticket of L2, a fill or what waits to be written does not end")
        super().come_to_rest()

    def check(self) -> None:
        expected = (os.strerror(errno.ENOSPC), "objects in a row were corrupt", "no longer there")  # by faults
        self.faults.buffer = [each for each in self.faults.buffer if not any(e in each.getMessage() for e in expected)]
        super().check()

    def check_contents(self) -> None:
        self.sync()
        super().check_contents()

    # ---- ends ---------------------------------------------------------------------------------

    def end(self) -> None:
        super().end()
        self.come_to_rest()
        local = {engine.namespace("lora").hex() for engine in self.engines}
        assert not [name for name in self.storage.store.values if name.split("/")[2] in local], "it left the machine"
        assert self.parts.storage.fills.room.used_bytes == 0, "requests that have ended use room of fills"
        if self.file.state != "closed":
            self.until(lambda: self.file.state == "ready", "a tier does not recover from a full disk")
            self.until(lambda: self.file.journaled and self.file.status().used_bytes == PAGE_BYTES, "pages are lost")

    def killed(self) -> None:
        """Nothing more of it counts."""
        self.check()
        self.disk.go_on()
        self.storage.kill()
        for call in self.calls:
            if isinstance(call, Clearing):
                call.number = 0  # no reply leaves a process that was killed

    def terminated(self) -> None:
        """What has been stored is written, if there is time."""
        self.check()
        repeat(self.copies_end)  # what is stored after this is not followed
        self.device.runs = True
        self.parts.upkeep.drain(1.0)

    def close(self) -> None:
        for tier in (self.file, self.remote):
            self.counts[f"hits of {tier.kind}"] += tier.status().hits
            self.counts[f"corrupt of {tier.kind}"] += tier.status().corrupt
        for rank in self.processes:
            if rank.connection is not None:
                rank.connection.close()
            rank.side.memory.close()
        self.disk.go_on()
        if not self.device.runs:
            self.parts.storage.tiers.close(time.monotonic_ns() + 100_000_000)  # a store that hangs goes on hanging
        super().close()
