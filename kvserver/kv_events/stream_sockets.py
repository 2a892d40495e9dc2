"""Sockets of a stream: XPUB publishes its batches, ROUTER replays batches that a subscriber missed.

Nothing here waits. A batch that does not fit into a subscriber's queue is dropped for that subscriber, and a replay continues in
slices while its reader's queue has space.

A subscriber that waits for the address connects some time after the bind. So the first batches wait for a subscriber, at most
MOST_CONNECT_SECONDS; after one has connected they wait for others, until CONNECT_SECONDS have passed. Later batches wait for
nothing.

A new subscriber receives the stream's first batch, AllBlocksCleared, alone: a subscriber that knew an earlier daemon must forget
the blocks of that daemon.

Owns: addresses, binding, the framing of vLLM's publisher. Refuses to know: what is in a batch. One thread uses it.
"""

from __future__ import annotations

import logging
import re
import time
from dataclasses import dataclass

import zmq

from kvserver.config import SocketFile, parse_events_endpoint
from kvserver.config.listen_gate import ListenGate
from kvserver.kv_events.stream import Batch, Stream, fill
from kvserver.kv_events.wire import batch

log = logging.getLogger(__name__)

_SEND_MESSAGES = 1000  # queued for each subscriber; it can request a replay of those it misses
_REPLAY_MESSAGES = 100  # queued for each reader of a replay
_MOST_REPLAYS = 64
_MOST_REQUEST_BYTES = 4096  # of a subscription or a replay request; a longer one ends the connection
_SLICE = 16  # batches replayed, or messages received, in one turn
_STUCK_SECONDS = 30.0  # without progress; then the replay ends
RETRY_SECONDS = 5.0
CONNECT_SECONDS = 0.5  # libzmq tries again after 0.1 to 0.2 s by default,
MOST_CONNECT_SECONDS = 6.0  # Dynamo 1.6.1 after 5.1 s at most
_END = (-1).to_bytes(8, "big", signed=True)


def nth_endpoint(text: str, number: int, model_name: str, form: str) -> str:
    """The address of stream `number`: each has its own path, or a port two higher. ValueError if there is no such port."""
    parsed = parse_events_endpoint(text)
    assert parsed is not None
    address, port = parsed
    if address.startswith("tcp://"):
        if port + 2 * number > 65535:
            raise ValueError(f"there is no port {port + 2 * number}")
        return f"{address}:{port + 2 * number if port else 0}"
    named = fill(address, model=_file_name(model_name), form=form)
    return named if named != address or not number else f"{address}-{number}"


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.-]", "_", text).lstrip(".")


@dataclass
class _Replay:
    """A replay in progress. `sequence`: the last batch that was queued."""

    sequence: int
    prefix: bytes  # of the requested topics
    queue: list[tuple[bytes, bytes, bytes]]  # messages to send next
    deadline: float


class StreamSockets:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], stream: Stream, number: int, urls: list[str]) -> None:
        """`urls`: the events' address, then the replay's if there is one."""
        self._context, self._stream, self._number, self._urls = context, stream, number, urls
        self._pub: zmq.Socket[bytes] | None = None
        self._router: zmq.Socket[bytes] | None = None
        self._files: list[tuple[zmq.Socket[bytes], SocketFile]] = []
        self._gates: list[ListenGate] = []
        self._retry_at = self._bound_at = 0.0
        self._replays: dict[bytes, _Replay] = {}
        self.endpoint = self.replay_endpoint = ""
        self.state = "starting"
        self.published = stream.first_sequence - 1
        self.subscriptions = 0
        self.bad_requests = self.replayed = 0
        self.wants_beat = False

    # ---- binding --------------------------------------------------------------------------------

    def open(self, taken: set[str]) -> list[zmq.Socket[bytes]]:
        """Bind what is not bound, or no longer at its path, at most every few seconds. Returns the sockets that are new.

        `taken`: addresses of other streams.
        """
        if time.monotonic() < self._retry_at:
            return []
        self._retry_at = time.monotonic() + RETRY_SECONDS
        if self._pub is not None:
            self._bind_again()
            return []
        made: list[zmq.Socket[bytes]] = []
        try:
            for kind, url in zip((zmq.XPUB, zmq.ROUTER), self._urls, strict=False):
                made.append(self._context.socket(kind))
                self._configure(made[-1], url)
                self._gates.append(ListenGate(made[-1]))
                own = nth_endpoint(url, self._number, self._stream.model_name, self._stream.form)
                self._bind(made[-1], f"{own}-{self._number}" if own in taken and own.startswith("ipc://") else own)
        except (zmq.ZMQError, OSError, ValueError) as error:
            self._close(made, 0)
            self._cannot_bind(url, error)
            return []
        self._pub, self._router = made[0], made[1] if made[1:] else None
        self._bound_at = time.monotonic()
        self.endpoint, *replay = [socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in made]
        self.replay_endpoint = "".join(replay)
        self.state = "bound"
        return made

    def _bind(self, socket: zmq.Socket[bytes], url: str) -> None:
        if not url.startswith("ipc://"):
            socket.bind(url)
            return
        file = SocketFile(url.removeprefix("ipc://"))
        file.bind(socket)
        self._files.append((socket, file))

    def _bind_again(self) -> None:
        """Subscribers that are connected stay so: what accepted them is not closed."""
        for socket, file in self._files:
            if not file.is_ours:
                try:
                    file.bind(socket)
                except (zmq.ZMQError, OSError) as error:
                    self._cannot_bind(f"ipc://{file.path}", error)
                    return
                log.warning("ipc://%s was removed or replaced, and is bound again", file.path)
        self.state = "bound"

    def _cannot_bind(self, url: str, error: Exception) -> None:
        if self.state != (state := f"cannot bind {url}: {error}"):
            name = self._stream.model_name
            log.error("KV events of %s (%s): %s", name, self._stream.form, state, extra={"model_name": name})
        self.state = state

    @staticmethod
    def _configure(socket: zmq.Socket[bytes], url: str) -> None:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, _MOST_REQUEST_BYTES)
        if socket.type == zmq.XPUB:
            socket.setsockopt(zmq.SNDHWM, _SEND_MESSAGES)
            socket.setsockopt(zmq.XPUB_MANUAL, 1)
        else:
            socket.setsockopt(zmq.SNDHWM, _REPLAY_MESSAGES)
            socket.setsockopt(zmq.RCVHWM, _REPLAY_MESSAGES)
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # so that sending to a full or dead reader is an error
        socket.setsockopt(zmq.IPV6, int("[" in url))

    def close(self, linger_ms: int) -> None:
        self._close([socket for socket in (self._pub, self._router) if socket is not None], linger_ms)

    def _close(self, sockets: list[zmq.Socket[bytes]], linger_ms: int) -> None:
        for gate in self._gates:
            gate.close()
        for socket in sockets:
            socket.close(linger_ms)
        for _, file in self._files:
            file.remove()
        self._gates, self._files = [], []

    # ---- publishing -----------------------------------------------------------------------------

    @property
    def connect_seconds(self) -> float:
        """Seconds for which batches are kept, so that subscribers can connect; fewer once there is one."""
        wait = CONNECT_SECONDS if self.subscriptions else MOST_CONNECT_SECONDS
        return max(0.0, self._bound_at + wait - time.monotonic())

    def publish(self, batches: list[Batch]) -> None:
        for each in batches:
            for topic, payload in each.messages:
                if self._pub is not None:
                    self._pub.send_multipart([topic, each.sequence.to_bytes(8, "big"), payload], zmq.NOBLOCK)
            self.published = each.sequence

    def receive_subscriptions(self, pinned: Batch) -> None:
        for _ in range(_SLICE if self._pub is not None else 0):
            assert self._pub is not None
            try:
                notice = self._pub.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            prefix = notice[1:]
            if notice[:1] == b"\1":
                self.subscriptions += 1
                self._pub.setsockopt(zmq.SUBSCRIBE, prefix)
                if self.published >= pinned.sequence:  # else the first batch is still to be published, to all
                    self._greet(prefix, pinned)
            elif notice[:1] == b"\0":
                self.subscriptions -= 1
                self._pub.setsockopt(zmq.UNSUBSCRIBE, prefix)

    def _greet(self, prefix: bytes, pinned: Batch) -> None:
        """Send the first batch to the newest subscriber alone. XPUB chooses receivers at the first frame: all, if it has left.

        XPUB reports a subscriber that has left, so if there is nothing to read after the first frame, the subscriber was
        there. Otherwise all subscribers may receive this message, and must not forget the blocks announced since: its
        payload is then an empty batch. An empty batch to all (the beat) follows soon: it shows the new subscriber a gap,
        on every topic that it subscribed to.
        """
        messages = [message for message in pinned.messages if message[0].startswith(prefix)]
        progressed = self.published > pinned.sequence
        self.wants_beat = self.wants_beat or len(messages) > 1 or progressed
        if not messages:
            return
        assert self._pub is not None
        topic, payload = messages[0]
        self._pub.setsockopt(zmq.XPUB_MANUAL_LAST_VALUE, 1)
        self._pub.send(topic, zmq.NOBLOCK | zmq.SNDMORE)
        alone = not self._pub.poll(0, zmq.POLLIN)
        payload = payload if alone or not progressed else batch(time.time(), [], 0)
        self._pub.send_multipart([pinned.sequence.to_bytes(8, "big"), payload], zmq.NOBLOCK)
        self._pub.setsockopt(zmq.XPUB_MANUAL_LAST_VALUE, 0)  # also ends manual mode, which the next line sets again
        self._pub.setsockopt(zmq.XPUB_MANUAL, 1)

    # ---- replay ---------------------------------------------------------------------------------

    @property
    def replaying(self) -> bool:
        return bool(self._replays)

    def receive_requests(self) -> None:
        """Frames of a request: identity, empty, first sequence in 8 bytes, and optionally a prefix of the wanted topics.

        A new request from a reader ends its earlier replay.
        """
        for _ in range(_SLICE if self._router is not None else 0):
            assert self._router is not None
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            fine = len(frames) in (3, 4) and not frames[1] and len(frames[2]) == 8
            if not fine or (len(self._replays) >= _MOST_REPLAYS and frames[0] not in self._replays):
                self.bad_requests += 1
                continue
            start, prefix = int.from_bytes(frames[2], "big"), b"".join(frames[3:])
            self._replays[frames[0]] = _Replay(start - 1, prefix, [], time.monotonic() + _STUCK_SECONDS)

    def next_batches(self) -> list[tuple[_Replay, list[Batch]]]:
        """The next batches of each replay; an empty list ends the replay. REQUIRES: the stream's lock."""
        return [
            (replay, self._stream.batches_after(replay.sequence, _SLICE))
            for replay in self._replays.values()
            if not replay.queue
        ]

    def replay(self, batches: list[tuple[_Replay, list[Batch]]]) -> bool:
        """Send a slice of each replay. True if any replay progressed."""
        for replay, found in batches:
            for each in found:
                number = each.sequence.to_bytes(8, "big")
                replay.queue += [(t, number, payload) for t, payload in each.messages if t.startswith(replay.prefix)]
                replay.sequence = each.sequence
            if not found:
                replay.queue.append((b"", _END, b""))
        ended = [identity for identity, replay in self._replays.items() if self._send(identity, replay)]
        moved = any(not replay.queue for replay in self._replays.values())
        for identity in ended:
            del self._replays[identity]
        return moved

    def _send(self, identity: bytes, replay: _Replay) -> bool:
        """True if the replay has ended."""
        assert self._router is not None
        sent = 0
        try:
            for message in replay.queue:
                self._router.send_multipart([identity, b"", *message], zmq.NOBLOCK)
                sent += 1
                if message[1] == _END:
                    return True
                self.replayed += 1
        except zmq.Again:
            pass
        except zmq.ZMQError:  # its reader has disconnected
            return True
        del replay.queue[:sent]
        if sent:
            replay.deadline = time.monotonic() + _STUCK_SECONDS
        return time.monotonic() > replay.deadline
