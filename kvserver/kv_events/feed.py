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
from kvserver.protocol import KVBlocks, KVEventsTaken, TakeKVEvents
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
            if cursor is None or cursor.dropped or not cursor.advance(request):
                cursor = self._new_cursor(request.instance_id, reader)
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
            followers = [cursor.status(instance_id) for instance_id, cursor in self._cursors.items()]
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
            blocks: list[KVBlocks | None] = []
            while True:
                with self._lock:
                    cursor.ready += blocks
                    part = cursor.next_part()
                if part is None:
                    return
                blocks = cursor.blocks_of(part)
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
        self._whole = False
        self.at_work = False  # the worker runs it or will run it
        self._queued = 0  # chunks in `_events`
        self.ready: deque[KVBlocks | None] = deque()  # None: the end of the snapshot
        self._events: deque[KVStored | KVRemoved] = deque()
        self._changes: Iterator[_Change] = iter(())  # of the snapshot, then of one event
        self._unfinished = True
        self._ledgers = Ledgers()  # used by the worker only
        self._start = self._end = 0  # cursors before and after the last reply
        self._last_reply: list[KVBlocks] = []

    def status(self, instance_id: str) -> FollowerStatus:
        return FollowerStatus(
            instance_id=instance_id,
            follow=self.number,
            whole=self._whole,
            queued_chunks=self._queued,
            unbalanced_blocks=self._ledgers.total(lambda ledger: ledger.unbalanced),
        )

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
            self._queued -= len(self._events.popleft().chunks)

    def queue_event(self, event: KVStored | KVRemoved, most: int) -> None:
        if self.dropped or event.number <= self._snapshot_at:
            return
        self._events.append(event)
        self._unfinished = True
        self._queued += len(event.chunks)
        if self._queued > most:
            self.drop()

    def drop(self) -> None:
        """Forget everything: the engine's next request restarts from a snapshot."""
        self.dropped, self._queued = True, 0
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
            self._queued -= len(event.chunks)
            self._changes = iter([(isinstance(event, KVStored), event.tier, chunk) for chunk in event.chunks])
        self.at_work = False
        return None

    def blocks_of(self, part: list[_Change]) -> list[KVBlocks | None]:
        """In the worker's thread."""
        found: list[KVBlocks | None] = []
        for change in part:
            if change is None:
                found.append(None)
            else:
                stored, tier, chunk = change
                groups = chunk.description.members or range(self.reader.groups)
                for run in self._ledgers.count(stored, tier, chunk.description):
                    found += [_blocks(stored, tier, run, group) for group in groups]
        return found

    def advance(self, request: TakeKVEvents) -> bool:
        """Advance to the next reply, unless the last one was lost on its way. False if the engine is elsewhere."""
        at = request.cursor if request.follow == self.number else 0  # an engine without any events is at the start
        if at == self._end:
            self._start = self._end
            self._last_reply = self._pop()
            self._end += len(self._last_reply)
        return at == self._start

    def reply(self) -> KVEventsTaken:
        more = self.at_work or bool(self.ready)
        return KVEventsTaken(
            follow=self.number, cursor=self._end, events=self._last_reply, whole=self._whole, more=more
        )

    def _pop(self) -> list[KVBlocks]:
        found: list[KVBlocks] = []
        size = 0
        while self.ready and len(found) < MOST_EVENTS and size < MOST_BYTES:
            blocks = self.ready.popleft()
            if blocks is None:
                self._whole = True
            else:
                found.append(blocks)
                size += len(blocks.hashes) + len(blocks.tokens) + len(blocks.extra_keys)
        return found


def _blocks(stored: bool, tier: Tier, of: Description, group: int) -> KVBlocks:
    contents = (of.block_tokens, of.parent, of.tokens, of.lora_name, of.extra_keys) if stored else ()
    return KVBlocks(stored, tier.value, of.hash_bytes, of.hashes, group, *contents)
