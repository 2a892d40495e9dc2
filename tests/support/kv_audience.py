"""A router's view of a stream of KV events: which blocks it believes to be where.

Owns: the set for each medium, and the rule that no block of a tier of the daemon is stored twice or removed if it is not
there. Refuses to know: who encodes events; their names distinguish them.
"""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import zmq


class Audience:
    def __init__(self) -> None:
        self.events: list[Any] = []
        self.clears = 0
        self._blocks: dict[tuple[str, int | None], set[Any]] = {}  # by medium and group

    def read(self, events: list[Any]) -> None:
        for event in events:
            kind = type(event).__name__
            if kind == "AllBlocksCleared":
                self._blocks.clear()
                self.clears += 1
                continue
            place = event.medium, getattr(event, "group_idx", None)
            known, hashes = self._blocks.get(place, set()), set(event.block_hashes)
            if (
                event.medium != "GPU"
            ):  # vLLM's own name a block once for each block id that has it; of a window perhaps none
                assert hashes, "an event of no block"
                assert len(hashes) == len(event.block_hashes), "one event names a block twice"
                assert not hashes & known if kind == "BlockStored" else hashes <= known, (
                    f"{kind} of what was published before"
                )
            self._blocks[place] = known | hashes if kind == "BlockStored" else known - hashes
        self.events += events

    def blocks(self, medium: str, group: int | None = None) -> set[Any]:
        """Of one group, or of all."""
        of = (blocks for place, blocks in self._blocks.items() if place[0] == medium and group in (None, place[1]))
        return set().union(*of)

    def by_group(self, medium: str) -> set[tuple[int, Any]]:
        """(group, block)"""
        return {(at or 0, name) for (of, at), blocks in list(self._blocks.items()) if of == medium for name in blocks}

    def stored(self, medium: str) -> list[Any]:
        return [e for e in self.events if type(e).__name__ == "BlockStored" and e.medium == medium]


class Subscriber:
    """Listens from its construction on, in a thread of its own, once it is connected. close() at the end."""

    def __init__(self, endpoint: str, batch: Any, topic: str = "") -> None:
        """`batch` is the struct that payloads are decoded to."""
        self.audience = Audience()
        self.failure: Exception | None = None  # what was wrong with the stream
        self.sequences: list[int] = []
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(batch)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._socket.connect(endpoint)
        self._ends = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def blocks(self, medium: str) -> set[Any]:
        """AssertionError if the stream broke a rule."""
        return self._sound().blocks(medium)

    def by_group(self, medium: str) -> set[tuple[int, Any]]:
        """The same, with the group of each block."""
        return self._sound().by_group(medium)

    def _sound(self) -> Audience:
        if self.failure is not None:
            raise AssertionError("the stream is wrong") from self.failure
        return self.audience

    def _run(self) -> None:
        while not self._ends and self.failure is None:
            if not self._socket.poll(20):
                continue
            _, sequence, payload = self._socket.recv_multipart()
            try:
                self.audience.read(self._decoder.decode(payload).events)
            except Exception as error:
                self.failure = error
            self.sequences.append(int.from_bytes(sequence, "big"))

    def close(self) -> None:
        self._ends = True
        self._thread.join()
        self._context.destroy(linger=0)
