"""A daemon of its own, and a made-up engine beside it: real sockets, real shared memory, no model."""

from __future__ import annotations

import hashlib
import os
import select
import subprocess
import sys
import tempfile
import time
import uuid
from array import array
from collections.abc import Sequence

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
_READY_SECONDS = 60.0  # a large L1 takes its time


class BenchDaemon:
    """`kvserver serve` with these flags, or `program` with them; `seconds_to_ready` from its start to its line.

    Settings in this process's environment do not count: they may name what a running daemon uses, such as a folder of L2. The
    daemon runs in the root folder, so that an installed package imports no sources of the present folder. REQUIRES: paths are
    absolute.
    """

    def __init__(self, program: Sequence[str] = (), **flags: object) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="kvb-")
        self.endpoint = f"ipc://{self.folder.name}/k.sock"
        words = [*(program or (sys.executable, "-m", "kvserver")), "serve", "--endpoint", self.endpoint]
        for name, value in ({"http_port": 0, "log_level": "warning"} | flags).items():
            words += ["--" + name.replace("_", "-"), str(value)]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("KVSERVER_")}
        began = time.perf_counter()
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environ, cwd="/")
        try:
            self.http_port = self._port()
        except BaseException:
            self.close()
            raise
        self.seconds_to_ready = time.perf_counter() - began

    def _port(self) -> int:
        """Waits for the daemon's line. RuntimeError if it has ended, or there is none in time."""
        output = self.process.stdout
        assert output is not None
        line = output.readline() if select.select([output], [], [], _READY_SECONDS)[0] else ""
        if " ready: " not in line:
            raise RuntimeError(f"a daemon did not start within {_READY_SECONDS:.0f} s: {line.strip()}")
        return int(line.split("http://")[1].split(",")[0].rpartition(":")[2])

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
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
    """A rank of an instance: `planes` planes of `run` bytes for each of `num_blocks` blocks, touched.

    The planes lie in shared memory of its own, or in `memory`, which hands it over and states how to register it. With `groups`
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
        """Describe the scheduler, so that its stores' contents are published; nothing answers."""
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


def make_keys(name: str, count: int) -> bytes:
    return b"".join(hashlib.sha256(f"{name} {n}".encode()).digest() for n in range(count))
