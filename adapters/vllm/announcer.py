"""Announces the blocks in the daemon's tiers on the engine's own stream of KV events.

The scheduler half requests from the daemon the changes of all blocks that this engine can read, also of those that other
engines stored. vLLM publishes them behind the step's own events. No thread waits for an answer; an idle engine publishes at
its next step.

This stream announces no block twice, across daemons and sessions: after a new session it announces only what has changed.
Blocks of a daemon that has not answered for WITHDRAW_SECONDS are withdrawn. vLLM's AllBlocksCleared, sent for its own blocks,
makes consumers forget the daemon's blocks too: all are announced again then. The connector never sends AllBlocksCleared.

Owns: the request in flight, and the events that were received and not yet passed to vLLM. Refuses to know: how vLLM
publishes.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

import msgspec
from kvserver.adapters.common.announced import AnnouncedBlocks
from kvserver.adapters.common.dispatcher import Dispatcher
from kvserver.adapters.vllm.blockpool import PoolHook
from kvserver.adapters.vllm.facts import EngineFacts, hash_form
from vllm.distributed.kv_events import BlockRemoved, BlockStored

from kvserver.protocol import HashForm, KVBlocks, KVEventsTaken, KVGroup, Reply, TakeKVEvents

WITHDRAW_SECONDS = 5.0
MOST_BLOCKS = 512  # passed to vLLM in one step, and at most one run of blocks more: 0.6 ms
_PAUSE_SECONDS = 0.05  # between two requests, unless the daemon has more events
_REFUSED_SECONDS = 0.5
_extra_keys_decoder = msgspec.msgpack.Decoder(list[tuple[Any, ...] | None])


class Announcer:
    """Does nothing if the engine's KV events are off."""

    def __init__(self, dispatcher: Dispatcher, facts: EngineFacts, pool: PoolHook, counters: Counter[str]) -> None:
        self._dispatcher = dispatcher
        self._facts = facts
        self._pool = pool
        self._counters = counters
        self._form = hash_form()
        self._announced: dict[tuple[str, int, int], AnnouncedBlocks] = {}  # by medium, group and length of hashes
        self._clears = 0  # of the pool, as of the last step
        self._follow = 0
        self._cursor = 0
        self._number: int | None = None  # of the request in flight
        self._asked_at = 0.0
        self._ask_after = 0.0
        self._failing_since: float | None = (
            None  # when the first of the requests in a row failed: not sent, not answered or refused
        )
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
        if not self._facts.publishes:
            return
        now = time.monotonic()
        if self._number is not None and now - self._asked_at > WITHDRAW_SECONDS:
            self._failed(now, since=self._asked_at)
        if self._number is None and now >= self._ask_after and not self._pending:
            self._send(now)

    def _send(self, now: float) -> None:
        self._asked_at = now
        if self._dispatcher.usable() is not None:
            names = {"instance_id": self._facts.instance_id, "incarnation": self._facts.incarnation}
            question = TakeKVEvents(**names, follow=self._follow, cursor=self._cursor)
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

    # ---- vLLM ---------------------------------------------------------------------------------

    def drain_events(self) -> list[BlockStored | BlockRemoved]:
        """The events that vLLM is to publish now. Ends a step."""
        if self._clears != self._pool.clears:
            self._clears = self._pool.clears
            self._announced.clear()
            self._begin_follow()
        events: list[BlockStored | BlockRemoved] = []
        left = MOST_BLOCKS
        while self._pending and left > 0:
            blocks = self._pending.popleft()
            left -= len(blocks.hashes) // blocks.hash_bytes
            events.extend(self._events_of(blocks))
        if self._whole or self._daemon_lost:
            events.extend(self._withdrawn(left))  # `left` is 0 while events are pending
        return events

    def _events_of(self, blocks: KVBlocks) -> Iterator[BlockStored | BlockRemoved]:
        place = (blocks.medium, blocks.group, blocks.hash_bytes)
        if place not in self._announced:
            self._announced[place] = AnnouncedBlocks(blocks.hash_bytes)
        announced = self._announced[place]
        news = announced.stored(blocks.hashes) if blocks.stored else announced.removed(blocks.hashes)
        for first, last in runs(news):
            self._counters["announced_blocks" if blocks.stored else "withdrawn_blocks"] += last - first
            if blocks.stored:
                yield self._stored(blocks, first, last)
            else:
                hashes = blocks.hashes[first * blocks.hash_bytes : last * blocks.hash_bytes]
                yield self._removed(hashes, *place)

    def _withdrawn(self, most: int) -> Iterator[BlockRemoved]:
        """Removal events of blocks that were announced and are no longer in the tier."""
        for place, announced in self._announced.items():
            if most > 0 and (hashes := announced.pop_unconfirmed(most)):
                gone = len(hashes) // announced.hash_bytes
                self._counters["withdrawn_blocks"] += gone
                most -= gone
                yield self._removed(hashes, *place)

    def _stored(self, blocks: KVBlocks, first: int, last: int) -> BlockStored:
        size, tokens = blocks.hash_bytes, blocks.block_tokens
        parent = blocks.hashes[(first - 1) * size : first * size] if first else blocks.parent
        extra_keys = _extra_keys_decoder.decode(blocks.extra_keys)[first:last] if blocks.extra_keys else None
        groups = self._facts.groups
        group = groups[blocks.group] if blocks.group < len(groups) else KVGroup("")
        return BlockStored(
            block_hashes=named(blocks.hashes[first * size : last * size], size, self._form),
            parent_block_hash=named(parent, size, self._form)[0] if parent else None,
            token_ids=array("I", blocks.tokens)[first * tokens : last * tokens].tolist(),
            block_size=tokens,
            lora_id=None,
            medium=blocks.medium,
            lora_name=blocks.lora_name or None,
            extra_keys=extra_keys,
            group_idx=blocks.group,
            kv_cache_spec_kind=group.kind or None,
            kv_cache_spec_sliding_window=group.window,
        )

    def _removed(self, hashes: bytes, medium: str, group: int, hash_bytes: int) -> BlockRemoved:
        return BlockRemoved(block_hashes=named(hashes, hash_bytes, self._form), medium=medium, group_idx=group)


def named(hashes: bytes, hash_bytes: int, form: HashForm) -> list[bytes | int]:
    """Hashes in the form of the engine's own events; maybe_convert_block_hash() would look up the form for each."""
    each = [hashes[at : at + hash_bytes] for at in range(0, len(hashes), hash_bytes)]
    return [int.from_bytes(one[-8:], "big") for one in each] if form == "int" else [*each]


def runs(flags: bytes) -> Iterator[tuple[int, int]]:
    """Ranges [first, last) of flags that are 1."""
    first = flags.find(1)
    while first >= 0:
        end = first
        while end < len(flags) and flags[end] == 1:
            end += 1
        yield first, end
        first = flags.find(1, end)
