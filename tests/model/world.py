"""Engines, their memory and requests around the real parts over a fake device, and the checks of each step."""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import random
import select
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.memory import Geometry, Memory, put
from support.registration import identity, registration
from support.slots import pages_of
from support.worker import packed

from kvserver._native import NO_BLOCK, Direction, Outcome, State, WordPage
from kvserver.cache import POLICIES, Cache, Chunk, PagePool, fingerprint, with_variant
from kvserver.config import Settings
from kvserver.copy import Devices
from kvserver.parts import Parts
from kvserver.protocol import (
    Attach,
    Attached,
    Clear,
    Cleared,
    Detached,
    EndRequest,
    Error,
    ErrorCode,
    KVServerError,
    Lookup,
    LookupReply,
    Plane,
    Registered,
    RegisterWorker,
    Reply,
    Request,
    Retrieve,
    Retrieved,
    Store,
    Stored,
    Unregistered,
    UnregisterWorker,
    decode_attach_reply,
    encode,
)
from kvserver.server import Lifelines

from .plain import Entry, Name, Plain
from .watched_device import Side, WatchedDevice

WORDS = 128
CHUNK_TOKENS = 64
PAGE_BYTES = 32
CHAINS, CHAIN_LENGTH = 3, 8


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
        # Both models use the same keys: only the namespace keeps them apart.
        return [hashlib.sha256(f"{chain} {i}".encode()).digest() for i in range(CHAIN_LENGTH)]


LLAMA = Model("llama", Geometry(48, 32, (48 * 64 + 7,), (Plane(0, 3, 64, 17), Plane(0, 20, 64, 30))), 1)
GEMMA = Model(
    "gemma", Geometry(64, 16, (64 * 20, 64 * 9), (Plane(1, 0, 9, 9), Plane(0, 0, 20, 11), Plane(0, 13, 20, 5))), 2
)
HYBRID = Model(  # two groups, whose planes lie over the same bytes
    "hybrid", Geometry(80, 32, (80 * 40,), (Plane(0, 2, 40, 15, 1), Plane(0, 0, 40, 31), Plane(0, 18, 40, 22, 1))), 1
)
Position = tuple[int, ...]  # one block of each group


class Call:
    """One request and its replies; `kind` is what the last one must be, where that is known."""

    def __init__(self, kind: type[Reply] | None = None) -> None:
        self.replies: list[Reply] = []
        self.kind = kind

    def respond(self, reply: Reply) -> None:
        assert not self.replies, f"a second reply: {self.replies[0]}, then {reply}"
        self.replies.append(reply)

    @property
    def reply(self) -> Reply | None:
        return self.replies[0] if self.replies else None

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
    deadline_ns: int = 0
    skip: int = 0
    ticket: int | None = None  # none was made: refused, or nothing to copy
    entries: list[tuple[Name, Entry, list[bytes]]] = field(default_factory=list)  # that it fills, with the content
    readers: list[Entry] = field(default_factory=list)
    expected: dict[Position, bytes] = field(default_factory=dict)  # block -> what a load must leave there
    released: bool = False

    def __post_init__(self) -> None:
        Call.__init__(self)

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


class _Faults(logging.Handler):
    """The server runs on after a fault of its own; here it is a failure."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._faults = faults

    def emit(self, record: logging.LogRecord) -> None:
        self._faults.append(logging.Formatter().format(record))


class World:
    """Everything, moved by its public methods; each of them checks what must hold after it."""

    def __init__(self, folder: Path, seed: int, pages: int, trouble: float) -> None:
        self.rng = random.Random(seed)
        self.now = time.monotonic() + 1e6  # by the device's clock no deadline passes but by trouble
        self.plain = Plain()
        self.device = WatchedDevice(pages * PAGE_BYTES, PAGE_BYTES, seed + 1, trouble)
        self.cache = Cache(PagePool(pages * PAGE_BYTES, PAGE_BYTES), POLICIES["lru"]())
        self.lifelines = Lifelines(str(folder / "fd"), "token")
        settings = Settings(chunk_tokens=CHUNK_TOKENS, lease_seconds=20.0)
        devices = Devices(self.device)
        self.parts = Parts(settings, self.cache, devices, self.lifelines, clock=lambda: self.now)
        self.parts.observability.start(list)
        self.engines = [
            Engine("llama-0", LLAMA),
            Engine("llama-1", LLAMA),
            Engine("gemma-0", GEMMA),
            Engine("hybrid-0", HYBRID),
        ]
        self.operations: dict[int, Operation] = {}  # by ticket
        self.pending: list[tuple[Rank, Call]] = []  # registrations
        self.processes = list(self.ranks())  # whose memory is still open
        self.faults: list[str] = []  # what the server logged as an error
        self._watcher = _Faults(self.faults)
        logging.getLogger("kvserver").addHandler(self._watcher)
        self.calls: list[Call] = []  # all that want one reply by the time nothing is in flight
        self.incarnations = itertools.count()
        self.counts = dict.fromkeys(
            (
                "stores",
                "stored",
                "loads",
                "loaded",
                "hits",
                "evicted",
                "deaths",
                "cancels",
                "clears",
                "halves",
                "losses",
            ),
            0,
        )

    # ---- plumbing -----------------------------------------------------------------------------

    def ask(self, request: Request, call: Call) -> None:
        """As the server does: an error that is raised is the reply."""
        try:
            self.parts.handlers.handle(request, call.respond)
        except KVServerError as error:
            call.respond(Error(code=error.code.value, message=error.message))

    def answer(self, request: Request) -> Reply:
        call = Call()
        self.ask(request, call)
        assert call.reply is not None, f"{type(request).__name__} was not answered"
        return call.reply

    def record(self, name: Name) -> Chunk | None:
        namespace = self.cache.index.find_namespace(name[0])
        return namespace.chunks.get(name[1]) if namespace is not None else None

    def ranks(self) -> Iterable[Rank]:
        return (rank for engine in self.engines for rank in engine.ranks)

    # ---- workers connect and disconnect---------------------------------------------------------

    def connect(self, dead: Rank) -> None:
        """A fresh process registers in the place of a dead one."""
        assert dead.connection is None
        engine = dead.engine
        if not any(other.connection for other in engine.ranks):
            engine.incarnation = f"life-{next(self.incarnations)}"
        rank = Rank(engine, dead.number)
        self.processes.append(rank)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(self.lifelines.path)
        socket.send_fds(connection, [encode(Attach(token="token"))], [*rank.side.memory.fds, rank.side.words.fd])
        fd = self.lifelines.accept()
        assert fd is not None
        assert self.lifelines.read(fd) is None
        attached = decode_attach_reply(connection.recv(4096))
        assert isinstance(attached, Attached)
        rank.connection = connection
        call = Call()
        taken = engine.known and (self.registered_incarnation(engine) != engine.incarnation or dead.state != "gone")
        if not taken:
            self.device.expect(rank.side)
        self.ask(engine.registration(rank, attached.attachment), call)
        if taken:
            assert call.error == ErrorCode.DUPLICATE_INSTANCE.value
            self.hang_up(rank)
            return
        assert call.reply is None, call.reply
        rank.state = "mapping"
        engine.ranks[rank.number] = rank
        self.calls.append(call)
        self.pending.append((rank, call))

    def registered_incarnation(self, engine: Engine) -> str:
        return self.parts.instances.by_id[engine.instance_id].incarnation

    def hang_up(self, rank: Rank) -> None:
        """The process dies; the server has not noticed yet."""
        assert rank.connection is not None
        rank.connection.close()
        rank.connection = None
        for operation in rank.operations:
            operation.released = True
        self.counts["deaths"] += 1

    def watch_lifelines(self) -> None:
        """The server looks at its connections."""
        poll = select.poll()
        for fd in self.lifelines.connection_fds():
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll(0):
            ended = self.lifelines.read(fd)
            assert ended is not None
            registration = ended.registration
            self.parts.workers.lifeline_ended(ended)
            for rank in self.ranks():
                if registration is not None and rank.registration == registration and rank.state == "open":
                    self.closed(rank)
        self.adopt_mapping_deaths()

    def adopt_mapping_deaths(self) -> None:
        """A worker that died while its memory was mapped has left the server's table."""
        for rank, _ in self.pending:
            if rank.state == "mapping":
                instance = self.parts.instances.by_id.get(rank.engine.instance_id)
                if instance is None or rank.number not in instance.workers:
                    assert rank.connection is None, "a living worker was dropped"
                    self.closed(rank)

    def closed(self, rank: Rank) -> None:
        """The server takes no more from this worker."""
        rank.state = "gone"
        assert all(job.cancelled for job in self.device.copies_of(rank.side)), "it copies on for the dead"
        if not rank.engine.known:
            self.plain.end_leases(lambda owner, _: owner[0] == rank.engine.instance_id)

    def unregister(self, rank: Rank) -> None:
        call = Call(Unregistered if rank.state == "open" else Error)
        self.ask(UnregisterWorker(boot_id=self.parts.boot_id, registration=rank.registration), call)
        if rank.state != "open":
            assert call.error == ErrorCode.STALE_REGISTRATION.value
            return
        self.calls.append(call)
        self.closed(rank)

    def notice_server_hung_up(self, rank: Rank) -> None:
        """A worker whose connection the server closed starts anew later."""
        if rank.connection is None or rank.state != "gone":
            return
        poll = select.poll()
        poll.register(rank.connection, select.POLLIN)
        if poll.poll(0):
            assert isinstance(decode_attach_reply(rank.connection.recv(4096)), Detached)
            assert rank.connection.recv(16) == b""
            assert not self.device.copies_of(rank.side), "it may still be written to"
            self.hang_up(rank)

    # ---- requests -----------------------------------------------------------------------------

    def lookup(self, engine: Engine, request_id: str, keys: list[bytes], variant: str) -> int:
        request = Lookup(
            engine.instance_id, engine.incarnation, request_id, engine.model.chunk_blocks, b"".join(keys), variant
        )
        if not engine.known or self.registered_incarnation(engine) != engine.incarnation:
            reply = self.answer(request)
            assert isinstance(reply, Error)
            return 0
        reply = self.answer(request)
        assert isinstance(reply, LookupReply), reply
        if not engine.ready or self.device.lost:
            assert reply.hit_chunks == 0, "a hit that no rank could load"
            return 0
        space = engine.namespace(variant)
        found = self.plain.hits((space, key) for key in keys)
        assert reply.hit_chunks == len(found), f"{reply.hit_chunks} hits, {len(found)} chunks were stored whole"
        self.plain.lease((engine.instance_id, request_id), self.now + 20.0, found)
        self.counts["hits"] += len(found)
        return len(found)

    def end_request(self, engine: Engine, request_id: str) -> None:
        call = Call()
        sequence = next(engine.reports)
        self.ask(EndRequest(engine.instance_id, engine.incarnation, engine.model.name, sequence, request_id), call)
        if engine.known and self.registered_incarnation(engine) == engine.incarnation:
            assert call.reply is None, "a notice was answered"
            self.plain.end_lease((engine.instance_id, request_id))
        else:
            assert call.error in (ErrorCode.UNKNOWN_INSTANCE.value, ErrorCode.DUPLICATE_INSTANCE.value)

    def arm(self, rank: Rank, direction: Direction, names: list[Name], blocks: list[Position]) -> Operation | None:
        word = next(rank.words)
        if any(operation.word == word and not operation.released for operation in rank.operations):
            return None
        sequence = next(rank.sequences)
        rank.side.words.arm(word, sequence)
        rank.free.difference_update(*blocks)
        operation = Operation(rank, direction, names, blocks, word, sequence)
        rank.operations.append(operation)
        self.calls.append(operation)
        return operation

    def wire(self, operation: Operation, variant: str, **changes: Any) -> dict[str, Any]:
        return {
            "boot_id": self.parts.boot_id,
            "registration": operation.rank.registration,
            "chunk_blocks": operation.rank.engine.model.chunk_blocks,
            "keys": b"".join(key for _, key in operation.names),
            "block_ids": packed(0 if id == NO_BLOCK else id for position in operation.blocks for id in position),
            "word": operation.word,
            "sequence": operation.sequence,
            "deadline_ns": int((self.now + 60.0) * 1e9),
            "variant": variant,
            **changes,
        }

    def send(self, operation: Operation, request: Store | Retrieve) -> None:
        self.device.newest = None
        self.ask(request, operation)
        if self.device.newest is not None:
            operation.ticket = self.device.newest.ticket
            self.operations[operation.ticket] = operation
            assert operation.reply is None

    def refusal(self, rank: Rank, late: bool) -> str | None:
        """Why the server should take no copy from this rank now."""
        if rank.state != "open":
            return ErrorCode.STALE_REGISTRATION.value
        if late:
            return ErrorCode.LATE.value
        return None if rank.engine.ready else ErrorCode.NOT_READY.value

    def store(self, rank: Rank, keys: list[bytes], variant: str, late: bool = False) -> None:
        model, space = rank.engine.model, rank.engine.namespace(variant)
        names = [(space, key) for key in keys]
        per_chunk = model.chunk_blocks
        blocks = rank.positions(len(keys) * per_chunk, self.rng)
        operation = self.arm(rank, Direction.STORE, names, blocks) if blocks is not None else None
        if operation is None:
            return
        for block in operation.blocks:
            rank.write(block, self.rng.randbytes(model.geometry.block_bytes))
        deadline = operation.deadline_ns = int((self.now + (-1.0 if late else 60.0)) * 1e9)
        evictions = self.cache.evicted_chunks
        self.counts["stores"] += 1
        self.send(operation, Store(**self.wire(operation, variant, deadline_ns=deadline)))
        refused = self.refusal(rank, late)
        if refused is not None:
            assert operation.error == refused
            assert self.cache.evicted_chunks == evictions
            if rank.state == "open":
                assert operation.state == State.FAILED
            return
        self.drop_evicted(evictions)
        self.plan_store(operation)

    def drop_evicted(self, before: int) -> None:
        gone = self.plain.drop_evicted(self.record)
        assert self.cache.evicted_chunks - before == gone, "a chunk vanished without being evicted, or the reverse"
        self.counts["evicted"] += gone

    def plan_store(self, operation: Operation) -> None:
        """Work out from the blocks it copies which chunks it fills."""
        rank, per_chunk = operation.rank, operation.rank.engine.model.chunk_blocks
        job = self.device.newest
        copied = set(job.blocks) if job is not None else set()
        assert job is None or job.direction == Direction.STORE
        for position, name in enumerate(operation.names):
            blocks = operation.blocks[position * per_chunk : (position + 1) * per_chunk]
            if not set(blocks) & copied:
                continue  # it is there, or there was no room
            assert set(blocks) <= copied, "half a chunk is copied"
            entry, record = self.plain.entries.get(name), self.record(name)
            assert record is not None
            if entry is None:
                entry = self.plain.entries[name] = Entry(rank.engine.model.world, record)
            assert rank.number not in entry.done, "copied although it was there"
            assert rank.number not in entry.filling, "copied although it was on its way"
            entry.filling.add(rank.number)
            operation.entries.append((name, entry, rank.side.memory.blocks(blocks)))
        if job is None:
            self.check_stored(operation)
            assert operation.state == State.FAILED

    def check_stored(self, operation: Operation) -> None:
        reply = operation.reply
        assert isinstance(reply, Stored), reply
        assert reply.stored == len(operation.entries)
        assert reply.stored + reply.skipped + reply.starved == len(operation.names)

    def load(self, rank: Rank, keys: list[bytes], variant: str, skip: int, short: int, late: bool = False) -> None:
        """Into fresh blocks; the first `skip` and last `short` blocks stay out."""
        model, space = rank.engine.model, rank.engine.namespace(variant)
        names = [(space, key) for key in keys]
        count = len(keys) * model.chunk_blocks - skip - short
        blocks = rank.positions(count, self.rng, holes=True) if count > 0 else None
        operation = self.arm(rank, Direction.LOAD, names, blocks) if blocks is not None else None
        if operation is None:
            return
        operation.skip = skip
        deadline = int((self.now + (-1.0 if late else 60.0)) * 1e9)
        self.counts["loads"] += 1
        self.send(operation, Retrieve(**self.wire(operation, variant, deadline_ns=deadline), skip_blocks=skip))
        refused = self.refusal(rank, late)
        entries = [self.plain.entries.get(name) for name in names]
        if refused is None and not all(entry is not None and entry.ready for entry in entries):
            refused = ErrorCode.NOT_FOUND.value
        if refused is not None:
            assert operation.error == refused, f"{operation.reply}, expected {refused}"
            assert rank.state != "open" or operation.state == State.FAILED
            return
        assert operation.ticket is not None
        operation.readers = [entry for entry in entries if entry is not None]
        contents = [block for entry in operation.readers for block in entry.done[rank.number]]
        operation.expected = {
            position: without_holes(model.geometry, position, content)
            for position, content in zip(operation.blocks, contents[skip : skip + count], strict=True)
        }
        for entry in operation.readers:
            entry.readers += 1

    def cancel(self, operation: Operation) -> None:
        """The engine gives up on it, by the rules of the state word."""
        self.counts["cancels"] += 1
        if operation.move(State.PENDING, State.CANCELLED):
            self.release(operation)
        elif operation.direction == Direction.LOAD:
            operation.move(State.RUNNING, State.CANCELLING)
        elif operation.move(State.RUNNING, State.CANCELLED):
            self.release(operation)  # and the blocks are overwritten while the copy perhaps still reads them

    def release(self, operation: Operation) -> None:
        """The blocks are the engine's again: a copy that reads or writes them now is wrong."""
        rank = operation.rank
        if operation.released:
            return
        operation.released = True
        rank.operations.remove(operation)
        for block in operation.blocks:
            if operation.direction == Direction.STORE or operation.state != State.DONE:
                rank.write(block, self.rng.randbytes(rank.engine.model.geometry.block_bytes))
            else:
                content = rank.side.memory.read(block)
                assert content == operation.expected[block], "a load left other bytes than were stored"
                put(rank.engine.model.geometry, rank.image, block, content)
        rank.free |= {id for position in operation.blocks for id in position if id != NO_BLOCK}

    def look_at_words(self, rank: Rank) -> None:
        """The engine sees which of its operations are over."""
        for operation in list(rank.operations):
            over = operation.state in (State.DONE, State.FAILED, State.CANCELLED)
            if not over and operation.error is not None and operation.ticket is None:
                over = operation.move(State.PENDING, State.CANCELLED)  # refused before its word could be set
            if over:
                self.release(operation)

    # ---- the server's own time ----------------------------------------------------------------

    def complete_copies(self) -> None:
        self.device.drained = []
        self.parts.upkeep.complete_tickets()
        self.parts.stores.step()
        self.faults[:] = [fault for fault in self.faults if "the device is lost" not in fault]
        for ticket, outcome in self.device.drained:
            operation = self.operations.pop(ticket, None)
            if operation is not None:
                self.ended(operation, outcome)
            self.registered()
        self.registered()

    def registered(self) -> None:
        for rank, call in [pair for pair in self.pending if pair[1].reply is not None]:
            self.pending.remove((rank, call))
            if rank.state != "mapping":
                assert call.error == ErrorCode.CANCELLED.value
                continue
            if call.error == ErrorCode.DEVICE_LOST.value:
                assert self.counts["losses"]
                self.closed(rank)
                continue
            assert isinstance(call.reply, Registered), call.reply
            rank.registration = call.reply.registration
            rank.state = "open"
            assert call.reply.namespace in ("", rank.engine.namespace("").hex())

    def ended(self, operation: Operation, outcome: Outcome) -> None:
        rank = operation.rank
        for entry in operation.readers:
            entry.readers -= 1
        if operation.direction == Direction.STORE:
            late = int(self.now * 1e9) > operation.deadline_ns
            counts = outcome == Outcome.DONE and rank.state == "open" and not late
            for name, entry, content in operation.entries:
                self.plain.store_ended(name, entry, rank.number, content if counts else None)
            if counts:
                self.check_stored(operation)
                self.counts["stored"] += len(operation.entries)
            else:
                assert operation.error is not None
        elif outcome == Outcome.DONE:
            assert operation.reply == Retrieved(chunks=len(operation.names))
            self.counts["loaded"] += 1
        else:
            assert operation.error is not None
        if outcome == Outcome.DEVICE_LOST:
            assert operation.error == ErrorCode.DEVICE_LOST.value
        if outcome == Outcome.MEMORY_LOST and rank.state == "open":
            self.closed(rank)

    def clear(self, engine: Engine | None) -> None:
        self.counts["clears"] += 1
        reply = self.answer(Clear(engine.instance_id if engine is not None else ""))
        if engine is not None and not engine.known:
            assert isinstance(reply, Error)
            return
        base = None
        if engine is not None:
            base = engine.namespace("") if engine.ready else b""
        assert reply == Cleared(chunks=self.plain.clear(base))

    def fail_half(self) -> None:
        """Some copy fails with part of its bytes moved."""
        copies = [number for number in self.device.open if number in self.operations]
        if copies:
            self.device.fail(self.rng.choice(copies), self.rng.randint(1, 4), "it broke half way")
            self.counts["halves"] += 1

    def lose_device(self) -> None:
        """What is in flight fails; what comes after it, too, until the device is replaced."""
        self.device.lose("it fell off the bus")
        assert not self.device.open
        self.counts["losses"] += 1

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.parts.upkeep.tick()
        self.plain.end_leases(lambda _, deadline: deadline <= self.now)

    # ---- checks -------------------------------------------------------------------------------

    def check(self) -> None:
        """What holds at any moment."""
        assert not self.faults, self.faults[0]
        for rank in self.processes:
            if rank.connection is not None:
                rank.check_memory()

    def come_to_rest(self) -> None:
        """Let everything in flight end, then audit the accounting and compare all that can be seen."""
        moving = True
        while moving:
            while self.device.open:
                self.device.step()
            self.complete_copies()
            for rank in self.ranks():
                if rank.connection is not None:
                    self.look_at_words(rank)
                    self.notice_server_hung_up(rank)
            self.watch_lifelines()
            moving = self.parts.tickets.open_tickets > 0
        while self.parts.upkeep.step():
            pass
        self.check()
        assert self.parts.upkeep.audit_if_idle(), "nothing is in flight, and yet it is not idle"
        for call in self.calls:
            assert call.reply is not None, "a request without its reply"
            assert call.kind is None or isinstance(call.reply, call.kind), call.reply
        self.calls.clear()
        assert not self.operations
        assert not self.pending
        assert all(rank.state == "open" or rank.connection is None for rank in self.ranks()), (
            "a closed worker was not notified"
        )
        self.check_contents()
        self.bury()

    def bury(self) -> None:
        """Nothing is in flight: close the memory of the dead."""
        for rank in [rank for rank in self.processes if rank.connection is None]:
            rank.side.memory.close()
            self.processes.remove(rank)

    def check_contents(self) -> None:
        assert self.cache.index.chunk_count == len(self.plain.entries)
        assert self.cache.lease_count == len(self.plain.leases)
        for name, entry in self.plain.entries.items():
            record = self.record(name)
            assert record is entry.chunk
            assert record.ready == entry.ready
            for rank, content in entry.done.items():
                slot = pages_of(record.slot(rank))
                assert slot
                raw = b"".join(self.device.read_l1(page) for page in slot)
                whole = b"".join(content)
                assert raw[: len(whole)] == whole, "L1 holds other bytes than were stored"

    def end(self) -> None:
        """Every worker disconnects; nothing may be left."""
        for rank in self.ranks():
            if rank.connection is not None:
                self.hang_up(rank)
        self.watch_lifelines()
        self.come_to_rest()
        assert self.parts.workers.mappings == 0
        assert len(self.lifelines) == 0
        assert self.cache.lease_count == 0
        assert not self.parts.instances.by_id
        self.clear(None)
        while self.parts.upkeep.step():
            pass
        assert self.cache.pool.used_pages == 0
        self.lifelines.shut()
        self.close()

    def close(self) -> None:
        """Also after a failure."""
        self.parts.observability.close(list)
        logging.getLogger("kvserver").removeHandler(self._watcher)


def without_holes(geometry: Geometry, position: Position, content: bytes) -> bytes:
    """What is read where `content` was loaded: zeros for groups without a block."""
    parts, done = [], 0
    for plane in geometry.planes:
        part = content[done : done + plane.run_bytes]
        parts.append(part if position[plane.group] != NO_BLOCK else bytes(plane.run_bytes))
        done += plane.run_bytes
    return b"".join(parts)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
