"""Feeds KV events to engines that publish them: to each engine the blocks that it can read.

Owns: how far each engine has received events. Refuses to know: sockets, and the form in which engines publish. `observe()`
runs in the events thread; a worker prepares replies; `take_kv_events()` runs in the loop and returns prepared replies.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from typing import TypeAlias

from kvserver.kv_events.descriptions import extra_keys_of
from kvserver.kv_events.ledger import Ledgers
from kvserver.kv_events.types import (
    Description,
    DirectEvent,
    KVChunk,
    KVRemoved,
    KVStored,
    ObserverContext,
    ReaderConnected,
    ReaderDisconnected,
    Tier,
)
from kvserver.protocol import TOKEN_BYTES, KVBlocks, KVEventsTaken, TakeKVEvents
from kvserver.protocol.kv_status import FeedStatus, FollowerStatus

log = logging.getLogger(__name__)

MOST_EVENTS = 64  # in one reply
MOST_BYTES = 64 << 10  # in one reply, approximately
MOST_QUEUED = 1 << 16  # stored or removed chunks; an engine that falls further behind restarts from a snapshot
_REPLIES_AHEAD = 8  # replies to prepare in advance
_PART = 64  # chunks prepared at a time; other threads may run in between

_Change: TypeAlias = tuple[bool, Tier, KVChunk] | None  # True: stored; False: removed. None: the end of the snapshot


@dataclass(frozen=True)
class _Reader:
    incarnation: str
    namespace_prefix: bytes
    groups: int


class Feed:
    def __init__(self, context: ObserverContext, most_queued: int = MOST_QUEUED) -> None:
        self._snapshot = context.snapshot_of_tiers
        self._most_queued = most_queued
        self._follows = context.boot_micros  # numbers differ from those of every earlier boot
        self._lock = threading.Lock()  # of all below; held only briefly, since the loop must not wait
        self._readers: dict[str, _Reader] = {}
        self._cursors: dict[str, _FeedCursor] = {}  # of the readers that requested events
        self._beginnings = 0
        self._worker = ThreadPoolExecutor(1, "kv events: feed")  # its thread begins with the first request

    def take_kv_events(self, request: TakeKVEvents) -> KVEventsTaken:
        """Never waits: events that are not prepared yet come with a later reply."""
        nothing = KVEventsTaken(follow=request.follow, cursor=request.cursor, events=[], whole=False)
        if not self._lock.acquire(blocking=False):
            return nothing
        try:
            reader = self._readers.get(request.instance_id)
            if reader is None or reader.incarnation != request.incarnation:
                return nothing
            cursor = self._cursors.get(request.instance_id)
            if cursor is None or cursor.dropped or not cursor.matches(request):
                cursor = self._new_cursor(request.instance_id, reader)
            cursor.advance(request)
            self._prepare_soon(cursor)
            return cursor.reply()
        finally:
            self._lock.release()

    def observe(self, event: DirectEvent) -> None:
        with self._lock:
            match event:
                case KVStored() | KVRemoved():
                    for cursor in self._cursors.values():
                        if event.namespace.startswith(cursor.reader.namespace_prefix):
                            cursor.queue_event(event, self._most_queued)
                            self._prepare_soon(cursor)
                case ReaderConnected():
                    scheduler = event.scheduler
                    reader = _Reader(scheduler.incarnation, event.namespace_prefix, max(1, len(scheduler.groups)))
                    if self._readers.get(event.instance_id) != reader:
                        self._readers[event.instance_id] = reader
                        self._forget(event.instance_id)
                case ReaderDisconnected():
                    self._readers.pop(event.instance_id, None)
                    self._forget(event.instance_id)

    def status(self) -> FeedStatus:
        with self._lock:
            followers = [
                FollowerStatus(
                    instance_id=instance_id,
                    follow=cursor.number,
                    whole=cursor.whole,
                    queued_chunks=cursor.queued,
                    unbalanced_blocks=cursor.unbalanced,
                )
                for instance_id, cursor in self._cursors.items()
            ]
            return FeedStatus(beginnings=self._beginnings, followers=followers)

    def close(self) -> None:
        self._worker.shutdown(wait=False, cancel_futures=True)

    # ---- inside -------------------------------------------------------------------------------

    def _new_cursor(self, instance_id: str, reader: _Reader) -> _FeedCursor:
        self._forget(instance_id)
        self._follows += 1
        self._beginnings += 1
        cursor = self._cursors[instance_id] = _FeedCursor(self._follows, reader)
        return cursor

    def _forget(self, instance_id: str) -> None:
        if (cursor := self._cursors.pop(instance_id, None)) is not None:
            cursor.drop()

    def _prepare_soon(self, cursor: _FeedCursor) -> None:
        if cursor.wants_work:
            cursor.at_work = True
            self._worker.submit(self._prepare, cursor)

    def _prepare(self, cursor: _FeedCursor) -> None:
        """In the worker's thread: prepare until enough is prepared or nothing is left."""
        try:
            if not cursor.started:
                number, chunks = self._snapshot(cursor.reader.namespace_prefix)
                with self._lock:
                    cursor.start(number, chunks)
            while True:
                with self._lock:
                    part = cursor.next_part()
                if part is None:
                    return
                blocks = cursor.blocks_of(part)
                with self._lock:
                    cursor.ready += blocks
                time.sleep(0)  # lets other threads run
        except Exception:
            log.exception("KV feed %s failed; it restarts from a snapshot", cursor.number)
            with self._lock:
                cursor.drop()


class _FeedCursor:
    """One engine's position in a snapshot and the events after it. REQUIRES: the feed's lock, except for blocks_of()."""

    def __init__(self, number: int, reader: _Reader) -> None:
        self.number = number
        self.reader = reader
        self.dropped = False  # its engine must restart from a snapshot
        self.started = False
        self._snapshot_at = 0  # the number of the last event in the snapshot
        self.whole = False
        self.at_work = False  # the worker runs it or will run it
        self.queued = 0  # chunks in `_events`
        self.ready: deque[KVBlocks | None] = deque()  # None: the end of the snapshot
        self._events: deque[KVStored | KVRemoved] = deque()
        self._changes: Iterator[_Change] = iter(())  # of the snapshot, then of one event
        self._unfinished = True
        self._ledgers = Ledgers()  # used by the worker only
        self._start = self._end = 0  # cursors before and after the last reply
        self._last_reply: list[KVBlocks] = []

    @property
    def unbalanced(self) -> int:
        return sum(ledger.unbalanced for ledger in list(self._ledgers.values()))

    @property
    def wants_work(self) -> bool:
        enough = len(self.ready) >= _REPLIES_AHEAD * MOST_EVENTS // 2
        return self._unfinished and not (enough or self.at_work or self.dropped)

    def start(self, number: int, chunks: list[tuple[Tier, KVChunk]]) -> None:
        """`chunks`: those of both tiers after event `number`, which observe() may not have received yet."""
        self.started = True
        self._snapshot_at = number
        self._changes = chain(((True, tier, chunk) for tier, chunk in chunks), [None])
        while self._events and self._events[0].number <= number:
            self.queued -= len(self._events.popleft().chunks)

    def queue_event(self, event: KVStored | KVRemoved, most: int) -> None:
        if self.dropped or event.number <= self._snapshot_at:
            return
        self._events.append(event)
        self._unfinished = True
        self.queued += len(event.chunks)
        if self.queued > most:
            self.drop()

    def drop(self) -> None:
        """Forget everything: the engine's next request restarts from a snapshot."""
        self.dropped, self.queued = True, 0
        self._events.clear()
        self.ready.clear()

    def next_part(self) -> list[_Change] | None:
        """The changes to prepare next. None: enough is prepared."""
        while not self.dropped and len(self.ready) < _REPLIES_AHEAD * MOST_EVENTS:
            if part := list(islice(self._changes, _PART)):
                return part
            if not self._events:
                self._unfinished = False
                break
            event = self._events.popleft()
            self.queued -= len(event.chunks)
            self._changes = iter([(isinstance(event, KVStored), event.tier, chunk) for chunk in event.chunks])
        self.at_work = False
        return None

    def blocks_of(self, part: list[_Change]) -> list[KVBlocks | None]:
        """In the worker's thread."""
        found: list[KVBlocks | None] = []
        for change in part:
            if change is None:
                found.append(None)
                continue
            stored, tier, chunk = change
            description = chunk.description
            groups, ledger = description.members, self._ledgers[tier, description.members]
            make = _stored_blocks if stored else _removed_blocks
            for first, last in ledger.stored(description) if stored else ledger.removed(description):
                found += [make(tier, description, first, last, group) for group in groups or range(self.reader.groups)]
        return found

    def matches(self, request: TakeKVEvents) -> bool:
        """True if the engine is where this cursor is. An engine without any events may start with the first reply."""
        if request.follow != self.number:
            return self._start == 0
        return request.cursor in (self._start, self._end)

    def advance(self, request: TakeKVEvents) -> None:
        """To the next reply, unless the last one was lost on its way. REQUIRES: matches(request)."""
        if (request.cursor if request.follow == self.number else 0) == self._end:
            self._start = self._end
            self._last_reply = self._pop()
            self._end += len(self._last_reply)

    def reply(self) -> KVEventsTaken:
        more = self.at_work or bool(self.ready)
        return KVEventsTaken(follow=self.number, cursor=self._end, events=self._last_reply, whole=self.whole, more=more)

    def _pop(self) -> list[KVBlocks]:
        found: list[KVBlocks] = []
        size = 0
        while self.ready and len(found) < MOST_EVENTS and size < MOST_BYTES:
            blocks = self.ready.popleft()
            if blocks is None:
                self.whole = True
            else:
                found.append(blocks)
                size += len(blocks.hashes) + len(blocks.tokens) + len(blocks.extra_keys)
        return found


def _stored_blocks(tier: Tier, of: Description, first: int, last: int, group: int) -> KVBlocks:
    size, tokens = of.hash_bytes, of.block_tokens * TOKEN_BYTES
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
