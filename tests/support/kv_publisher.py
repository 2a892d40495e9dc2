"""A ZmqPublisher on free ports, with a Feed and any number of subscribers."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from kvserver.config import Settings
from kvserver.kv_events import ObserverContext, Snapshot
from kvserver.kv_events.publisher import ZmqPublisher, make_publisher
from kvserver.kv_events.snapshot import snapshot_parts
from kvserver.protocol.kv_status import StreamStatus

from .daemon import wait_until
from .kv_feed import Feed
from .kv_subscriber import Blocks, Subscriber

TCP = "tcp://127.0.0.1:0"


class Published:
    def __init__(self, boot_micros: int | None = None, **settings: Any) -> None:
        flags = {"kv_events_endpoint": TCP, "kv_events_replay_endpoint": TCP, **settings}
        self.boot_micros = boot_micros or time.time_ns() // 1000
        made = make_publisher(ObserverContext(Settings(**flags), "boot", self.boot_micros))
        assert made is not None
        self.publisher: ZmqPublisher = made
        self.feed = Feed(made)
        self._subscribers: list[Subscriber] = []

    def _streams(self) -> list[StreamStatus]:
        return self.publisher.status().streams

    def stream(self, number: int = 0) -> StreamStatus:
        """Of the status, when it is bound."""
        return wait_until(
            lambda: next((row for row in self._streams()[number : number + 1] if row.state == "bound"), None),
            what="a stream that is bound",
        )

    def subscriber(self, topic: str = "", number: int = 0) -> Subscriber:
        """One that is subscribed: it has the batch that greets it."""
        stream = self.stream(number)
        made = Subscriber(stream.endpoint, stream.replay_endpoint, topic)
        self._subscribers.append(made)
        message = made.receive()
        assert message is not None, "nothing greeted it"
        made.accept(message)
        return made

    def sequence(self, number: int = 0) -> int:
        """Of the last batch, when all that was published so far is in one."""
        row = wait_until(lambda: next(iter([r for r in self._streams()[number:] if not r.pending_chunks]), None))
        return self.publisher.snapshot(row.model_name, row.hash_form, row.topics[0]).sequence

    def catch_up(self, *subscribers: Subscriber, number: int = 0) -> None:
        """Let them follow until they have all that was published so far."""
        last = self.sequence(number)
        for subscriber in subscribers:
            subscriber.follow(lambda subscriber=subscriber: subscriber.last >= last)

    def close(self) -> None:
        self.publisher.close()
        for subscriber in self._subscribers:
            subscriber.close()


def from_snapshot(snapshot: Snapshot) -> Blocks:
    """What a consumer knows that read it: a set, whatever is named twice."""
    with snapshot_parts(snapshot, "msgpack", gzip=False) as slices:
        header, *events = msgspec.msgpack.decode(b"".join(slices))
    assert (header["sequence"], header["events"]) == (snapshot.sequence, len(events))
    known, named = Blocks(), set()
    for event in events:
        fresh = [name for name in event["block_hashes"] if (event["medium"], event.get("group_idx"), name) not in named]
        named |= {(event["medium"], event.get("group_idx"), name) for name in fresh}
        known.apply_event({**event, "block_hashes": fresh})
    return known
