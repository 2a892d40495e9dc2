"""Announces the blocks in the daemon's tiers on the engine's own stream of KV events.

The scheduler half requests the changes of all blocks that this engine can read, whichever engine stored them. The engine
publishes them behind the step's own events. No thread waits for an answer; an idle engine publishes at its next step.

This stream announces no block twice, across daemons and sessions: a new session announces only what has changed. Blocks of a
daemon that has not answered for WITHDRAW_SECONDS are withdrawn. When the engine clears its own blocks it may publish
AllBlocksCleared, and consumers then forget the daemon's blocks too: all are announced again. The connector never publishes it.

Owns: the request in flight, and the changes received and not yet announced. Refuses to know: the form of the engine's events, and
how the engine publishes them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

from kvserver.adapters.common.announced import AnnouncedBlocks
from kvserver.adapters.common.dispatcher import Dispatcher
from kvserver.adapters.common.notices import EngineNames
from kvserver.protocol import KVBlocks, KVEventsTaken, Reply, TakeKVEvents

WITHDRAW_SECONDS = 5.0
MOST_BLOCKS = 512  # announced in one step, and at most one run of blocks more: 0.6 ms
_PAUSE_SECONDS = 0.05  # between two requests, unless the daemon has more events
_REFUSED_SECONDS = 0.5


class MakeEvents(Protocol):
    """The form of the engine's own events."""

    def stored(self, blocks: KVBlocks, first: int, last: int) -> Any:
        """Event that announces blocks [first, last) of `blocks`."""

    def removed(self, hashes: bytes, hash_bytes: int, medium: str, group: int) -> Any: ...


class Announcer:
    """Announces the blocks of the daemon's tiers. Does nothing unless the engine `publishes` KV events."""

    def __init__(self, dispatcher: Dispatcher, names: EngineNames, make: MakeEvents, publishes: bool) -> None:
        self._dispatcher = dispatcher
        self._names = names
        self._make = make
        self._publishes = publishes
        self._announced: dict[tuple[int, str, int], AnnouncedBlocks] = {}  # by length of hashes, medium and group
        self._clears = 0  # as of the last step
        self._follow = 0
        self._cursor = 0
        self._number: int | None = None  # of the request in flight
        self._asked_at = 0.0
        self._ask_after = 0.0
        # When the first of the requests in a row failed: not sent, not answered or refused.
        self._failing_since: float | None = None
        self._daemon_lost = False  # the daemon's blocks cannot be read
        self._pending: deque[KVBlocks] = deque()
        self._whole = False  # this follow is complete: blocks that it did not name are no longer in the tier
        dispatcher.on_session.append(lambda hello: self._begin_follow())

    # ---- the daemon ---------------------------------------------------------------------------

    def _begin_follow(self) -> None:
        """The daemon will send all blocks again. A reply to the request in flight is ignored."""
        self._follow = self._cursor = 0
        if self._number is not None:
            self._dispatcher.forget(self._number)
            self._number = None
        self._pending.clear()
        self._whole = False
        for announced in self._announced.values():
            announced.begin_resync()

    def request_events(self) -> None:
        """Send the next request if it is due. Ends a scheduler pass."""
        if not self._publishes:
            return
        now = time.monotonic()
        if self._number is not None and now - self._asked_at > WITHDRAW_SECONDS:
            self._failed(now, since=self._asked_at)
        if self._number is None and now >= self._ask_after and not self._pending:
            self._send(now)

    def _send(self, now: float) -> None:
        self._asked_at = now
        if self._dispatcher.usable() is not None:
            names = self._names
            question = TakeKVEvents(
                instance_id=names.instance_id, incarnation=names.incarnation, follow=self._follow, cursor=self._cursor
            )
            self._number = self._dispatcher.send(question, self._receive_reply)
        if self._number is None:
            self._failed(now, since=now)

    def _failed(self, now: float, since: float) -> None:
        """A request that was due at `since` failed."""
        if self._failing_since is None:
            self._failing_since = since
        if now - self._failing_since > WITHDRAW_SECONDS:
            self._daemon_lost = True
            self._begin_follow()

    def _receive_reply(self, reply: Reply) -> None:
        self._number = None
        now = time.monotonic()
        if not isinstance(reply, KVEventsTaken):
            self._failed(now, since=now)
            self._ask_after = now + _REFUSED_SECONDS
            return
        if reply.follow != self._follow:
            self._begin_follow()
        self._follow, self._cursor = reply.follow, reply.cursor
        self._pending.extend(reply.events)
        self._whole = self._whole or reply.whole
        self._failing_since = None
        self._daemon_lost = False
        self._ask_after = now if reply.more else now + _PAUSE_SECONDS

    # ---- the engine ---------------------------------------------------------------------------

    def drain_events(self, clears: int) -> list[Any]:
        """The events that the engine is to publish now; it cleared its own blocks `clears` times so far. Ends a step."""
        if self._clears != clears:
            self._clears = clears
            self._announced.clear()
            self._begin_follow()
        events: list[Any] = []
        left = MOST_BLOCKS
        while self._pending and left > 0:
            blocks = self._pending.popleft()
            left -= len(blocks.hashes) // blocks.hash_bytes
            events.extend(self._events_of(blocks))
        if self._whole or self._daemon_lost:
            events.extend(self._withdrawn(left))  # `left` is 0 while events are pending
        return events

    def _events_of(self, blocks: KVBlocks) -> Iterator[Any]:
        place = (blocks.hash_bytes, blocks.medium, blocks.group)
        if place not in self._announced:
            self._announced[place] = AnnouncedBlocks(blocks.hash_bytes)
        announced = self._announced[place]
        news = announced.stored(blocks.hashes) if blocks.stored else announced.removed(blocks.hashes)
        for first, last in runs(news):
            if blocks.stored:
                yield self._make.stored(blocks, first, last)
            else:
                hashes = blocks.hashes[first * blocks.hash_bytes : last * blocks.hash_bytes]
                yield self._make.removed(hashes, *place)

    def _withdrawn(self, most: int) -> Iterator[Any]:
        """Removal events of blocks that were announced and are no longer in the tier."""
        for place, announced in self._announced.items():
            if most > 0 and (hashes := announced.pop_unconfirmed(most)):
                most -= len(hashes) // announced.hash_bytes
                yield self._make.removed(hashes, *place)


def runs(flags: bytes) -> Iterator[tuple[int, int]]:
    """Ranges [first, last) of flags that are 1."""
    first = flags.find(1)
    while first >= 0:
        end = first
        while end < len(flags) and flags[end] == 1:
            end += 1
        yield first, end
        first = flags.find(1, end)
