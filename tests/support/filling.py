"""The daemon's parts over tiers that are a dict, and an engine whose prompts are read from them into L1."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from kvserver._native import CpuDevice, HostRegion
from kvserver.copy import Devices
from kvserver.l2 import ObjectName
from kvserver.protocol import AwaitFill, LookupReply, ObjectGroup
from kvserver.protocol.status import RequestsStatus
from kvserver.server import Audit
from kvserver.snapshots import instances_status
from kvserver.tiering import ConfiguredTier
from support.daemon import wait_until
from support.plain_tier import PlainTier
from support.server import L1_BYTES, PAGE_BYTES, Running, running_server
from support.worker import Worker


class Filling(NamedTuple):
    running: Running
    tier: PlainTier
    worker: Worker

    def store(self, keys: list[bytes], **changes: Any) -> list[bytes]:
        """Store the chunks, 15 at most; returns the bytes of their blocks."""
        blocks = self.worker.blocks_for(len(keys))
        content = self.worker.memory.blocks(blocks)
        self.worker.store(keys, blocks, **changes)
        return content

    def write(self, keys: list[bytes]) -> list[bytes]:
        """Store the chunks, 15 at a time, until the tier has them; returns the bytes of their blocks."""
        content = []
        for first in range(0, len(keys), 15):
            content += self.store(part := keys[first : first + 15])
            self.written(part)
        return content

    def only_in_l2(self, keys: list[bytes]) -> list[bytes]:
        """Store chunks that the tier then has and L1 lacks; returns the bytes of their blocks."""
        content = self.write(keys)
        self.forget_l1()
        return content

    def written(self, keys: list[bytes]) -> None:
        wait_until(lambda: {name.key for name in self.tier.objects} >= set(keys))
        wait_until(lambda: not self.running.call(lambda: self.running.parts.storage.spill.puts))

    def forget_l1(self) -> None:
        """As a restart of the daemon would."""
        cache = self.running.parts.cache
        self.running.call(cache.clear_namespaces)

    def lookup(self, keys: list[bytes], request_id: str = "r") -> LookupReply:
        return self.worker.ask(self.worker.lookup_message(keys, request_id), LookupReply)

    def begin(self, keys: list[bytes], request_id: str = "r", wait_ms: int = 5000, session_id: str = "") -> int:
        return self.worker.send(AwaitFill(self.worker.lookup_message(keys, request_id, session_id=session_id), wait_ms))

    def reply(self, number: int, seconds: float = 30.0) -> LookupReply:
        reply = self.worker.reply_to(number, seconds)
        assert isinstance(reply, LookupReply), reply
        return reply

    def fill(self, keys: list[bytes], request_id: str = "r", wait_ms: int = 5000, session_id: str = "") -> int:
        return self.reply(self.begin(keys, request_id, wait_ms, session_id)).hit_chunks

    def loaded(self, keys: list[bytes], request_id: str = "r") -> list[bytes]:
        return self.worker.loaded(keys, request_id=request_id)

    def audit(self) -> None:
        wait_until(lambda: not self.running.call(lambda: self.running.parts.storage.fills.open))
        assert self.running.audited() is Audit.BALANCED

    def read_within(self, seconds: float, keys: list[bytes], request_id: str = "slow") -> None:
        """A fill whose reads take that long: from now on it is known how slow the tier is."""
        self.tier.stopped = True
        number = self.begin(keys, request_id)
        wait_until(lambda: len(self.tier.waiting) == len(keys))
        time.sleep(seconds)
        self.tier.release()
        assert self.reply(number).hit_chunks == len(keys)

    def gets(self) -> list[ObjectName]:
        return [name for kind, name in self.tier.began if kind == "get"]

    def bytes(self) -> int:
        return self.running.call(lambda: self.running.parts.storage.fills.room.used_bytes)


@contextlib.contextmanager
def filling(l1_bytes: int = 8 * L1_BYTES, more: list[str] | None = None, **worker: Any) -> Iterator[Filling]:
    region = HostRegion(l1_bytes)
    tiers = [PlainTier(region, PAGE_BYTES, name) for name in ["plain", *(more or [])]]
    configured: list[ConfiguredTier] = [tier.configured() for tier in tiers]
    with running_server(Devices(CpuDevice(region, PAGE_BYTES, 1)), l1_bytes, tiers=configured) as running:
        engine = Worker(running.endpoint, **worker)
        try:
            yield Filling(running, tiers[0], engine)
        finally:
            engine.close()


def requests_of(f: Filling) -> RequestsStatus:
    (instance,) = f.running.call(partial(instances_status, f.running.parts))
    return instance.requests


FULL, WINDOW = ObjectGroup("full", (0,), 16), ObjectGroup("window", (1,), 16, tokens=31)


def store_hybrid(f: Filling, keys: list[bytes], boundaries: list[int]) -> None:
    """Of the window only what a hit needs that ends behind so many chunks."""
    for first in range(0, len(keys), 8):
        part = keys[first : first + 8]
        f.worker.store(part, range(1, 1 + len(part) * f.worker.object_blocks(0)))
    windows = [keys[boundary - 1] for boundary in boundaries]
    f.worker.store(windows, range(1, 1 + len(windows) * f.worker.object_blocks(1)), group=1)
    wait_until(lambda: len(f.tier.objects) == len(keys) + len(boundaries))
    wait_until(lambda: not f.running.call(lambda: f.running.parts.storage.spill.puts))
    f.forget_l1()
