"""An engine that follows what it can read, as its adapter does."""

from __future__ import annotations

from collections.abc import Callable

from kvserver.kv_events.feed import MOST_EVENTS
from kvserver.protocol import KVBlocks, KVEventsTaken, TakeKVEvents

from .daemon import wait_until

Drain = Callable[[TakeKVEvents], KVEventsTaken]


class Follower:
    """Asks as an adapter does."""

    def __init__(self, drain: Drain, instance_id: str = "engine", incarnation: str = "one") -> None:
        self.drain, self.instance_id, self.incarnation = drain, instance_id, incarnation
        self.follow = self.cursor = 0
        self.places: dict[tuple[str, int], dict[bytes, KVBlocks]] = {}  # by medium and KV cache group
        self.received: list[KVBlocks] = []
        self.before: set[tuple[str, int, bytes]] = set()  # received in an earlier follow, and not again yet
        self.whole = False
        self.follows: list[int] = []

    @property
    def blocks(self) -> dict[bytes, KVBlocks]:
        """Of L1 and the first group."""
        return self.places.get(("CPU", 0), {})

    @property
    def names(self) -> set[tuple[str, int, bytes]]:
        return {(*place, hash) for place, blocks in self.places.items() for hash in blocks}

    def ask(self) -> KVEventsTaken:
        return self.drain(
            TakeKVEvents(
                instance_id=self.instance_id, incarnation=self.incarnation, follow=self.follow, cursor=self.cursor
            )
        )

    def step(self) -> KVEventsTaken:
        reply = self.ask()
        assert len(reply.events) <= MOST_EVENTS
        if reply.follow != self.follow:
            self.follow, self.whole = reply.follow, False
            self.before |= self.names
            self.places = {}
            self.follows.append(reply.follow)
        self.cursor = reply.cursor
        for event in reply.events:
            self._apply(event)
        if reply.whole:
            self.whole = True
            self.before.clear()
        return reply

    def _apply(self, event: KVBlocks) -> None:
        self.received.append(event)
        blocks = self.places.setdefault((event.medium, event.group), {})
        for hash in split(event.hashes, event.hash_bytes):
            if event.stored:
                assert hash not in blocks, "stored twice"
                blocks[hash] = event
                self.before.discard((event.medium, event.group, hash))
            else:
                del blocks[hash]

    def catch_up(self) -> None:
        """Until all has been received."""
        wait_until(lambda: (reply := self.step()).whole and not (reply.events or reply.more))


def split(hashes: bytes, size: int) -> list[bytes]:
    return [hashes[at : at + size] for at in range(0, len(hashes), size)]
