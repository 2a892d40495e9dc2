"""A tier of L2 beside a plain loop over the same storage with a checksum of the same bytes.

A tier in files is measured in the configured folder, or in a folder of its own beside it. A tier in a shared store is measured
under names of its own, which are deleted at the end. Owns: both loops. Refuses to know: what is normal.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import secrets
import select
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from kvserver._native import HostRegion, checksum
from kvserver.bench.timing import Buffer
from kvserver.cache import PagePool
from kvserver.config import TierUrl
from kvserver.l2 import (
    COVERAGE_BYTES,
    FILE_THREADS,
    LANES,
    FileTier,
    LaneBuffer,
    ObjectMemory,
    ObjectName,
    StoreError,
    TierEnd,
    TierOutcome,
    make_tier,
    store_of,
    why_not_served,
)
from kvserver.protocol import KEY_BYTES

OBJECT_BYTES = 2 << 20
NAMESPACE = hashlib.sha256(b"kvserver bench").digest()  # one for all runs: a store keeps an id of each for ever
PAGE = 4096
_PIECE_BYTES = 1 << 20  # of one call, as the tier's
_AT_ONCE = {"put": 16, "get": 32}
_OPEN_SECONDS = 20.0
_DELETE_SECONDS = 10.0
_TICKET_SECONDS = 30.0


class StorageFailed(Exception):
    """Storage that cannot be measured; the message states why, without secrets."""


class Mover(Protocol):
    """Writes fresh objects and reads them; each in GB/s."""

    def put(self) -> float: ...
    def get(self) -> float: ...
    def close(self) -> None: ...


@contextlib.contextmanager
def opened(url: TierUrl, count: int) -> Iterator[tuple[str, Mover, Mover]]:
    """(what the loop is, the loop, the tier), of `count` objects. StorageFailed if the storage cannot be used."""
    with contextlib.ExitStack() as stack:
        try:
            if url.kind == "file":
                folder = stack.enter_context(_folder_beside(Path(url.path)))
                size = f"{3 * count * OBJECT_BYTES >> 20}MiB"
                url = replace(url, path=f"{folder}/tier", own=url.own | {"size": size}, read_only=False)
            if url.read_only:
                raise StorageFailed("it is configured read-only: nothing may be written to it")
            if url.kind != "file" and (reason := why_not_served(url)):
                raise StorageFailed(reason)
            tier = stack.enter_context(contextlib.closing(TierMover(url, count)))
            if url.kind == "file":
                what = f"{FILE_THREADS} threads that write or read and hash{' by O_DIRECT' * tier.direct}"
                loop: Mover = PlainFiles(folder / "plain", count, tier.direct)
            else:
                what, loop = f"{LANES[url.kind]} plain clients that hash", PlainClients(url, count)
            stack.enter_context(contextlib.closing(loop))
            yield what, loop, tier
        except (OSError, StoreError) as error:
            raise StorageFailed(str(error)) from None


@contextlib.contextmanager
def _folder_beside(path: Path) -> Iterator[Path]:
    """A new folder in the nearest one of `path` and its parents in which there may be one: on the same file system."""
    near = next(one for one in (path, *path.parents) if os.access(one, os.W_OK | os.X_OK) and one.is_dir())
    if path.exists() and near.stat().st_dev != path.stat().st_dev:
        raise StorageFailed(f"{path} is not writable, nor is a folder above it on the same file system")
    with tempfile.TemporaryDirectory(prefix="kvserver-bench-", dir=near) as name:
        yield Path(name)


class TierMover:
    """The tier as the daemon's loop uses it, over an L1 of its own."""

    def __init__(self, url: TierUrl, count: int, object_bytes: int = OBJECT_BYTES) -> None:
        pages = count * object_bytes // PAGE
        self._region = HostRegion(pages * PAGE)
        noise = os.urandom(1 << 20)
        for at in range(0, self._region.size, len(noise)):
            ctypes.memmove(self._region.address + at, noise, min(len(noise), self._region.size - at))
        pool = PagePool(pages * PAGE, PAGE)
        slots = [pool.allocate_pages(object_bytes // PAGE) for _ in range(count)]
        coverage = bytes(COVERAGE_BYTES)
        self._memories = [ObjectMemory(coverage, (slot,), (object_bytes,)) for slot in slots if slot is not None]
        self._run_key, self._first, self._bytes = secrets.token_bytes(KEY_BYTES - 8), 0, count * object_bytes
        self._tier = make_tier(url, self._region, PAGE)
        try:
            self._wait_until_open()
        except BaseException:
            self.close()
            raise

    @property
    def direct(self) -> bool:
        return isinstance(self._tier, FileTier) and self._tier.direct

    def put(self) -> float:
        self._first += len(self._memories)
        self._run("probe", iter([partial(self._probe, self._keys(self._first))]))  # as a lookup does
        return self._run("put", (partial(self._put, *each) for each in self._numbered()))

    def get(self) -> float:
        return self._run("get", (partial(self._get, *each) for each in self._numbered()))

    def close(self) -> None:
        if self._tier.state == "ready" and self._tier.shared:
            deadline = time.monotonic() + _DELETE_SECONDS
            for first in range(0, self._first + 1, len(self._memories)):
                while self._has_some(self._keys(first)) and time.monotonic() < deadline:
                    self._tier.drop(NAMESPACE, 0, self._keys(first))
        self._tier.close(time.monotonic_ns() + 5 * 10**9)

    def _has_some(self, keys: bytes) -> bool:
        """True if the store itself answers that it has some of the keys; memory does not count."""
        self._tier.drop(NAMESPACE, 0, keys)
        with contextlib.suppress(StorageFailed):
            self._run("probe", iter([partial(self._probe, keys)]))
            return self._tier.holds(NAMESPACE, 0, keys) != 0
        return False

    def _probe(self, keys: bytes) -> int:
        return self._tier.probe(NAMESPACE, 0, keys, False, _deadline_ns())

    def _put(self, number: int, memory: ObjectMemory) -> int:
        return self._tier.put(self._name(number), memory, b"", _deadline_ns())

    def _get(self, number: int, memory: ObjectMemory) -> int:
        return self._tier.get(self._name(number), memory, _deadline_ns())

    def _numbered(self) -> Iterator[tuple[int, ObjectMemory]]:
        return enumerate(self._memories, self._first)

    def _name(self, number: int) -> ObjectName:
        return ObjectName(NAMESPACE, 0, self._run_key + number.to_bytes(8, "big"))

    def _keys(self, first: int) -> bytes:
        return b"".join(self._name(number).key for number in range(first, first + len(self._memories)))

    def _wait_until_open(self) -> None:
        deadline = time.monotonic() + _OPEN_SECONDS
        while self._tier.state != "ready":
            if self._tier.state == "closed" or time.monotonic() > deadline:
                raise StorageFailed(f"it is {self._tier.state}: {self._tier.failure or 'it did not open in time'}")
            self._drained()
            self._tier.tick(time.monotonic_ns())

    def _drained(self) -> list[TierEnd]:
        select.select([self._tier.completion_fd], [], [], 0.05)
        return list(self._tier.drain())

    def _run(self, what: str, begins: Iterator[Callable[[], int]]) -> float:
        """GB/s. StorageFailed if one does not end as done."""
        waiting, under_way = deque(begins), set[int]()
        began = time.perf_counter()
        while waiting or under_way:
            while waiting and len(under_way) < _AT_ONCE.get(what, 1):
                under_way.add(waiting.popleft()())
            for end in self._drained():
                under_way.discard(end.ticket)
                if end.outcome is not TierOutcome.DONE:
                    raise StorageFailed(f"a {what} ended as {end.outcome.value} {end.what}".strip())
        return self._bytes / (time.perf_counter() - began) / 1e9


class PlainFiles:
    """Threads that call pread or pwrite, and the checksum."""

    def __init__(self, path: Path, count: int, direct: bool, object_bytes: int = OBJECT_BYTES) -> None:
        self._size, self._count, self._bytes = object_bytes, count, object_bytes + PAGE  # with a header, as a record
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0), 0o600)
        os.posix_fallocate(self._fd, 0, self._bytes * count)
        memory = memoryview(Buffer(self._bytes * count).memory)  # in large pages, as L1
        self._buffers = [memory[at : at + self._bytes] for at in range(0, self._bytes * count, self._bytes)]
        for buffer in self._buffers:
            buffer[:] = os.urandom(PAGE) * (self._bytes // PAGE)

    def put(self) -> float:
        return self._run(True)

    def get(self) -> float:
        return self._run(False)

    def close(self) -> None:
        os.close(self._fd)

    def _run(self, put: bool) -> float:
        call = os.pwritev if put else os.preadv

        def move(number: int) -> None:
            buffer = self._buffers[number]
            if put:
                checksum(buffer)
            for at in range(0, self._bytes, _PIECE_BYTES):
                call(self._fd, [buffer[at : at + _PIECE_BYTES]], number * self._bytes + at)
            if not put:
                checksum(buffer)

        return self._size * self._count / _seconds_of(move, self._count, FILE_THREADS) / 1e9


class PlainClients:
    """Threads that call the store's client and the checksum, as many as the tier has lanes."""

    def __init__(self, url: TierUrl, count: int, object_bytes: int = OBJECT_BYTES) -> None:
        prefix, connect = store_of(url)
        buffers = [LaneBuffer() for _ in range(LANES[url.kind])]
        self._views = [buffer.views([object_bytes])[0] for buffer in buffers]
        for view in self._views:
            view[:] = os.urandom(object_bytes)
        self._clients = [connect(buffer) for buffer in buffers]
        self._prefix, self._names, self._size = f"{prefix}/bench/{secrets.token_hex(8)}", list[str](), object_bytes
        self._count, self._rounds = count, 0

    def put(self) -> float:
        self._delete()
        self._rounds += 1
        self._names = [f"{self._prefix}/{self._rounds}-{number}" for number in range(self._count)]
        return self._run(True)

    def get(self) -> float:
        return self._run(False)

    def close(self) -> None:
        self._delete()
        for client in self._clients:
            client.close()

    def _delete(self) -> None:
        for name in self._names:
            self._clients[0].delete([name])

    def _run(self, put: bool) -> float:
        free = list(zip(self._clients, self._views, strict=True))

        def move(number: int) -> None:
            client, view = pair = free.pop()  # as many threads as clients
            if put:
                checksum(view)
                answer: object = client.put([self._names[number]], [view])[0]
            else:
                answer = client.get([self._names[number]], [view])[0] or StoreError("it has lost an object")
                checksum(view)
            free.append(pair)
            if isinstance(answer, StoreError):
                raise answer

        return self._size * self._count / _seconds_of(move, self._count, len(self._clients)) / 1e9


def _seconds_of(move: Callable[[int], None], count: int, threads: int) -> float:
    """Seconds until all numbers were moved. The first error of a thread is raised here."""
    errors: list[Exception] = []

    def work(first: int) -> None:
        try:
            for number in range(first, count, threads):
                move(number)
        except Exception as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=(first,), daemon=True) for first in range(threads)]
    began = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    return time.perf_counter() - began


def _deadline_ns() -> int:
    return time.monotonic_ns() + int(_TICKET_SECONDS * 1e9)
