"""Reads the KV events that engines publish themselves: one thread, a subscription for each engine.

Owns: the sockets, whose turn it is, replays. Refuses to know: the events (`engine_wire`) and their order
(`engine_stream`).

An engine is heard at most so much in one turn, and a replay that brings nothing for a while is over, so one that floods
or hangs costs the others nothing. What is not read in time ZMQ drops at the engine, and is asked for again.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import queue
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import zmq

from kvserver._native import PrefixIndex
from kvserver.kv_events.engine_stream import EngineStream
from kvserver.kv_messages import DescribeScheduler

log = logging.getLogger(__name__)

_MESSAGES_PER_TURN = 32
_MOST_BYTES = 16 << 20  # of a message; vLLM's are some 8 bytes a token of one step
_QUEUED_MESSAGES = 256
_REPLAYED_MESSAGES = 20_000  # vLLM keeps 10,000 and drops those for which there is no room
_REPLAY_SECONDS = 2.0  # without a word
_REPLAY_EVERY_SECONDS = 1.0
_NUMBER_BYTES = 8
_REPLAY_END = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)
Socket = zmq.Socket[bytes]


def unreadable(endpoint: str) -> str:
    """Why an engine's endpoint is not connected to; "" if it is. The daemon connects to nothing beyond this machine."""
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


class _Holding:
    """What an engine holds, in the index. Without a free holder nothing is kept."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self.holder = index.open()

    def add(self, hashes: bytes) -> None:
        if self.holder >= 0:
            self._index.add(self.holder, hashes, 8)

    def remove(self, hashes: bytes) -> None:
        if self.holder >= 0:
            self._index.remove(self.holder, hashes, 8)

    def clear(self) -> None:
        if self.holder >= 0:
            self._index.clear(self.holder)

    def close(self) -> None:
        if self.holder >= 0:
            self._index.close(self.holder)
            self.holder = -1


class _Follower:
    """One engine. All of it runs in the thread, but for what status() reads."""

    def __init__(self, context: zmq.Context[Socket], index: PrefixIndex, scheduler: DescribeScheduler) -> None:
        self.scheduler = scheduler
        self.failure = ""
        self.holding = _Holding(index)
        kinds = [group.kind for group in scheduler.groups]
        group = kinds.index("full_attention") if "full_attention" in kinds else 0
        self._stream = EngineStream(self.holding, group, time.monotonic)
        self._context = context
        self._topic = scheduler.events_topic.encode()
        self._replay_endpoint = scheduler.events_replay_endpoint
        if unreadable(self._replay_endpoint):
            self._replay_endpoint = ""
        self._held: tuple[int, bytes] | None = None  # waits for what is missing before it
        self._replay: Socket | None = None
        self._replay_ends = 0.0  # unless more comes
        self._replay_after = 0.0
        self._events = self._connect(zmq.SUB, scheduler.events_endpoint, _QUEUED_MESSAGES)
        self._events.setsockopt(zmq.SUBSCRIBE, self._topic)
        if self._replay_endpoint:
            self._ask()

    def _connect(self, kind: int, endpoint: str, messages: int) -> Socket:
        socket = self._context.socket(kind)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.RCVHWM, messages),
            (zmq.MAXMSGSIZE, _MOST_BYTES),
            (zmq.IPV6, 1),
        ):
            socket.setsockopt(option, value)
        socket.connect(endpoint)
        return socket

    def waits_for(self, now: float) -> tuple[Socket | None, float]:
        """What to poll, and until when at most."""
        if self._replay is not None:
            return self._replay, self._replay_ends
        if self._held is not None:
            return None, self._replay_after
        return self._events, now + 1.0

    def turn(self, now: float) -> bool:
        """Take what came, up to a bound; True if there may be more."""
        if self._replay is not None:
            return self._read_replay(self._replay, now)
        if self._held is not None:
            if now >= self._replay_after:
                self._ask()
            return False
        for _ in range(_MESSAGES_PER_TURN):
            frames = _received(self._events)
            if frames is None:
                return False
            if len(frames) != 3 or len(frames[1]) != _NUMBER_BYTES:
                self._stream.count_malformed()
            elif frames[0] == self._topic:
                number, payload = int.from_bytes(frames[1], "big"), frames[2]
                if not self._stream.take(number, payload, final=not self._replay_endpoint):
                    self._held = number, payload
                    return True
        return True

    def _ask(self) -> None:
        """For all batches from the next one on. With a socket of its own, so that nothing late is taken for its answer."""
        now = time.monotonic()
        self._replay = self._connect(zmq.DEALER, self._replay_endpoint, _REPLAYED_MESSAGES)
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
            if len(frames) < 3 or len(frames[-2]) != _NUMBER_BYTES:  # older ones send no topic
                self._stream.count_malformed()
            elif frames[-2] == _REPLAY_END:
                self._end_replay(replay)
                return True
            else:
                self._stream.take(int.from_bytes(frames[-2], "big"), frames[-1], final=True)
        return True

    def _end_replay(self, replay: Socket) -> None:
        replay.close(0)
        self._replay = None
        if self._held is not None:
            self._stream.take(*self._held, final=True)
            self._held = None

    def status(self) -> dict[str, Any]:
        status = self._stream.status()
        if self.failure:
            status["state"] = "failed"
        elif self.holding.holder < 0:
            status["state"] = "no holder is free"
        return {"endpoint": self.scheduler.events_endpoint, "replay": bool(self._replay_endpoint), **status}

    def close(self) -> None:
        self._events.close(0)
        if self._replay is not None:
            self._replay.close(0)
        self.holding.close()


class EngineEvents:
    """REQUIRES: follow(), forget() and close() come from one thread; the rest may be called from any."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._followers: dict[str, _Follower] = {}  # changed by the thread only
        self._refused: dict[str, str] = {}
        self._orders: queue.SimpleQueue[tuple[str, DescribeScheduler | None] | None] = queue.SimpleQueue()
        self._read_wake, self._write_wake = os.pipe()
        for end in (self._read_wake, self._write_wake):
            os.set_blocking(end, False)
        self._thread: threading.Thread | None = None

    def follow(self, scheduler: DescribeScheduler) -> None:
        """From now on as it says here. Nothing is connected to that has no endpoint, or one elsewhere."""
        self._refused.pop(scheduler.instance_id, None)
        if not scheduler.events_endpoint:
            self.forget(scheduler.instance_id)
        elif reason := unreadable(scheduler.events_endpoint):
            self.forget(scheduler.instance_id)
            self._refused[scheduler.instance_id] = reason
        else:
            self._order(scheduler.instance_id, scheduler)

    def forget(self, instance_id: str) -> None:
        self._refused.pop(instance_id, None)
        if self._thread is not None:
            self._order(instance_id, None)

    def holder(self, instance_id: str) -> int:
        """Of the index; -1 where nothing is known."""
        follower = self._followers.get(instance_id)
        return follower.holding.holder if follower is not None else -1

    def status(self, instance_id: str) -> dict[str, Any] | None:
        """None of an engine that tells nothing."""
        if reason := self._refused.get(instance_id):
            return {"state": "refused", "reason": reason}
        follower = self._followers.get(instance_id)
        return follower.status() if follower is not None else None

    def close(self) -> None:
        if self._thread is not None:
            self._orders.put(None)
            self._wake()
            self._thread.join()
        os.close(self._read_wake)
        os.close(self._write_wake)

    def _order(self, instance_id: str, scheduler: DescribeScheduler | None) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="engine-events", daemon=True)
            self._thread.start()
        self._orders.put((instance_id, scheduler))
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is awake already
            os.write(self._write_wake, b"\1")

    # ---- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        context = zmq.Context[Socket](io_threads=1)
        more = False
        while self._obey(context):
            now = time.monotonic()
            waits = [f.waits_for(now) for f in self._followers.values() if not f.failure]
            until = min((end for _, end in waits), default=now + 1.0)
            sockets = [(socket, zmq.POLLIN) for socket, _ in waits if socket is not None]
            zmq.zmq_poll(
                [(self._read_wake, zmq.POLLIN), *sockets], 0 if more else max(0, int((until - now) * 1000) + 1)
            )
            now = time.monotonic()
            more = False
            for follower in self._followers.values():
                more |= not follower.failure and self._turn(follower, now)
        for follower in self._followers.values():
            follower.close()
        context.destroy(0)

    def _turn(self, follower: _Follower, now: float) -> bool:
        try:
            return follower.turn(now)
        except Exception as error:
            self._fail(follower, error)
            return False

    def _fail(self, follower: _Follower, error: Exception) -> None:
        follower.failure = f"{type(error).__name__}: {error}"
        follower.close()
        log.exception("the KV events of %s are read no more", follower.scheduler.instance_id)

    def _obey(self, context: zmq.Context[Socket]) -> bool:
        """Do what was ordered; False at the end."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._read_wake, 4096)
        while not self._orders.empty():
            order = self._orders.get()
            if order is None:
                return False
            instance_id, scheduler = order
            present = self._followers.get(instance_id)
            if present is not None and scheduler is not None and _same_stream(present.scheduler, scheduler):
                continue
            if present is not None:
                del self._followers[instance_id]
                present.close()
            if scheduler is not None:
                self._begin(context, scheduler)
        return True

    def _begin(self, context: zmq.Context[Socket], scheduler: DescribeScheduler) -> None:
        try:
            self._followers[scheduler.instance_id] = _Follower(context, self._index, scheduler)
        except zmq.ZMQError as error:
            log.warning("the KV events of %s at %s: %s", scheduler.instance_id, scheduler.events_endpoint, error)
            self._refused[scheduler.instance_id] = str(error)


def _same_stream(one: DescribeScheduler, other: DescribeScheduler) -> bool:
    names = ("incarnation", "groups", "events_endpoint", "events_replay_endpoint", "events_topic")
    return all(getattr(one, name) == getattr(other, name) for name in names)


def _received(socket: Socket) -> list[bytes] | None:
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
