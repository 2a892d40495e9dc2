"""A consumer of KV events: SUB, and a replay when numbers are missing, as in vLLM's example kv_events_subscriber.py."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from .leftovers import closed, opened

Message = tuple[bytes, int, bytes]  # topic, sequence, payload
END = (-1).to_bytes(8, "big", signed=True)


FIELDS = {  # of the arrays that vLLM published until 0.25, as consumers count them
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
        *("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}


def events_of(payload: bytes) -> list[dict[str, Any]]:
    """Of a batch; those that are arrays by the names of their fields."""
    _time, events, _rank = msgspec.msgpack.decode(payload)
    return [
        event if isinstance(event, dict) else {"type": event[0], **dict(zip(FIELDS[event[0]], event[1:], strict=False))}
        for event in events
    ]


class Blocks:
    """What a consumer knows. It counts, and a count other than 0 and 1 is an error of the publisher."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, int | None, Any]] = Counter()

    def apply(self, payload: bytes) -> None:
        for event in events_of(payload):
            self.apply_event(event)

    def apply_event(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self._counts.clear()
            return
        change = 1 if event["type"] == "BlockStored" else -1
        for name in event["block_hashes"]:
            block = (event["medium"], event.get("group_idx"), name)
            self._counts[block] += change
            assert self._counts[block] in (0, 1), (event["type"], block)

    @property
    def resident(self) -> set[tuple[str, int | None, Any]]:
        return {block for block, count in self._counts.items() if count}


class Subscriber:
    def __init__(self, endpoint: str, replay_endpoint: str = "", topic: str = "") -> None:
        self.topic = topic.encode()
        self._context = zmq.Context()
        opened(self)
        self.sub = self._context.socket(zmq.SUB)
        self.sub.setsockopt(zmq.RCVHWM, 0)
        self.sub.connect(endpoint)
        self.sub.setsockopt(zmq.SUBSCRIBE, self.topic)
        self._replay_endpoint = replay_endpoint
        self.blocks = Blocks()
        self.last = -1
        self.missed = 0  # batches that no replay had
        self.received: list[Message] = []
        self.batches: dict[int, bytes] = {}  # all that it knows of, live or by a replay

    def receive(self, timeout_ms: int = 10_000) -> Message | None:
        """The next message, None if there is none in time."""
        if not self.sub.poll(timeout_ms):
            return None
        topic, number, payload = self.sub.recv_multipart()
        self.received.append((topic, int.from_bytes(number, "big"), payload))
        return self.received[-1]

    def follow(self, done: Callable[[], bool], seconds: float = 20.0) -> None:
        """Take messages, and what was missed before them, until `done`."""
        deadline = time.monotonic() + seconds
        while not done():
            message = self.receive(20)
            if message is not None:
                self.accept(message)
            assert time.monotonic() < deadline, f"last {self.last}, {len(self.blocks.resident)} blocks"

    def accept(self, message: Message) -> None:
        _, sequence, payload = message
        if sequence <= self.last:
            return  # known: of this daemon's start, or had by a replay
        if self.last >= 0 and sequence > self.last + 1 and self._replay_endpoint:
            for _, number, missed in self.replay(self.last + 1):
                self.apply(number, missed)
        self.apply(sequence, payload)

    def apply(self, sequence: int, payload: bytes) -> None:
        """Unless it is known."""
        if sequence > self.last:
            self.missed += sequence - self.last - 1 if self.last >= 0 else 0
            self.blocks.apply(payload)
            self.batches[sequence] = payload
            self.last = sequence

    def replay(self, start: int, *, topic: bytes | None = None) -> list[Message]:
        """All that is still kept, from `start` on."""
        with self._context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.connect(self._replay_endpoint)
            wanted = self.topic if topic is None else topic
            socket.send_multipart([b"", start.to_bytes(8, "big"), *([wanted] if wanted else [])])
            found: list[Message] = []
            while True:
                assert socket.poll(10_000), "the replay did not end"
                empty, name, number, payload = socket.recv_multipart()
                assert empty == b""
                if number == END:
                    assert (name, payload) == (b"", b"")
                    return found
                found.append((name, int.from_bytes(number, "big"), payload))

    def close(self) -> None:
        self._context.destroy(0)
        closed(self)
