"""Engines as peers of the server: their models, processes, memory and requests."""

from __future__ import annotations

import hashlib
import itertools
import random
import socket
from dataclasses import dataclass, field

from support.memory import Geometry, Memory, put
from support.registration import identity, registration

from kvserver._native import NO_BLOCK, Direction, State, WordPage
from kvserver.cache import fingerprint, with_variant
from kvserver.protocol import Error, Plane, RegisterWorker, Reply

from .plain import Entry, Name
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

    @property
    def chunk_blocks(self) -> int:
        return CHUNK_TOKENS // self.geometry.block_tokens

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
    names: list[Name]
    blocks: list[Position]  # each belongs to the operation until `released`
    word: int
    sequence: int
    deadline_ns: int
    ticket: int | None = None  # none was made: refused, or nothing to copy
    entries: list[tuple[Name, Entry, list[bytes]]] = field(default_factory=list)  # that it fills, with the content
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

    def positions(self, count: int, rng: random.Random, holes: bool = False) -> list[Position] | None:
        """Blocks of its own for so many positions; with holes not of every group, but of one."""
        groups = self.engine.model.geometry.groups
        if len(self.free) < count * groups:
            return None
        ids = rng.sample(sorted(self.free), count * groups)
        positions = [tuple(ids[i : i + groups]) for i in range(0, len(ids), groups)]
        if holes and groups > 1:
            return [tuple(id if rng.random() < 0.7 else NO_BLOCK for id in p[:-1]) + p[-1:] for p in positions]
        return positions

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
            chunk_blocks=self.model.chunk_blocks,
            counted=identity(model=self.model.name),
        )

    def namespace(self, variant: str) -> bytes:
        return with_variant(fingerprint([self.registration(rank, 0) for rank in self.ranks]), variant)
