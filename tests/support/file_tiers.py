"""A file tier over a small L1, with faults below it, driven as the server's loop drives it.

`FaultyDisk` is for any test: `make_file_tier(url, region, page_bytes, disk=FaultyDisk())`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import select
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from kvserver._native import HostRegion
from kvserver.cache import PagePool
from kvserver.config import TierUrl, parse_size, parse_tiers
from kvserver.l2 import ObjectMemory, ObjectName, TierEnd, TierOutcome
from kvserver.l2.files.disk import Disk
from kvserver.l2.files.folder import data_bytes_of
from kvserver.l2.files.make import make_file_tier
from kvserver.l2.files.tier import FileTier
from support.simulators import FaultyFile

PAGE = 4096
NAMESPACE = b"n" * 32
COVERAGE = b"c" * 16
_WAIT_SECONDS = 20.0


class FaultyDisk(Disk):
    """A disk whose calls fail on demand. `file` has the faults of the threads that move records."""

    def __init__(self) -> None:
        self.file = FaultyFile()
        self.calls = self.file
        self.errors: dict[str, int] = {}  # errno by call: open, allocate, reserve, read, write, truncate, sync, replace
        self._syncs_go_on = threading.Event()
        self._syncs_go_on.set()
        self.most_written = -1  # bytes until writes fail with ENOSPC; -1: no limit

    def open(self, name: str, flags: int, folder: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            self._fail("open")
        return super().open(name, flags, folder)

    def allocate(self, fd: int, size: int) -> None:
        self._fail("allocate")
        super().allocate(fd, size)

    def reserve(self, fd: int, size: int) -> None:
        self._fail("reserve")
        super().reserve(fd, size)

    def read(self, fd: int, size: int, offset: int) -> bytes:
        self._fail("read")
        return super().read(fd, size, offset)

    def write(self, fd: int, data: bytes, offset: int) -> None:
        self._fail("write")
        if self.most_written >= 0:
            fitting = data[: self.most_written]
            self.most_written -= len(fitting)
            super().write(fd, fitting, offset)
            if len(fitting) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return
        super().write(fd, data, offset)

    def truncate(self, fd: int, size: int) -> None:
        self._fail("truncate")
        super().truncate(fd, size)

    def sync(self, fd: int) -> None:
        self._syncs_go_on.wait()
        self._fail("sync")
        super().sync(fd)

    def hang_syncs(self, hangs: bool) -> None:
        self._syncs_go_on.clear() if hangs else self._syncs_go_on.set()

    def replace(self, name: str, new_name: str, folder: int) -> None:
        self._fail("replace")
        super().replace(name, new_name, folder)

    def go_on(self) -> None:
        """End what hangs and what is full."""
        self.errors.clear()
        self.hang_syncs(False)
        self.file.hang(False)

    def exchange(self, name: str, new_name: str, folder: int) -> None:
        self._fail("replace")
        super().exchange(name, new_name, folder)

    def _fail(self, call: str) -> None:
        if number := self.errors.get(call):
            raise OSError(number, os.strerror(number))


def size_of(data_bytes: int) -> int:
    """The least `size` of a tier whose data file has so many bytes."""
    size = data_bytes
    while data_bytes_of(size) < data_bytes:
        size += PAGE
    return size


def tier_url(folder: Path, size: str, parameters: str = "") -> TierUrl:
    return parse_tiers([f"file://{folder}?size={size}{parameters}"])[0]


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def keys_of(*numbers: int) -> bytes:
    return b"".join(map(key_of, numbers))


def name_of(number: int, namespace: bytes = NAMESPACE, group: int = 0) -> ObjectName:
    return ObjectName(namespace, group, key_of(number))


@dataclass
class SmallL1:
    """Pages for objects, most of them in several extents."""

    pages: int = 512
    fragmented: bool = True
    region: HostRegion = field(init=False)

    def __post_init__(self) -> None:
        self.region = HostRegion(self.pages * PAGE)
        self._memory = (ctypes.c_char * (self.pages * PAGE)).from_address(self.region.address)
        self.pool = PagePool(self.pages * PAGE, PAGE)
        if self.fragmented:
            singles = [self.pool.allocate_pages(1) for _ in range(self.pages)]
            for page in singles[: self.pages // 2 : 2] + singles[self.pages // 2 :]:
                assert page is not None
                self.pool.free_pages(page)

    def memory(self, *slot_bytes: int, coverage: bytes = COVERAGE) -> ObjectMemory:
        slots = []
        for count in slot_bytes:
            slot = self.pool.allocate_pages(-(-count // PAGE))
            assert slot is not None, "L1 of this test is too small"
            slots.append(slot)
        return ObjectMemory(coverage, tuple(slots), slot_bytes)

    def free(self, memory: ObjectMemory) -> None:
        self.pool.free_pages(b"".join(memory.slots))

    def write(self, memory: ObjectMemory, content: bytes) -> None:
        at = 0
        for slot, count in zip(memory.slots, memory.slot_bytes, strict=True):
            for first, part in _parts(slot, count):
                self._memory[first : first + part] = content[at : at + part]
                at += part

    def read(self, memory: ObjectMemory) -> bytes:
        return b"".join(
            bytes(self._memory[first : first + part])
            for slot, count in zip(memory.slots, memory.slot_bytes, strict=True)
            for first, part in _parts(slot, count)
        )


def _parts(slot: bytes, count: int) -> Iterable[tuple[int, int]]:
    numbers = memoryview(slot).cast("I").tolist()
    for first, pages in zip(numbers[::2], numbers[1::2], strict=True):
        part = min(count, pages * PAGE)
        count -= part
        yield first * PAGE, part


class FileRig:
    """A tier whose data file has `size`, and the L1 in front of it. `content(name)` is what the object of that name is written as."""

    def __init__(
        self,
        folder: Path,
        size: str = "4MiB",
        parameters: str = "",
        disk: Disk | None = None,
        l1: SmallL1 | None = None,
    ) -> None:
        self.l1 = l1 or SmallL1()
        self.tier: FileTier = make_file_tier(
            tier_url(folder, f"{size_of(parse_size(size))}", parameters),
            self.l1.region,
            PAGE,
            disk if disk is not None else Disk(),
        )
        self._ends: dict[int, TierEnd] = {}
        self._closed = False
        self.reported: set[ObjectName] = set()  # what the tier holds, by a walk and its changes since

    def opened(self) -> FileRig:
        self.until(lambda: self.tier.state != "opening")
        return self

    def watched(self) -> FileRig:
        """`reported` is up to date from now on, if clears are the rig's."""
        self.tier.watch(self._changed)
        self.reported = self.walked()
        return self

    def walked(self) -> set[ObjectName]:
        return {
            ObjectName(namespace, group, keys[at : at + 32])
            for namespace, group, keys in self.tier.walk()
            for at in range(0, len(keys), 32)
        }

    def _changed(self, stored: bool, name: ObjectName) -> None:
        assert (name in self.reported) != stored, "a change that is none"
        assert bool(self.tier.holds(*name)) == stored
        (self.reported.add if stored else self.reported.remove)(name)

    def turn(self, seconds: float = 0.05) -> None:
        """One turn of a loop."""
        select.select([self.tier.completion_fd], [], [], seconds)
        for end in self.tier.drain():
            assert end.ticket not in self._ends, "a ticket ended twice"
            self._ends[end.ticket] = end

    def until(self, reached: object) -> None:
        assert callable(reached)
        deadline = time.monotonic() + _WAIT_SECONDS
        while not reached():
            assert time.monotonic() < deadline, "it did not happen in time"
            self.turn()

    def end(self, ticket: int) -> TierEnd:
        self.until(lambda: ticket in self._ends)
        return self._ends[ticket]

    def ended(self, ticket: int) -> bool:
        return ticket in self._ends

    def outcomes(self) -> set[TierOutcome]:
        """How tickets ended since the last call."""
        ends, self._ends = self._ends, {}
        return {end.outcome for end in ends.values()}

    def content(self, name: ObjectName, size: int, version: int = 0) -> bytes:
        return (version.to_bytes(8, "little") + random.Random(repr((name, version))).randbytes(size))[:size]

    def version_in(self, name: ObjectName, *slot_bytes: int) -> int | None:
        """The version of put() that a get returns; None for one that is missing or corrupt. REQUIRES: 8 bytes at least."""
        memory = self.l1.memory(*slot_bytes)
        end = self.end(self.tier.get(name, memory, 0))
        read = self.l1.read(memory)
        self.l1.free(memory)
        if end.outcome is not TierOutcome.DONE:
            assert end.outcome in (TierOutcome.CORRUPT, TierOutcome.MISSING), end
            return None
        version = int.from_bytes(read[:8], "little")
        assert read == self.content(name, memory.bytes, version), "WRONG BYTES"
        return version

    def begin_put(
        self, name: ObjectName, *slot_bytes: int, parent: bytes = b"", version: int = 0
    ) -> tuple[int, ObjectMemory]:
        memory = self.l1.memory(*slot_bytes)
        self.l1.write(memory, self.content(name, memory.bytes, version))
        return self.tier.put(name, memory, parent, 0), memory

    def put(self, name: ObjectName, *slot_bytes: int, parent: bytes = b"", version: int = 0) -> TierOutcome:
        ticket, memory = self.begin_put(name, *slot_bytes, parent=parent, version=version)
        end = self.end(ticket)
        self.l1.free(memory)
        return end.outcome

    def get(self, name: ObjectName, *slot_bytes: int, coverage: bytes = COVERAGE, version: int = 0) -> TierOutcome:
        """DONE only with the very bytes that put() wrote."""
        memory = self.l1.memory(*slot_bytes, coverage=coverage)
        end = self.end(self.tier.get(name, memory, 0))
        if end.outcome is TierOutcome.DONE:
            assert self.l1.read(memory) == self.content(name, memory.bytes, version), "WRONG BYTES"
        self.l1.free(memory)
        return end.outcome

    def holds(self, *numbers: int, namespace: bytes = NAMESPACE, group: int = 0) -> list[int]:
        bits = self.tier.holds(namespace, group, keys_of(*numbers))
        return [number for place, number in enumerate(numbers) if bits >> place & 1]

    def clear(self, prefix: bytes = b"") -> TierOutcome:
        ticket = self.tier.clear(prefix)
        self.reported = {name for name in self.reported if not name.namespace.startswith(prefix)}
        return self.end(ticket).outcome

    def written(self) -> FileRig:
        """All ends so far are in the journal."""
        self.until(lambda: self.tier.journaled)
        return self

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.tier.close(time.monotonic_ns() + 5_000_000_000)
