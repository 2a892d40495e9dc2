"""An engine's publisher of KV events, as far as its sockets go: what vLLM's ZmqEventPublisher sends and answers.

Events are encoded by hand, so that wrong ones can be sent too; tests/adapters/test_engine_wire.py reads vLLM's own.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import msgspec
import zmq

END = (-1).to_bytes(8, "big", signed=True)
Event = Any


def stored(hashes: list[bytes | int], **more: Any) -> Event:
    block_size = 16
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None,
        "token_ids": list(range(block_size * len(hashes))),
        "block_size": block_size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        **more,
    }


def removed(hashes: list[bytes | int], **more: Any) -> Event:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", **more}


CLEARED: Event = {"type": "AllBlocksCleared"}


def as_array(event: Event) -> Event:
    """As vLLM had it before 0.26: the tag, then the fields without their names."""
    return list(event.values())


class EnginePublisher:
    """Publishes in the caller's thread, answers replays in one of its own."""

    def __init__(self, folder: Path, replays: bool = True, topic: str = "kv", buffered: int = 10_000) -> None:
        self.endpoint = f"ipc://{folder}/events"
        self.replay_endpoint = f"ipc://{folder}/replay" if replays else ""
        self.topic = topic
        self.buffered = buffered
        self.answers = True  # False: replays are read and not answered
        self.asked: list[int] = []  # by replays: from which batch on
        self._start()

    def _start(self) -> None:
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.XPUB)  # a PUB that reports its subscribers
        self._pub.setsockopt(zmq.SNDHWM, 100_000)
        self._pub.bind(self.endpoint)
        self._next = 0
        self._now = getattr(self, "_now", 1000.0)
        self._buffer: list[tuple[int, bytes]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def wait_for_subscriber(self, seconds: float = 30.0) -> None:
        assert self._pub.poll(seconds * 1000), "no subscriber connected"
        assert self._pub.recv() == b"\1" + self.topic.encode()

    def publish(self, *events: Event, sent: bool = True) -> None:
        """`sent`: False keeps it for replays only, as where a subscriber is too slow."""
        self._now += 0.001
        self.publish_raw(msgspec.msgpack.encode([self._now, list(events), 0]), sent)

    def publish_raw(self, payload: bytes, sent: bool = True) -> None:
        number, self._next = self._next, self._next + 1
        self._buffer = [*self._buffer, (number, payload)][-self.buffered :]
        if sent:
            self._pub.send_multipart([self.topic.encode(), number.to_bytes(8, "big"), payload])

    def send_frames(self, *frames: bytes) -> None:
        self._pub.send_multipart(frames)

    def restart(self) -> None:
        """The same addresses, and a sequence from 0."""
        self.close()
        self._start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._context.destroy(0)

    def _serve(self) -> None:
        if not self.replay_endpoint:
            return
        router = self._context.socket(zmq.ROUTER)
        router.bind(self.replay_endpoint)
        while not self._stop.is_set():
            if not router.poll(10):
                continue
            client, _, first = router.recv_multipart()
            self.asked.append(int.from_bytes(first, "big"))
            if not self.answers:
                continue
            for number, payload in list(self._buffer):
                if number >= self.asked[-1]:
                    router.send_multipart([client, b"", self.topic.encode(), number.to_bytes(8, "big"), payload])
            router.send_multipart([client, b"", b"", END, b""])
        with contextlib.suppress(zmq.ZMQError):
            router.close(0)
