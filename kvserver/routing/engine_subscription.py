"""Reads one engine's KV events from its sockets: the subscription, and replays of missed batches.

Owns: the sockets, how much is read in one turn, when a replay is requested and given up. Refuses to know: the events
(`engine_wire`), their order (`engine_stream`), other engines.
"""

from __future__ import annotations

import contextlib
import ipaddress
import time
from collections.abc import Callable
from functools import partial
from typing import TypeAlias
from urllib.parse import urlsplit

import zmq
from msgspec.structs import replace

from kvserver._native import PrefixIndex
from kvserver.kv_events import Description
from kvserver.protocol import SGLANG_HASH, DescribeScheduler
from kvserver.protocol.kv_status import EngineEventsStatus
from kvserver.routing.engine_stream import EngineBlocks, EngineStream

_MESSAGES_PER_TURN = 32
_MOST_BYTES = 16 << 20  # of a message; vLLM's have about 8 bytes for each token of a step
_QUEUED_MESSAGES = 256
_REPLAYED_MESSAGES = 20_000  # vLLM keeps 10,000 and drops those that do not fit into the queue
_REPLAY_SECONDS = 2.0  # without a message; then the replay ends
_REPLAY_EVERY_SECONDS = 1.0
_NUMBER_BYTES = 8
_REPLAY_END = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)
Socket = zmq.Socket[bytes]
DescribePages: TypeAlias = Callable[[str, list[Description]], None]  # of the instance


def unreadable(endpoint: str) -> str:
    """Reason why the daemon does not connect to this endpoint; "" if it does. It connects to endpoints on this machine only."""
    try:
        parts = urlsplit(endpoint)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        return f"{endpoint!r}: {error}"
    if parts.scheme == "ipc" and endpoint != "ipc://":
        return ""
    with contextlib.suppress(ValueError):
        if parts.scheme == "tcp" and port and (host == "localhost" or ipaddress.ip_address(host).is_loopback):
            return ""
    return f"{endpoint!r} is neither ipc nor tcp on a loopback address"


class EngineSubscription:
    """Subscription to one engine. REQUIRES: one thread calls everything except status(), which only reads."""

    def __init__(
        self,
        context: zmq.Context[Socket],
        index: PrefixIndex,
        scheduler: DescribeScheduler,
        members: tuple[int, ...] = (),
        describe: DescribePages | None = None,
    ) -> None:
        """`members`: a KV cache group of each object group; (): there is one object group. `describe` receives the pages of such an
        SGLang. NoOwner if the index has too few.
        """
        self.scheduler, self.members = scheduler, members
        self.failure = ""
        kinds = [group.kind for group in scheduler.groups]
        groups = members or (kinds.index("full_attention") if "full_attention" in kinds else 0,)
        self.blocks = EngineBlocks(index, len(groups))
        of_sglang = not members and scheduler.hash_algorithm == SGLANG_HASH
        pages = partial(describe, scheduler.instance_id) if describe is not None and of_sglang else None
        self._stream = EngineStream(self.blocks, groups, pages, scheduler.hash_block_tokens)
        self._context = context
        self._topic = scheduler.events_topic.encode()
        self._replay_endpoint = scheduler.events_replay_endpoint
        if unreadable(self._replay_endpoint):
            self._replay_endpoint = ""
        self._waiting_batch: tuple[int, bytes] | None = None  # received; batches before it are missing
        self._replay: Socket | None = None
        self._replay_ends = 0.0  # unless another message arrives
        self._replay_after = 0.0
        self._events = self._socket(zmq.SUB, _QUEUED_MESSAGES)
        self._events.setsockopt(zmq.SUBSCRIBE, self._topic)

    def _socket(self, kind: int, messages: int) -> Socket:
        socket = self._context.socket(kind)
        for option, value in ((zmq.LINGER, 0), (zmq.RCVHWM, messages), (zmq.MAXMSGSIZE, _MOST_BYTES), (zmq.IPV6, 1)):
            socket.setsockopt(option, value)
        return socket

    def connect(self) -> None:
        """ZMQError if an endpoint is invalid."""
        self._events.connect(self.scheduler.events_endpoint)
        if self._replay_endpoint:
            self._request_replay()

    def waits_for(self, now: float) -> tuple[Socket | None, float]:
        """The socket to poll, and until when at most."""
        if self._replay is not None:
            return self._replay, self._replay_ends
        if self._waiting_batch is not None:
            return None, self._replay_after
        return self._events, now + 1.0

    def read_turn(self, now: float) -> bool:
        """Read up to _MESSAGES_PER_TURN messages. True if there may be more."""
        if self._replay is not None:
            return self._read_replay(self._replay, now)
        if self._waiting_batch is not None:
            if now >= self._replay_after:
                self._request_replay()
            return False
        for _ in range(_MESSAGES_PER_TURN):
            frames = _received(self._events)
            if frames is None:
                return False
            if len(frames) != 3 or len(frames[1]) != _NUMBER_BYTES:
                self._stream.malformed += 1
            elif frames[0] == self._topic:
                number, payload = int.from_bytes(frames[1], "big"), frames[2]
                if not self._stream.apply_batch(number, payload, final=not self._replay_endpoint):
                    self._waiting_batch = number, payload
                    return True
        return True

    def _request_replay(self) -> None:
        """Request all batches from the next one on. A new socket for each replay: it cannot receive an earlier one's messages."""
        now = time.monotonic()
        self._replay = self._socket(zmq.DEALER, _REPLAYED_MESSAGES)
        self._replay.connect(self._replay_endpoint)
        self._replay.send_multipart([b"", self._stream.next.to_bytes(_NUMBER_BYTES, "big")])
        self._replay_ends = now + _REPLAY_SECONDS
        self._replay_after = now + _REPLAY_EVERY_SECONDS

    def _read_replay(self, replay: Socket, now: float) -> bool:
        for _ in range(_MESSAGES_PER_TURN):
            frames = _received(replay)
            if frames is None:
                if now >= self._replay_ends:
                    self._end_replay(replay)
                return False
            self._replay_ends = now + _REPLAY_SECONDS
            if len(frames) < 3 or len(frames[-2]) != _NUMBER_BYTES:  # older engines send no topic
                self._stream.malformed += 1
            elif frames[-2] == _REPLAY_END:
                self._end_replay(replay)
                return True
            else:
                self._stream.apply_batch(int.from_bytes(frames[-2], "big"), frames[-1], final=True)
        return True

    def _end_replay(self, replay: Socket) -> None:
        replay.close(0)
        self._replay = None
        if self._waiting_batch is not None:
            self._stream.apply_batch(*self._waiting_batch, final=True)
            self._waiting_batch = None

    def status(self) -> EngineEventsStatus:
        found = self._stream.status()
        state = "failed" if self.failure else found.state
        return replace(found, state=state, endpoint=self.scheduler.events_endpoint, replay=bool(self._replay_endpoint))

    def close(self) -> None:
        self._events.close(0)
        if self._replay is not None:
            self._replay.close(0)
        self.blocks.close()


def _received(socket: Socket) -> list[bytes] | None:
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
