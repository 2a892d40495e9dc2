"""A test engine's worker: shared memory with awkward planes, and every request the protocol has.

Only the engine is made up. Memory, descriptors, state words, sockets and messages are real.
"""

from __future__ import annotations

import itertools
import mmap
import os
import random
import time
import uuid
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec

from kvserver._native import NO_BLOCK, State, WordPage, pack_blocks
from kvserver.protocol import (
    KEY_BYTES,
    Counted,
    CudaIpc,
    CudaVmmFabric,
    CudaVmmFd,
    DescribeScheduler,
    Error,
    HelloReply,
    Lookup,
    LookupReply,
    Plane,
    Registered,
    RegisterWorker,
    Reply,
    Request,
    Retrieve,
    Retrieved,
    SharedFd,
    Store,
    Stored,
    Unregistered,
    UnregisterWorker,
)
from kvserver.protocol import messages as protocol
from kvserver.protocol.client import Attachment, Client, RequestFailed

from .leftovers import closed, opened

R = TypeVar("R")
WORDS = 256
GpuMemory = CudaIpc | CudaVmmFd | CudaVmmFabric


def identity(**changes: str) -> tuple[Counted, ...]:
    """What a model's engines agree on, as they register it; without changes always the same."""
    values = {
        "model": "test-model@0123",
        "dtype": "bfloat16",
        "kv_dtype": "auto",
        "parallel": "tp=1,pp=1",
        "hash_algorithm": "sha256_cbor",
        **changes,
    }
    return tuple(Counted(name, digest=value, value=value) for name, value in values.items())


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


@dataclass(frozen=True)
class Geometry:
    """How a test engine's KV cache lies in memory. `sizes[i]` is the bytes of memory i."""

    num_blocks: int
    block_tokens: int
    sizes: tuple[int, ...]
    planes: tuple[Plane, ...]

    @property
    def block_bytes(self) -> int:
        return sum(plane.run_bytes for plane in self.planes)

    @property
    def groups(self) -> int:
        return 1 + max(plane.group for plane in self.planes)


def awkward(num_blocks: int = 64, block_tokens: int = 16, scale: int = 1) -> Geometry:
    """Two memories: a contiguous plane, two interleaved ones with gaps, one longer than an L1 page.

    Runs of different and odd lengths, so that nothing lines up with pages by chance.
    """
    small, stride = 192 * scale, 1000 * scale
    large = 4096 + 136 * scale
    return Geometry(
        num_blocks,
        block_tokens,
        sizes=(num_blocks * small + num_blocks * stride, 64 + num_blocks * large),
        planes=(
            Plane(0, 0, small, small),
            Plane(0, num_blocks * small + 5, stride, 333 * scale),
            Plane(0, num_blocks * small + 400 * scale, stride, 577 * scale),
            Plane(1, 64, large, large),
        ),
    )


def two_groups(num_blocks: int = 64, block_tokens: int = 16) -> Geometry:
    """A hybrid model: the planes of both groups lie over the same bytes, cut in different ways."""
    return Geometry(
        num_blocks,
        block_tokens,
        sizes=(num_blocks * 6000 + 100,),
        planes=(
            Plane(0, 7, 6000, 2500, group=0),
            Plane(0, 0, 6000, 1111, group=1),
            Plane(0, 3000, 6000, 2999, group=0),
            Plane(0, 1500, 6000, 4500, group=1),
        ),
    )


Position = int | Sequence[int]  # the block of the only group, or one of each; NO_BLOCK for none


class Piece(Protocol):
    """One memory of an engine: `view` reads and writes its bytes by slices, `fds` are handed over for it."""

    view: Any
    fds: list[int]

    def described(self, index: int) -> protocol.Memory:
        """As it is registered; its descriptor is the `index`-th."""

    def fill(self) -> None:
        """New noise everywhere."""

    def close(self) -> None: ...


class SharedMemory:
    """A memfd: a new one, or the caller's, which it takes over."""

    def __init__(self, size: int, fd: int | None = None) -> None:
        self.fds = [os.memfd_create("test-kv") if fd is None else fd]
        if fd is None:
            os.ftruncate(self.fds[0], size)
        self.view = mmap.mmap(self.fds[0], size)

    def described(self, index: int) -> protocol.Memory:
        return SharedFd(index=index, size_bytes=len(self.view))

    def fill(self) -> None:
        self.view[:] = random.randbytes(len(self.view))

    def close(self) -> None:
        self.view.close()
        while self.fds:
            os.close(self.fds.pop())


class Memory:
    """The memories of one geometry, filled with noise."""

    def __init__(self, geometry: Geometry, allocate: Callable[[int], Piece] = SharedMemory) -> None:
        self.geometry = geometry
        self.pieces = [allocate(size) for size in geometry.sizes]
        self.maps = [piece.view for piece in self.pieces]
        self.fill()

    @property
    def fds(self) -> list[int]:
        return [fd for piece in self.pieces for fd in piece.fds]

    def described(self) -> list[protocol.Memory]:
        before = itertools.accumulate((len(piece.fds) for piece in self.pieces), initial=0)
        return [piece.described(index) for piece, index in zip(self.pieces, before, strict=False)]

    def fill(self) -> None:
        """New noise everywhere, also between the planes."""
        for piece in self.pieces:
            piece.fill()

    def read(self, position: Position) -> bytes:
        """The bytes of one position over all planes; zeros where a group has no block."""
        ids = [position] if isinstance(position, int) else position
        parts = []
        for plane in self.geometry.planes:
            at = plane.offset + ids[plane.group] * plane.stride_bytes
            if ids[plane.group] == NO_BLOCK:
                parts.append(bytes(plane.run_bytes))
                continue
            parts.append(self.maps[plane.memory][at : at + plane.run_bytes])
        return b"".join(parts)

    def blocks(self, positions: Iterable[Position]) -> list[bytes]:
        return [self.read(position) for position in positions]

    def write(self, position: Position, content: bytes) -> None:
        put(self.geometry, self.maps, position, content)

    def image(self) -> list[bytes]:
        """A copy of every byte."""
        return [view[:] for view in self.maps]

    def image_with(self, contents: Mapping[Any, bytes]) -> list[bytes]:
        """What image() would be if these positions had these bytes and nothing else changed."""
        copies = [bytearray(view[:]) for view in self.maps]
        for position, content in contents.items():
            put(self.geometry, copies, position, content)
        return [bytes(copy) for copy in copies]

    def truncate(self, memory: int = 0, size: int = 0) -> None:
        """Take memory away from every process that mapped it; ours must not be read afterwards."""
        os.ftruncate(self.fds[memory], size)

    def close(self) -> None:
        """Idempotent."""
        for piece in self.pieces:
            piece.close()


def put(geometry: Geometry, maps: Sequence[Any], position: Position, content: bytes) -> None:
    """Write one position's bytes over all planes into `maps`, but for groups without a block."""
    ids = [position] if isinstance(position, int) else position
    done = 0
    for plane in geometry.planes:
        if ids[plane.group] != NO_BLOCK:
            at = plane.offset + ids[plane.group] * plane.stride_bytes
            maps[plane.memory][at : at + plane.run_bytes] = content[done : done + plane.run_bytes]
        done += plane.run_bytes


def gpu_handle(fd: int) -> bytes:
    """How a simulated GPU of another process finds this memory."""
    return f"/proc/{os.getpid()}/fd/{fd}".encode().ljust(64, b"\0")


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

    def reply(self, seconds: float = 10.0) -> Reply:
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
        self._replies: dict[int, Reply] = {}
        if self.connect_now:
            try:
                self.connect()
            except BaseException:
                self.close()
                raise

    # ---- coming and going ---------------------------------------------------------------------

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
        message = RegisterWorker(
            instance_id=self.instance_id,
            incarnation=self.incarnation,
            model_name=self.model_name,
            rank=self.rank,
            world_size=self.world_size,
            attachment=self.attachment.number,
            memory=self._gpu_memory() if self.gpu else self.memory.described(),
            words=WORDS,
            planes=list(self.geometry.planes),
            num_blocks=self.geometry.num_blocks,
            block_tokens=self.geometry.block_tokens,
            chunk_blocks=self.chunk_blocks,
            counted=self.identity,
            layout=self.layout,
            replicated=self.replicated,
        )
        return msgspec.structs.replace(message, **changes)

    def _gpu_memory(self) -> list[GpuMemory]:
        return [self.window(i, 0, size) for i, size in enumerate(self.geometry.sizes)]

    def window(self, number: int, offset: int, size: int) -> GpuMemory:
        """So many bytes of memory `number`, as it is registered. REQUIRES: on a GPU."""
        if self.handles is CudaVmmFd:
            return CudaVmmFd(device=self.gpu, index=number, offset=offset, size_bytes=size)
        return self.handles(device=self.gpu, handle=gpu_handle(self.memory.fds[number]), offset=offset, size_bytes=size)

    @property
    def chunk_blocks(self) -> int:
        return max(1, self.hello.chunk_tokens // self.geometry.block_tokens)

    @property
    def chunk_bytes(self) -> int:
        return self.chunk_blocks * self.geometry.block_bytes

    @property
    def number(self) -> int:
        """Its registration number."""
        assert self.registered is not None
        return self.registered.registration

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

    def lookup(self, keys: list[bytes], request_id: str = "r", **changes: Any) -> int:
        message = Lookup(
            instance_id=self.instance_id,
            incarnation=self.incarnation,
            request_id=request_id,
            chunk_blocks=self.chunk_blocks,
            keys=b"".join(keys),
        )
        return self.ask(msgspec.structs.replace(message, **changes), LookupReply).hit_chunks

    def description(self, **changes: Any) -> DescribeScheduler:
        """How its scheduler half describes itself."""
        fields = {"instance_id": self.instance_id, "incarnation": self.incarnation, "model_name": self.model_name}
        return DescribeScheduler(**{**fields, "variant": "", "hash_form": "bytes", **changes})

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
            "chunk_blocks": self.chunk_blocks,
            "word": word,
            "sequence": sequence,
            "deadline_ns": time.monotonic_ns() + 30 * 10**9,
        }
        return {**fields, **changes}

    def store(self, keys: list[bytes], blocks: Sequence[int], **changes: Any) -> Stored:
        return self.ask(self.store_message(keys, blocks, **changes), Stored)

    def load(self, keys: list[bytes], blocks: Sequence[int], skip: int = 0, **changes: Any) -> Retrieved:
        return self.ask(self.load_message(keys, blocks, skip, **changes), Retrieved)

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

    def reply_to(self, number: int, seconds: float = 10.0) -> Reply:
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
