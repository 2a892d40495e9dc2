"""What engines publish themselves: for each that asks, what became of the blocks that it can read.

Owns: how far each engine has been told. Refuses to know: sockets, and how engines put it (their adapters). It observes
in its own thread; `take()` runs in the loop's, and does a bounded piece of the work that it finds.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from kvserver.kv_events.descriptions import extra_keys_of
from kvserver.kv_events.ledger import Ledger
from kvserver.kv_events.types import (
    Description,
    KVChunk,
    KVEvent,
    KVRemoved,
    KVStored,
    ObserverContext,
    ReaderCame,
    ReaderGone,
    Tier,
)
from kvserver.kv_messages import KVBlocks, KVEventsTaken, TakeKVEvents

log = logging.getLogger(__name__)

MOST_EVENTS = 64  # in one reply
MOST_BYTES = 64 << 10  # in one reply, about
MOST_QUEUED = 1 << 16  # chunks that came or went; who falls further behind begins anew
_MOST_LOOKED_AT = 256  # chunks for one reply: many may have nothing to tell
_TOKEN_BYTES = 4


def make(context: ObserverContext) -> Feed:
    return Feed(context)


@dataclass(frozen=True)
class _Reader:
    incarnation: str
    reach: bytes
    groups: int


class Feed:
    def __init__(self, context: ObserverContext, most_queued: int = MOST_QUEUED) -> None:
        self._snapshot = context.snapshot
        self._most_queued = most_queued
        self._follows = context.boot_micros  # so that none of another boot's is taken for one of this
        self._lock = threading.Lock()  # of all below
        self._readers: dict[str, _Reader] = {}
        self._followers: dict[str, _Follower] = {}  # of those readers that have asked
        self._beginnings = 0
        self._workers = ThreadPoolExecutor(1, "kv events: snapshots")  # its thread begins with the first of them

    def take(self, request: TakeKVEvents) -> KVEventsTaken:
        """Never waits: whatever is not at hand yet comes with a later reply."""
        nothing = KVEventsTaken(follow=request.follow, cursor=request.cursor, events=[], whole=False)
        if not self._lock.acquire(blocking=False):
            return nothing
        try:
            reader = self._readers.get(request.instance_id)
            if reader is None or reader.incarnation != request.incarnation:
                return nothing
            follower = self._followers.get(request.instance_id)
            if follower is None or follower.lost or not follower.knows(request):
                follower = self._begin(request.instance_id, reader)
            return follower.take(request)
        finally:
            self._lock.release()

    def observe(self, event: KVEvent) -> None:
        with self._lock:
            match event:
                case KVStored() | KVRemoved():
                    for follower in self._followers.values():
                        if event.namespace.startswith(follower.reader.reach):
                            follower.push(event, self._most_queued)
                case ReaderCame():
                    scheduler = event.scheduler
                    reader = _Reader(scheduler.incarnation, event.reach, max(1, len(scheduler.groups)))
                    if self._readers.get(scheduler.instance_id) != reader:
                        self._readers[scheduler.instance_id] = reader
                        self._followers.pop(scheduler.instance_id, None)
                case ReaderGone():
                    self._readers.pop(event.instance_id, None)
                    self._followers.pop(event.instance_id, None)

    def status(self) -> dict[str, Any]:
        with self._lock:
            return {
                "beginnings": self._beginnings,
                "followers": [
                    {
                        "instance_id": instance_id,
                        "follow": follower.number,
                        "whole": follower.whole,
                        "queued_chunks": follower.queued,
                        "unbalanced_blocks": follower.unbalanced,
                    }
                    for instance_id, follower in self._followers.items()
                ],
            }

    def close(self) -> None:
        self._workers.shutdown(wait=False)

    def _begin(self, instance_id: str, reader: _Reader) -> _Follower:
        self._follows += 1
        self._beginnings += 1
        follower = self._followers[instance_id] = _Follower(self._follows, reader)
        self._workers.submit(self._look_around, follower)
        return follower

    def _look_around(self, follower: _Follower) -> None:
        try:
            number, chunks = self._snapshot(follower.reader.reach)
        except Exception:
            log.exception("no snapshot for a feed")
            return
        with self._lock:
            follower.begin(number, chunks)


class _Follower:
    """One engine's way through a snapshot and what came after it. REQUIRES: the feed's lock."""

    def __init__(self, number: int, reader: _Reader) -> None:
        self.number = number
        self.reader = reader
        self.lost = False  # it fell too far behind
        self.whole = False
        self.queued = 0  # chunks in the events
        self._events: deque[KVStored | KVRemoved] = deque()
        self._chunks: Iterator[tuple[bool, Tier, KVChunk]] | None = None  # of the snapshot, later of one event
        self._blocks: deque[KVBlocks] = deque()  # of one chunk
        self._ledgers = {tier: Ledger() for tier in Tier}
        self._start = self._end = 0  # cursors before and after the last reply
        self._reply: list[KVBlocks] = []
        self._more = False

    @property
    def unbalanced(self) -> int:
        return sum(ledger.unbalanced for ledger in self._ledgers.values())

    def begin(self, number: int, chunks: list[KVChunk]) -> None:
        """`chunks` are what is held after the event of that number."""
        while self._events and self._events[0].number <= number:
            self.queued -= len(self._events.popleft().chunks)
        if not self.lost:
            self._chunks = ((True, Tier.L1, chunk) for chunk in chunks)

    def push(self, event: KVStored | KVRemoved, most: int) -> None:
        if self.lost:
            return
        self._events.append(event)
        self.queued += len(event.chunks)
        if self.queued > most:
            self.lost, self.queued, self._chunks = True, 0, None
            self._events.clear()

    def knows(self, request: TakeKVEvents) -> bool:
        """Whether what the engine has is what it was told. One that has nothing may begin with the first reply."""
        if request.follow != self.number:
            return self._start == 0
        return request.cursor in (self._start, self._end)

    def take(self, request: TakeKVEvents) -> KVEventsTaken:
        """The last reply again if it was lost, else the next. REQUIRES: knows(request)."""
        cursor = request.cursor if request.follow == self.number else 0
        if cursor == self._end:
            self._start = self._end
            self._reply = self._next()
            self._end += len(self._reply)
        return KVEventsTaken(
            follow=self.number, cursor=self._end, events=self._reply, whole=self.whole, more=self._more
        )

    def _next(self) -> list[KVBlocks]:
        found: list[KVBlocks] = []
        size = looked = 0
        self._more = True
        while len(found) < MOST_EVENTS and size < MOST_BYTES and looked < _MOST_LOOKED_AT:
            if self._blocks:
                blocks = self._blocks.popleft()
                found.append(blocks)
                size += len(blocks.hashes) + len(blocks.tokens) + len(blocks.extra_keys)
            elif self._look():
                looked += 1
            else:
                self._more = False
                break
        return found

    def _look(self) -> bool:
        """Turn the next chunk into blocks. False if there is none at hand."""
        if self._chunks is None:
            return False
        next_chunk = next(self._chunks, None)
        if next_chunk is not None:
            self._turn(*next_chunk)
            return True
        self.whole = True
        if not self._events:
            return False
        event = self._events.popleft()
        self.queued -= len(event.chunks)
        self._chunks = ((isinstance(event, KVStored), event.tier, chunk) for chunk in event.chunks)
        return True

    def _turn(self, stored: bool, tier: Tier, chunk: KVChunk) -> None:
        description = chunk.description
        if description is None:
            return
        ledger = self._ledgers[tier]
        for first, last in ledger.stored(description) if stored else ledger.removed(description):
            make = _stored_blocks if stored else _removed_blocks
            self._blocks += [make(tier, description, first, last, group) for group in range(self.reader.groups)]


def _stored_blocks(tier: Tier, of: Description, first: int, last: int, group: int) -> KVBlocks:
    size, tokens = of.hash_bytes, of.block_tokens * _TOKEN_BYTES
    return KVBlocks(
        stored=True,
        medium=tier.value,
        hash_bytes=size,
        hashes=of.hashes[first * size : last * size],
        group=group,
        block_tokens=of.block_tokens,
        parent=of.hashes[(first - 1) * size : first * size] if first else of.parent,
        tokens=of.tokens[first * tokens : last * tokens],
        lora_name=of.lora_name,
        extra_keys=extra_keys_of(of, first, last),
    )


def _removed_blocks(tier: Tier, of: Description, first: int, last: int, group: int) -> KVBlocks:
    hashes = of.hashes[first * of.hash_bytes : last * of.hash_bytes]
    return KVBlocks(stored=False, medium=tier.value, hash_bytes=of.hash_bytes, hashes=hashes, group=group)
