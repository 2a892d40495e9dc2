"""A test engine's worker, with every request and notice of the protocol.

Only the engine is made up. Memory, descriptors, state words, sockets and messages are real.
"""

from __future__ import annotations

import itertools
import random
import time
import uuid
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from kvserver._native import State, WordPage, pack_blocks
from kvserver.protocol import (
    KEY_BYTES,
    AwaitFill,
    Counted,
    CudaIpc,
    CudaVmmFabric,
    CudaVmmFd,
    DescribeScheduler,
    Durability,
    EndRequest,
    EngineLoad,
    Error,
    HelloReply,
    Lookup,
    LookupReply,
    ObjectGroup,
    Payload,
    Registered,
    RegisterWorker,
    Reply,
    ReportBlockAllocations,
    Request,
    Retrieve,
    Retrieved,
    Store,
    Stored,
    Unregistered,
    UnregisterWorker,
    chunk_tokens_for,
)
from kvserver.protocol.client import Attachment, Client, RequestFailed

from .leftovers import closed, opened
from .memory import Geometry, Memory, Piece, SharedMemory, awkward, gpu_handle
from .registration import WORDS, identity, registration

R = TypeVar("R")
GpuMemory = CudaIpc | CudaVmmFd | CudaVmmFabric


def make_keys(count: int, seed: object = None) -> list[bytes]:
    """`count` chunk keys; the same ones for the same seed, fresh ones without."""
    source = random.Random(repr(seed)) if seed is not None else random.Random(uuid.uuid4().int)
    return [source.randbytes(KEY_BYTES) for _ in range(count)]


def ids(numbers: Iterable[int]) -> bytes:
    """Little-endian u32, as block-pool records travel."""
    return array("I", numbers).tobytes()


def packed(blocks: Iterable[int]) -> bytes:
    """Block ids as they travel."""
    return pack_blocks(list(blocks))


def wire_form(message: Any, **changes: Any) -> Any:
    """What the message is on the wire, as builtins, with some fields changed to whatever."""
    fields = {**msgspec.structs.asdict(message), **changes}
    tag = type(message).__name__
    return [tag, *fields.values()] if type(message).__struct_config__.array_like else {"type": tag, **fields}


@dataclass
class Operation:
    """A store or load that was sent; its reply has perhaps not come."""

    worker: Worker
    number: int
    word: int
    sequence: int

    @property
    def state(self) -> State:
        return self.worker.words.state(self.word)

    def move(self, from_: State, to: State) -> bool:
        return self.worker.words.move(self.word, self.sequence, from_, to)

    def reply(self, seconds: float = 30.0) -> Reply:
        return self.worker.reply_to(self.number, seconds)


@dataclass
class Worker:
    """One rank of a test engine. connect() sends Hello, attaches and registers.

    `gpu`: the UUID of the simulated GPU whose memory it claims to have, handed over as `handles`.
    """

    endpoint: str
    geometry: Geometry = field(default_factory=awkward)
    instance_id: str = ""
    incarnation: str = ""
    model_name: str = "test/model"
    rank: int = 0
    world_size: int = 1
    identity: tuple[Counted, ...] = field(default_factory=identity)
    layout: str = "NHD"
    replicated: bool = False
    groups: tuple[ObjectGroup, ...] = ()
    tails: bool = False
    durability: Durability = Durability.ANYWHERE  # of its KV
    gpu: str = ""
    handles: type[GpuMemory] = CudaVmmFd
    connect_now: bool = True
    allocate: Callable[[int], Piece] = SharedMemory

    def __post_init__(self) -> None:
        self.instance_id = self.instance_id or f"engine-{uuid.uuid4().hex[:12]}"
        self.incarnation = self.incarnation or uuid.uuid4().hex
        self.memory = Memory(self.geometry, self.allocate)
        self.words = WordPage(WORDS)
        self.client = Client(self.endpoint, timeout=10)
        self.attachment: Attachment | None = None
        opened(self)
        self.registered: Registered | None = None
        self._sequences = itertools.count(1)
        self._notices = itertools.count()
        self._replies: dict[int, Reply] = {}
        if self.connect_now:
            try:
                self.connect()
            except BaseException:
                self.close()
                raise

    # ---- connects and disconnects -------------------------------------------------------------

    def connect(self) -> Worker:
        self.attach()
        return self.register()

    def register(self, **changes: Any) -> Worker:
        """REQUIRES: attach()."""
        self.registered = self.ask(self.registration(**changes), Registered)
        return self

    def attach(self, fds: list[int] | None = None) -> Attachment:
        """Hand over descriptors: all memories unless handles name them, then the word page."""
        self.hello: HelloReply = self.client.hello("test")
        named = self.gpu and self.handles is not CudaVmmFd
        fds = [*([] if named else self.memory.fds), self.words.fd] if fds is None else fds
        self.attachment = Attachment(self.hello.fd_path, self.hello.token, fds)
        return self.attachment

    def registration(self, **changes: Any) -> RegisterWorker:
        """The message that registers this worker. REQUIRES: attach()."""
        assert self.attachment is not None
        stated = {
            **self.named,
            "rank": self.rank,
            "world_size": self.world_size,
            "attachment": self.attachment.number,
            "memory": self._gpu_memory() if self.gpu else self.memory.described(),
            "chunk_blocks": self.chunk_blocks,
            "counted": self.identity,
            "layout": self.layout,
            "replicated": self.replicated,
            "groups": self.groups,
            "tails": self.tails,
        }
        return registration(self.geometry, **{**stated, **changes})

    def _gpu_memory(self) -> list[GpuMemory]:
        return [self.window(i, 0, size) for i, size in enumerate(self.geometry.sizes)]

    def window(self, number: int, offset: int, size: int) -> GpuMemory:
        """So many bytes of memory `number`, as it is registered. REQUIRES: on a GPU."""
        if self.handles is CudaVmmFd:
            return CudaVmmFd(device=self.gpu, index=number, offset=offset, size_bytes=size)
        return self.handles(device=self.gpu, handle=gpu_handle(self.memory.fds[number]), offset=offset, size_bytes=size)

    @property
    def chunk_blocks(self) -> int:
        if self.groups:
            return chunk_tokens_for(self.hello.chunk_tokens, self.groups) // self.geometry.block_tokens
        return max(1, self.hello.chunk_tokens // self.geometry.block_tokens)

    def object_blocks(self, group: int) -> int:
        """REQUIRES: `groups`. 1 of groups of single blocks."""
        if group >= len(self.groups):
            return 1
        return self.groups[group].object_blocks(self.chunk_blocks * self.geometry.block_tokens)

    @property
    def chunk_bytes(self) -> int:
        return self.chunk_blocks * self.geometry.block_bytes

    @property
    def number(self) -> int:
        """Its registration number."""
        assert self.registered is not None
        return self.registered.registration

    def chunks_in(self, blocks: Sequence[int]) -> list[bytes]:
        """The bytes of each chunk that lies in these blocks."""
        content = b"".join(self.memory.blocks(blocks))
        return [content[at : at + self.chunk_bytes] for at in range(0, len(content), self.chunk_bytes)]

    def unregister(self) -> None:
        self.ask(UnregisterWorker(boot_id=self.hello.boot_id, registration=self.number), Unregistered)

    def hang_up(self) -> None:
        """End the lifeline, as death does."""
        if self.attachment is not None:
            self.attachment.close()

    def round_trip(self) -> None:
        """Store a chunk, find it, load it elsewhere: AssertionError unless the bytes are equal."""
        keys, source, target = make_keys(1), self.blocks_for(1), self.blocks_for(1, first=1 + self.chunk_blocks)
        content = self.memory.blocks(source)
        assert self.store(keys, source) == Stored(stored=1, skipped=0)
        self.memory.fill()
        assert self.lookup(keys) == 1
        assert self.load(keys, target) == Retrieved(chunks=1)
        assert self.memory.blocks(target) == content

    def found_in_l2(self, keys: list[bytes]) -> list[bytes]:
        """The bytes of the leading chunks that a fill finds, as its load brings them; its request has ended."""
        found = self.fill(keys, wait_ms=10_000)
        blocks = self.blocks_for(found)
        if found:
            assert self.load(keys[:found], blocks) == Retrieved(chunks=found)
        self.end_request()
        return self.chunks_in(blocks)

    def close(self) -> None:
        self.hang_up()
        self.client.close()
        self.memory.close()
        closed(self)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- requests -----------------------------------------------------------------------------

    def blocks_for(self, chunks: int, first: int = 1) -> list[int]:
        """Block ids of so many chunks, from `first` on."""
        return list(range(first, first + chunks * self.chunk_blocks))

    @property
    def named(self) -> dict[str, str]:
        """How its messages name its engine."""
        return {"instance_id": self.instance_id, "incarnation": self.incarnation, "model_name": self.model_name}

    def lookup_message(self, keys: list[bytes], request_id: str = "r", **changes: Any) -> Lookup:
        message = Lookup(
            instance_id=self.instance_id,
            incarnation=self.incarnation,
            request_id=request_id,
            chunk_blocks=self.chunk_blocks,
            keys=b"".join(keys),
            durability=self.durability,
        )
        return msgspec.structs.replace(message, **changes)

    def lookup(self, keys: list[bytes], request_id: str = "r", **changes: Any) -> int:
        return self.ask(self.lookup_message(keys, request_id, **changes), LookupReply).hit_chunks

    def fill(self, keys: list[bytes], request_id: str = "r", wait_ms: int = 5000, **changes: Any) -> int:
        """Chunks of its hit, once what L1 lacks was read from L2."""
        return self.ask(AwaitFill(self.lookup_message(keys, request_id, **changes), wait_ms), LookupReply).hit_chunks

    def description(self, **changes: Any) -> DescribeScheduler:
        """How its scheduler half describes itself."""
        return DescribeScheduler(
            **{**self.named, "variant": "", "hash_form": "bytes", "durability": self.durability, **changes}
        )

    def stats_message(self, **changes: Any) -> EngineLoad:
        """Of an engine at rest, but for the changes."""
        return EngineLoad(**{**self.named, "interval_seconds": 60, "running": 0, "waiting": 0, **changes})

    def report_message(self, payload: Payload, **changes: Any) -> ReportBlockAllocations:
        """With the next number of its notices, but for the changes."""
        fields = {**self.named, "sequence": next(self._notices), "payload": payload}
        return ReportBlockAllocations(**{**fields, **changes})

    def report(self, payload: Payload, **changes: Any) -> int:
        return self.send(self.report_message(payload, **changes))

    def end_message(self, request_id: str = "r", **changes: Any) -> EndRequest:
        """With the next number of its notices, but for the changes."""
        return EndRequest(**{**self.named, "sequence": next(self._notices), "request_id": request_id, **changes})

    def end_request(self, request_id: str = "r", **changes: Any) -> int:
        return self.send(self.end_message(request_id, **changes))

    def store_message(self, keys: list[bytes], blocks: Sequence[int], **changes: Any) -> Store:
        """A valid Store with its word armed, but for the changes."""
        return Store(**self._copy_fields(keys, blocks, changes))

    def load_message(self, keys: list[bytes], blocks: Sequence[int], skip: int = 0, **changes: Any) -> Retrieve:
        """A valid Retrieve with its word armed, but for the changes. `blocks` leaves out the skipped ones."""
        return Retrieve(**self._copy_fields(keys, blocks, changes), skip_blocks=skip)

    def _copy_fields(self, keys: list[bytes], blocks: Sequence[int], changes: dict[str, Any]) -> dict[str, Any]:
        sequence = next(self._sequences)
        word = sequence % WORDS
        self.words.arm(word, sequence)
        fields: dict[str, Any] = {
            "boot_id": self.hello.boot_id,
            "registration": self.number,
            "keys": b"".join(keys),
            "block_ids": packed(blocks),
            "chunk_blocks": self.object_blocks(changes.get("group", 0)) if self.groups else self.chunk_blocks,
            "word": word,
            "sequence": sequence,
            "deadline_ns": time.monotonic_ns() + 30 * 10**9,
            "durability": self.durability,
        }
        return {**fields, **changes}

    def store(self, keys: list[bytes], blocks: Sequence[int], **changes: Any) -> Stored:
        return self.ask(self.store_message(keys, blocks, **changes), Stored)

    def load(self, keys: list[bytes], blocks: Sequence[int], skip: int = 0, **changes: Any) -> Retrieved:
        return self.ask(self.load_message(keys, blocks, skip, **changes), Retrieved)

    def loaded(self, keys: list[bytes], **changes: Any) -> list[bytes]:
        """Load the chunks over other bytes; returns the bytes of their blocks."""
        blocks = self.blocks_for(len(keys))
        self.memory.fill()
        self.load(keys, blocks, **changes)
        return self.memory.blocks(blocks)

    def begin(self, message: Store | Retrieve) -> Operation:
        """Send without waiting for the reply."""
        return Operation(self, self.send(message), message.word, message.sequence)

    def begin_store(self, keys: list[bytes], blocks: Sequence[int], **changes: Any) -> Operation:
        return self.begin(self.store_message(keys, blocks, **changes))

    def begin_load(self, keys: list[bytes], blocks: Sequence[int], skip: int = 0, **changes: Any) -> Operation:
        return self.begin(self.load_message(keys, blocks, skip, **changes))

    def send(self, message: Request) -> int:
        number = self.client.channel.send(message)
        if number is None:  # a daemon that has just restarted is found again in a moment
            assert self.client.channel.wait_writable(5), "no connection, or its queue is full"
            number = self.client.channel.send(message)
        assert number is not None
        return number

    def reply_to(self, number: int, seconds: float = 30.0) -> Reply:
        """The reply to an earlier send(). TimeoutError if it does not come."""
        deadline = time.monotonic() + seconds
        while number not in self._replies:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no reply to request {number} within {seconds} s")
            self.client.channel.wait(0.05)
            self._replies.update(self.client.channel.receive())
        return self._replies.pop(number)

    def ask(self, message: Request, expect: type[R]) -> R:
        """The reply. RequestFailed if it is an error. Replies to earlier begin()s are kept for them."""
        reply = self.reply_to(self.send(message))
        if isinstance(reply, Error):
            raise RequestFailed(reply)
        assert isinstance(reply, expect), f"{type(message).__name__} was answered with {reply}"
        return reply

    def error_of(self, message: Request) -> Error:
        """The error that answers this message. AssertionError if something else does."""
        reply = self.reply_to(self.send(message))
        assert isinstance(reply, Error), f"{type(message).__name__} was answered with {reply}"
        return reply
