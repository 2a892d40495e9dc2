"""L1's memory without a cache: what tests of tiers write objects from and read them into."""

from __future__ import annotations

import ctypes
import os
import random
import select
import struct
import time
from collections.abc import Sequence

from kvserver._native import HostRegion
from kvserver.l2 import COVERAGE_BYTES, ObjectMemory, ObjectName, StorageTier, TierEnd
from kvserver.protocol import KEY_BYTES

PAGE = 4096
NAMESPACE = b"n" * 32
COVERAGE = b"c" * COVERAGE_BYTES


def key(number: int) -> bytes:
    return random.Random(number).randbytes(KEY_BYTES)


def keys(*numbers: int) -> bytes:
    return b"".join(map(key, numbers))


def name(number: int = 0, group: int = 0, namespace: bytes = NAMESPACE) -> ObjectName:
    return ObjectName(namespace, group, key(number))


class L1Memory:
    """Pages of random bytes, which are allocated from the front, each slot in pieces that do not touch."""

    def __init__(self, pages: int = 1024) -> None:
        self.region = HostRegion(pages * PAGE)
        self._memory = (ctypes.c_char * (pages * PAGE)).from_address(self.region.address)
        self._memory.raw = os.urandom(pages * PAGE)
        self._free = 0

    def object(self, *slot_bytes: int, coverage: bytes = COVERAGE, whole: bool = False) -> ObjectMemory:
        """Memory for an object with these slots; the content is random. `whole`: each slot is one extent."""
        slots = tuple(self._slot(-(-count // PAGE), whole) for count in slot_bytes)
        return ObjectMemory(coverage, slots, slot_bytes)

    def read(self, memory: ObjectMemory) -> list[bytes]:
        """The bytes that count, of each slot."""
        found = []
        for slot, count in zip(memory.slots, memory.slot_bytes, strict=True):
            parts = [self._memory[first * PAGE : (first + n) * PAGE] for first, n in struct.iter_unpack("=II", slot)]
            found.append(b"".join(parts)[:count])
        return found

    def _slot(self, pages: int, whole: bool) -> bytes:
        extents = [(self._free, pages)]
        if not whole and pages > 1:
            extents = [(self._free + pages // 2 + 1, pages - pages // 2), (self._free, pages // 2)]
        self._free += pages + 1
        return b"".join(struct.pack("=II", *extent) for extent in extents)


def within(seconds: float) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)


class Ends:
    """Waits for ends of a tier as the server's loop does: by its descriptor."""

    def __init__(self, tier: StorageTier) -> None:
        self._tier = tier
        self._found: dict[int, TierEnd] = {}

    def of(self, ticket: int, seconds: float = 30.0) -> TierEnd:
        deadline = time.monotonic() + seconds
        while ticket not in self._found:
            left = deadline - time.monotonic()
            assert left > 0, f"ticket {ticket} does not end"
            select.select([self._tier.completion_fd], [], [], min(left, 0.05))
            self._tier.tick(time.monotonic_ns())
            self.drain()
        return self._found[ticket]

    def all(self, tickets: Sequence[int], seconds: float = 30.0) -> list[TierEnd]:
        return [self.of(ticket, seconds) for ticket in tickets]

    def drain(self) -> None:
        for end in self._tier.drain():
            assert end.ticket not in self._found, "a ticket ended twice"
            self._found[end.ticket] = end

    def until(self, state: str, seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while self._tier.state != state:
            assert time.monotonic() < deadline, f"{self._tier.state}: {self._tier.failure}"
            select.select([self._tier.completion_fd], [], [], 0.05)
            self._tier.tick(time.monotonic_ns())
            self.drain()
