"""A daemon process and a worker for benchmarks: real sockets, real shared memory."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from array import array
from collections.abc import Sequence
from pathlib import Path

import zmq
from msgspec import structs

from kvserver._native import State, WordPage, pack_blocks
from kvserver.protocol import (
    KEY_BYTES,
    ChunkContents,
    Counted,
    DescribeScheduler,
    Durability,
    EndRequest,
    Lookup,
    LookupReply,
    Memory,
    ObjectGroup,
    Plane,
    Registered,
    RegisterWorker,
    Retrieve,
    Retrieved,
    SharedFd,
    Store,
    Stored,
)
from kvserver.protocol.client import Attachment, Client

_IDENTITY = (Counted("model", "bench"),)


class BenchDaemon:
    """`kvserver serve` with these flags, or `program` with them; `seconds_to_ready` from its start to its line."""

    def __init__(self, program: Sequence[str] = (), **flags: object) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="kvb-")
        self.endpoint = f"ipc://{self.folder.name}/k.sock"
        program = program or (str(Path(sys.executable).with_name("kvserver")),)
        words = [*program, "serve", "--endpoint", self.endpoint]
        for name, value in ({"http_port": 0, "log_level": "warning"} | flags).items():
            words += ["--" + name.replace("_", "-"), str(value)]
        began = time.perf_counter()
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert " ready: " in line, line
        self.seconds_to_ready = time.perf_counter() - began
        self.http_port = int(line.split("http://")[1].split(",")[0].rpartition(":")[2])

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(20)
        self.folder.cleanup()


def shared_memory(size: int) -> tuple[int, SharedFd]:
    """Noise."""
    fd = os.memfd_create("bench-kv")
    os.ftruncate(fd, size)
    piece = os.urandom(1 << 20)
    for offset in range(0, size, len(piece)):
        os.pwrite(fd, piece[: size - offset], offset)
    return fd, SharedFd(index=0, size_bytes=size)


class BenchWorker:
    """One rank of one instance: `planes` planes of `run` bytes for each of `num_blocks` blocks, touched.

    They lie in shared memory of its own, or in `memory`: what hands it over, and as what it is registered. With `groups`
    each KV cache group has `planes` planes, over the same memory.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        planes: int,
        run: int,
        num_blocks: int,
        block_tokens: int,
        instance_id: str = "",
        rank: int = 0,
        world_size: int = 1,
        incarnation: str = "bench",
        request_id: str = "bench",
        variant: str = "",
        memory: tuple[int, Memory] | None = None,
        groups: tuple[ObjectGroup, ...] = (),
        words: int = 1,
        private: str = "",
    ) -> None:
        self.client = Client(endpoint, timeout=120)
        self.instance_id = instance_id or uuid.uuid4().hex
        self.incarnation = incarnation
        self.request_id, self.variant = request_id, variant
        hello = self.client.hello("bench")
        self.chunk_blocks = max(1, hello.chunk_tokens // block_tokens)
        self.groups = groups or (ObjectGroup("full", (0,), block_tokens),)
        fd, described = memory or shared_memory(planes * run * num_blocks)
        self.words = WordPage(words)
        self._attachment = Attachment(hello.fd_path, hello.token, [fd, self.words.fd])
        if memory is None:
            os.close(fd)
        self.boot_id = hello.boot_id
        self.registration = self.client.ask(
            RegisterWorker(
                instance_id=self.instance_id,
                incarnation=incarnation,
                model_name="bench",
                rank=rank,
                world_size=world_size,
                attachment=self._attachment.number,
                memory=[described],
                words=words,
                planes=[
                    Plane(0, p * num_blocks * run, run, run, member)
                    for group in self.groups
                    for member in group.members
                    for p in range(planes)
                ],
                num_blocks=num_blocks,
                block_tokens=block_tokens,
                chunk_blocks=self.chunk_blocks,
                counted=_IDENTITY,
                groups=self.groups,
                private=private,
            ),
            Registered,
        ).registration
        self._sequence = self._notices = 0

    def copy_message(
        self, keys: bytes, block_ids: array[int], request: type[Store] | type[Retrieve], group: int = 0, word: int = 0
    ) -> Store | Retrieve:
        """Arms the state word. REQUIRES: no copy under way uses it."""
        self._sequence += 1
        self.words.arm(word, self._sequence)
        return request(
            boot_id=self.boot_id,
            registration=self.registration,
            chunk_blocks=self.groups[group].object_blocks(self.chunk_blocks * self.groups[0].block_tokens),
            keys=keys,
            block_ids=pack_blocks(block_ids.tolist()),
            word=word,
            sequence=self._sequence,
            deadline_ns=time.monotonic_ns() + 120 * 10**9,
            variant=self.variant,
            group=group,
            durability=Durability.ANYWHERE,
        )

    def store(self, keys: bytes, block_ids: array[int], group: int = 0, contents: ChunkContents | None = None) -> None:
        """Returns when the objects are READY, if all other ranks have stored them."""
        message = structs.replace(self.copy_message(keys, block_ids, Store, group), contents=contents)
        reply = self.client.ask(message, Stored)
        assert reply.stored == len(keys) // KEY_BYTES, f"not all was copied: {reply}"

    def load(self, keys: bytes, block_ids: array[int]) -> None:
        """Returns when the state word is DONE, as the adapter does, and the reply has arrived."""
        self.client.ask(self.copy_message(keys, block_ids, Retrieve), Retrieved)
        assert self.words.state(0) == State.DONE

    def lookup_message(self, keys: bytes, request_id: str = "") -> Lookup:
        return Lookup(
            instance_id=self.instance_id,
            incarnation=self.incarnation,
            request_id=request_id or self.request_id,
            chunk_blocks=self.chunk_blocks,
            keys=keys,
            variant=self.variant,
            durability=Durability.ANYWHERE,
        )

    def lookup(self, keys: bytes) -> int:
        return self.client.ask(self.lookup_message(keys), LookupReply).hit_chunks

    def describe_scheduler(self) -> None:
        """From now on its stores' contents are published; nothing answers."""
        assert self.client.channel.send(
            DescribeScheduler(
                instance_id=self.instance_id, incarnation=self.incarnation, model_name="bench", variant=self.variant
            )
        )

    def end_message(self, request_id: str = "") -> EndRequest:
        self._notices += 1
        return EndRequest(
            instance_id=self.instance_id,
            incarnation=self.incarnation,
            model_name="bench",
            sequence=self._notices - 1,
            request_id=request_id or self.request_id,
        )

    def end_request(self) -> None:
        """The lookup's lease ends; nothing answers."""
        assert self.client.channel.send(self.end_message())


class CountingRelay:
    """Relays between one client and a server on sockets of its own, and counts what the client sends."""

    def __init__(self, endpoint: str, folder: str) -> None:
        self.endpoint = f"ipc://{folder}/{uuid.uuid4().hex[:8]}"
        self.messages = self.payload_bytes = 0
        self._context = zmq.Context()
        self._client, self._server = self._context.socket(zmq.ROUTER), self._context.socket(zmq.DEALER)
        self._client.bind(self.endpoint)
        self._server.connect(endpoint)
        self._peer = b""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._client, zmq.POLLIN)
        poller.register(self._server, zmq.POLLIN)
        while not self._stop.is_set():
            for socket, _ in poller.poll(100):
                if socket is self._client:
                    self._peer, *frames = self._client.recv_multipart()
                    self.messages += 1
                    self.payload_bytes += sum(len(frame) for frame in frames)
                    self._server.send_multipart(frames)
                else:
                    self._client.send_multipart([self._peer, *self._server.recv_multipart()])

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)


def rss_bytes(pid: int) -> int:
    """Resident memory, shared pages included."""
    text = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("VmRSS:"))


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def idle_cpu(pid: int, seconds: float = 3.0) -> float:
    """Share of one core that a process takes while it gets no request."""
    began, before = time.monotonic(), cpu_seconds(pid)
    time.sleep(seconds)
    return (cpu_seconds(pid) - before) / (time.monotonic() - began)


def make_keys(name: str, count: int) -> bytes:
    return b"".join(hashlib.sha256(f"{name} {n}".encode()).digest() for n in range(count))
