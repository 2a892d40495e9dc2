"""Engines as peers of the server: their models, processes, memory and requests."""

from __future__ import annotations

import hashlib
import itertools
import random
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from support.memory import Geometry, Memory, put
from support.registration import identity, registration

from kvserver._native import NO_BLOCK, Direction, State, WordPage
from kvserver.cache import fingerprint, with_variant
from kvserver.protocol import Error, ObjectGroup, Plane, RegisterWorker, Reply

from .plain import Entry, Name, Slot
from .watched_device import Side

WORDS = 128
CHUNK_TOKENS = 64
CHAINS, CHAIN_LENGTH = 3, 8
Position = tuple[int, ...]  # one block of each group


@dataclass(frozen=True)
class Model:
    """What engines may serve. Geometries of two models do not divide each other."""

    name: str
    geometry: Geometry
    world: int
    several: tuple[ObjectGroup, ...] = ()

    @property
    def groups(self) -> tuple[ObjectGroup, ...]:
        """Without several, one of all blocks."""
        return self.several or (ObjectGroup("full", tuple(range(self.geometry.groups)), self.geometry.block_tokens),)

    @property
    def chunk_blocks(self) -> int:
        return CHUNK_TOKENS // self.groups[0].block_tokens

    def object_blocks(self, group: int) -> int:
        return self.groups[group].object_blocks(CHUNK_TOKENS)

    @property
    def slots(self) -> list[Slot]:
        """Of a whole chunk, as the server numbers them."""
        ranks = [1 if group.replicated else self.world for group in self.groups]
        return [(group, rank) for group, count in enumerate(ranks) for rank in range(count)]

    def slot(self, group: int, rank: int) -> Slot:
        return group, 0 if self.groups[group].replicated else rank

    def position(self, group: int, ids: Sequence[int]) -> Position:
        """A block of each of the group's members."""
        found = dict(zip(self.groups[group].members, ids, strict=True))
        return tuple(found.get(member, NO_BLOCK) for member in range(self.geometry.groups))

    def object_bytes(self, group: int, contents: Iterable[bytes]) -> bytes:
        """These positions as an object has them: the members' planes alone."""
        parts = []
        for content in contents:
            done = 0
            for plane in self.geometry.planes:
                if plane.group in self.groups[group].members:
                    parts.append(content[done : done + plane.run_bytes])
                done += plane.run_bytes
        return b"".join(parts)

    def keys(self, chain: int) -> list[bytes]:
        # All models use the same keys: only the namespace keeps them apart.
        return [hashlib.sha256(f"{chain} {i}".encode()).digest() for i in range(CHAIN_LENGTH)]

    def read(self, position: Position, content: bytes) -> bytes:
        """What is read where `content` was loaded: zeros for groups without a block."""
        parts, done = [], 0
        for plane in self.geometry.planes:
            part = content[done : done + plane.run_bytes]
            parts.append(part if position[plane.group] != NO_BLOCK else bytes(plane.run_bytes))
            done += plane.run_bytes
        return b"".join(parts)


LLAMA = Model("llama", Geometry(48, 32, (48 * 64 + 7,), (Plane(0, 3, 64, 17), Plane(0, 20, 64, 30))), 1)
GEMMA = Model(
    "gemma", Geometry(64, 16, (64 * 20, 64 * 9), (Plane(1, 0, 9, 9), Plane(0, 0, 20, 11), Plane(0, 13, 20, 5))), 2
)
HYBRID = Model(  # two groups, whose planes lie over the same bytes
    "hybrid", Geometry(80, 32, (80 * 40,), (Plane(0, 2, 40, 15, 1), Plane(0, 0, 40, 31), Plane(0, 18, 40, 22, 1))), 1
)


WINDOWED = Model(  # an MLA that both ranks have whole, beside a window with blocks of another size
    "windowed",
    Geometry(96, 32, (96 * 40,), (Plane(0, 2, 40, 15), Plane(0, 0, 40, 31, 1), Plane(0, 18, 40, 22))),
    2,
    (ObjectGroup("full", (0,), 32, replicated=True), ObjectGroup("window", (1,), 16, tokens=70)),
)
STATEFUL = Model(  # two groups of states, chunked local attention and full attention over the same bytes
    "stateful",
    Geometry(
        96, 32, (96 * 40,), (Plane(0, 0, 40, 27), Plane(0, 2, 40, 9, 1), Plane(0, 3, 40, 9, 2), Plane(0, 0, 40, 30, 3))
    ),
    1,
    (ObjectGroup("full", (3,), 32), ObjectGroup("state", (1, 2), 64), ObjectGroup("local", (0,), 32, tokens=160)),
)


@dataclass(eq=False, kw_only=True)
class Call:
    """One request and its reply, which must be of `kind`, where that is known."""

    kind: type[Reply] | None = None
    reply: Reply | None = None

    def respond(self, reply: Reply) -> None:
        assert self.reply is None, f"a second reply: {self.reply}, then {reply}"
        self.reply = reply

    @property
    def error(self) -> str | None:
        return self.reply.code if isinstance(self.reply, Error) else None


@dataclass(eq=False)
class Operation(Call):
    """A store or load of one rank, from its arming until its blocks are free again."""

    rank: Rank
    direction: Direction
    group: int
    names: list[Name]
    blocks: list[Position]  # each belongs to the operation until `released`
    word: int
    sequence: int
    deadline_ns: int
    ticket: int | None = None  # none was made: refused, or nothing to copy
    entries: list[tuple[Name, Entry, list[bytes]]] = field(default_factory=list)  # that it fills, with the content
    looked: int = 0  # at so many of these, when parts were published
    dropped: list[Name] = field(default_factory=list)  # whose objects of the group it replaces
    readers: list[Entry] = field(default_factory=list)
    expected: dict[Position, bytes] = field(default_factory=dict)  # block -> what a load must leave there
    released: bool = False

    @property
    def state(self) -> State:
        return self.rank.side.words.state(self.word)

    def move(self, from_: State, to: State) -> bool:
        return self.rank.side.words.move(self.word, self.sequence, from_, to)


class Rank:
    """One worker process, alive while it has a connection. `state` is what it is to the server."""

    def __init__(self, engine: Engine, number: int) -> None:
        self.engine = engine
        self.number = number
        self.state = "gone"  # mapping, open
        self.connection: socket.socket | None = None
        self.registration = 0
        self.operations: list[Operation] = []
        self.sequences = itertools.count(1)
        self.words = itertools.cycle(range(WORDS))
        memory = Memory(engine.model.geometry)
        self.side = Side(memory, WordPage(WORDS))
        self.image = [bytearray(image) for image in memory.image()]  # what it should hold
        self.free = set(range(1, memory.geometry.num_blocks))

    def positions(self, group: int, count: int, rng: random.Random, holes: bool = False) -> list[Position] | None:
        """Blocks of its own for so many positions of an object group; with holes not of every member, but of one."""
        members = len(self.engine.model.groups[group].members)
        if len(self.free) < count * members:
            return None
        ids = rng.sample(sorted(self.free), count * members)
        if holes:
            ids = [id if at % members == members - 1 or rng.random() < 0.7 else NO_BLOCK for at, id in enumerate(ids)]
        return [self.engine.model.position(group, ids[i : i + members]) for i in range(0, len(ids), members)]

    def write(self, block: Position, content: bytes) -> None:
        self.side.memory.write(block, content)
        put(self.engine.model.geometry, self.image, block, content)

    def check_memory(self) -> None:
        """No byte changed but in blocks that a load has been given."""
        actual, expected = self.side.memory.image(), [bytearray(image) for image in self.image]
        for operation in self.operations:
            if operation.direction == Direction.LOAD and not operation.released:
                for block in operation.blocks:
                    put(self.engine.model.geometry, expected, block, self.side.memory.read(block))
        assert actual == [bytes(image) for image in expected], "a block that no copy may write was written"


class Engine:
    """One instance: alive while one of its ranks is."""

    def __init__(self, instance_id: str, model: Model) -> None:
        self.instance_id = instance_id
        self.model = model
        self.incarnation = ""
        self.reports = itertools.count()
        self.ranks = [Rank(self, number) for number in range(model.world)]

    @property
    def known(self) -> bool:
        return any(rank.state != "gone" for rank in self.ranks)

    @property
    def ready(self) -> bool:
        return all(rank.state == "open" for rank in self.ranks)

    def registration(self, rank: Rank, attachment: int) -> RegisterWorker:
        return registration(
            self.model.geometry,
            instance_id=self.instance_id,
            incarnation=self.incarnation,
            model_name=self.model.name,
            rank=rank.number,
            world_size=self.model.world,
            attachment=attachment,
            words=WORDS,
            block_tokens=self.model.groups[0].block_tokens,
            chunk_blocks=self.model.chunk_blocks,
            groups=self.model.several,
            counted=identity(model=self.model.name),
        )

    def namespace(self, variant: str) -> bytes:
        return with_variant(fingerprint([self.registration(rank, 0) for rank in self.ranks]), variant)
