"""A tier of L2 that is a dict of this process: what a test can see into, hold up and make fail."""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvserver._native import HostRegion
from kvserver.cache.pages import extents
from kvserver.config import parse_tiers
from kvserver.l2 import ObjectMemory, ObjectName, TierEnd, TierOutcome
from kvserver.l2.base import State
from kvserver.protocol import KEY_BYTES
from kvserver.protocol.status import TierStatus
from kvserver.tiering import ConfiguredTier


@dataclass
class Begun:
    """A put or get that has begun; `run` moves the bytes and returns how it ends."""

    ticket: int
    kind: str
    name: ObjectName
    run: Callable[[], TierEnd]


class PlainTier:
    """REQUIRES: the server's loop calls it, but for the fields and methods of the first part.

    While `stopped`, what begins waits until release(), what is `kept_waiting` longer. `fail`: how puts and gets of a key end, once each.
    """

    def __init__(self, region: HostRegion, page_bytes: int, name: str = "plain", shared: bool = False) -> None:
        self.name, self.kind, self.url, self.shared = name, "plain", f"plain://{name}", shared
        self.objects: dict[ObjectName, tuple[bytes, bytes]] = {}  # coverage and bytes, the oldest first
        self.known: set[ObjectName] | None = None  # of a shared tier: what holds() knows; None: all
        self.stopped = False
        self.hangs = False  # what waits cannot be cancelled
        self.kept_waiting: set[bytes] = set()  # keys whose puts and gets wait
        self.fail: dict[bytes, TierOutcome] = {}
        self.began: list[tuple[str, ObjectName]] = []
        self.cleared: list[bytes] = []
        self.clear_ends = TierEnd(0, TierOutcome.DONE)
        self.parents: dict[ObjectName, bytes] = {}
        self.state: State = "ready"
        self.failure = ""
        self.closed = False
        self.waiting: list[Begun] = []
        self._region, self._page_bytes = region, page_bytes
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._fd)
        self._ends: list[TierEnd] = []
        self._tickets = 0

    def configured(self, parameters: str = "") -> ConfiguredTier:
        (url,) = parse_tiers([f"file:///{self.name}?size=1GiB{parameters}"])
        return ConfiguredTier(self, url)

    def release(self) -> None:
        """The loop's thread runs what waits."""
        self.stopped = False
        os.eventfd_write(self._fd, 1)

    # ---- the contract -------------------------------------------------------------------------

    @property
    def completion_fd(self) -> int:
        return self._fd

    def holds(self, namespace: bytes, group: int, keys: bytes) -> int:
        if self.state not in ("ready", "read_only"):
            return 0
        names = [ObjectName(namespace, group, keys[at : at + KEY_BYTES]) for at in range(0, len(keys), KEY_BYTES)]
        known = self.objects.keys() if self.known is None else self.known & self.objects.keys()
        return sum(1 << place for place, name in enumerate(names) if name in known)

    def probe(
        self, namespace: bytes, group: int, keys: bytes, chain: bool, deadline_ns: int, again: bool = False
    ) -> int:
        def run() -> TierEnd:
            names = {ObjectName(namespace, group, keys[at : at + KEY_BYTES]) for at in range(0, len(keys), KEY_BYTES)}
            if self.known is not None:
                self.known |= names & self.objects.keys()
            return TierEnd(ticket, TierOutcome.DONE)

        ticket = self._begin("probe", ObjectName(namespace, group, keys[:KEY_BYTES]), run)
        return ticket

    def put(self, name: ObjectName, memory: ObjectMemory, parent: bytes, deadline_ns: int) -> int:
        def run() -> TierEnd:
            if outcome := self.fail.pop(name.key, None):
                return TierEnd(ticket, outcome)
            raw = b"".join(self._read(slot, size) for slot, size in zip(memory.slots, memory.slot_bytes, strict=True))
            self.objects[name] = (memory.coverage, raw)
            self.parents[name] = parent
            return TierEnd(ticket, TierOutcome.DONE, len(raw))

        ticket = self._begin("put", name, run)
        return ticket

    def get(self, name: ObjectName, memory: ObjectMemory, deadline_ns: int) -> int:
        def run() -> TierEnd:
            if outcome := self.fail.pop(name.key, None):
                for slot, size in zip(memory.slots, memory.slot_bytes, strict=True):
                    self._write(slot, b"\xee" * size)  # a get that fails may have written anything
                return TierEnd(ticket, outcome)
            coverage, raw = self.objects.get(name, (b"", b""))
            if coverage != memory.coverage:
                return TierEnd(ticket, TierOutcome.CORRUPT if coverage else TierOutcome.MISSING)
            at = 0
            for slot, size in zip(memory.slots, memory.slot_bytes, strict=True):
                self._write(slot, raw[at : at + size])
                at += size
            return TierEnd(ticket, TierOutcome.DONE, len(raw))

        ticket = self._begin("get", name, run)
        return ticket

    def touch(self, namespace: bytes, group: int, keys: bytes) -> None:
        for at in reversed(range(0, len(keys), KEY_BYTES)):
            name = ObjectName(namespace, group, keys[at : at + KEY_BYTES])
            if name in self.objects:
                self.objects[name] = self.objects.pop(name)

    def drop(self, namespace: bytes, group: int, keys: bytes) -> None:
        for at in range(0, len(keys), KEY_BYTES):
            self.objects.pop(ObjectName(namespace, group, keys[at : at + KEY_BYTES]), None)

    def clear(self, prefix: bytes) -> int:
        self.cleared.append(prefix)
        for name in [name for name in self.objects if name.namespace.startswith(prefix)]:
            del self.objects[name]
        for begun in [begun for begun in self.waiting if begun.name.namespace.startswith(prefix)]:
            self.cancel(begun.ticket)
        return self._end(replace(self.clear_ends, ticket=self._number()))

    def cancel(self, ticket: int) -> None:
        for begun in [begun for begun in self.waiting if begun.ticket == ticket and not self.hangs]:
            self.waiting.remove(begun)
            self._end(TierEnd(ticket, TierOutcome.CANCELLED))

    def drain(self) -> Sequence[TierEnd]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        if not self.stopped:
            for begun in [begun for begun in self.waiting if begun.name.key not in self.kept_waiting]:
                self._run(begun)
        ends, self._ends = self._ends, []
        return ends

    def tick(self, now_ns: int) -> None:
        pass

    def status(self) -> TierStatus:
        return TierStatus(name=self.name, kind=self.kind, url=self.url, state=self.state, objects=len(self.objects))

    def close(self, deadline_ns: int) -> None:
        for begun in self.waiting[:]:
            self.cancel(begun.ticket)
        self.closed = True

    # ---- inside -------------------------------------------------------------------------------

    def _begin(self, kind: str, name: ObjectName, run: Callable[[], TierEnd]) -> int:
        self.began.append((kind, name))
        begun = Begun(self._number(), kind, name, run)
        self.waiting.append(begun)
        os.eventfd_write(self._fd, 1)  # drain() runs it
        return begun.ticket

    def _number(self) -> int:
        self._tickets += 1
        return self._tickets

    def _end(self, end: TierEnd) -> int:
        self._ends.append(end)
        os.eventfd_write(self._fd, 1)
        return end.ticket

    def _run(self, begun: Begun) -> None:
        self.waiting.remove(begun)
        self._end(begun.run())

    def _read(self, slot: bytes, size: int) -> bytes:
        raw = b"".join(
            ctypes.string_at(self._region.address + first * self._page_bytes, count * self._page_bytes)
            for first, count in extents(slot)
        )
        return raw[:size]

    def _write(self, slot: bytes, raw: bytes) -> None:
        for first, count in extents(slot):
            part, raw = raw[: count * self._page_bytes], raw[count * self._page_bytes :]
            ctypes.memmove(self._region.address + first * self._page_bytes, part, len(part))
