"""A dispatcher and, at the other end of its channel, a socket that a test reads and writes for the daemon."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import zmq

from kvserver.adapters.common.dispatcher import Dispatcher
from kvserver.adapters.common.faults import Faults
from kvserver.adapters.common.link import Breaker, Session
from kvserver.protocol import PROTOCOL_VERSION, HelloReply, Reply, Request, decode_request, encode
from kvserver.protocol.client import Channel


class CountedChannel(Channel):
    sent = 0

    def send(self, request: Request) -> int | None:
        number = super().send(request)
        self.sent += number is not None
        return number


class SetLink:
    """A link whose session a test sets."""

    def __init__(self, endpoint: str) -> None:
        self.session: Session | None = None
        self.breaker = Breaker(lambda: None)
        self._endpoint = endpoint

    def connect(self) -> Channel:
        """A new session."""
        channel = CountedChannel(self._endpoint)
        self.session = Session(HelloReply(PROTOCOL_VERSION, "0", "boot", 64, "", ""), channel)
        return channel

    def usable(self) -> Session | None:
        return self.session

    def refresh(self) -> None:
        """There is one daemon only."""


class Peer:
    """listen() before messages can be received."""

    def __init__(self, folder: Path) -> None:
        self.counters: Counter[str] = Counter()
        self.endpoint = f"ipc://{folder}/peer"
        self.link = SetLink(self.endpoint)
        self._faults = Faults()
        self.dispatcher = Dispatcher(self.link, self.counters, self._faults)
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)

    def listen(self) -> None:
        self._router.bind(self.endpoint)

    @property
    def sent(self) -> int:
        """The requests of this session so far."""
        channel = self.link.session.channel if self.link.session is not None else None
        return channel.sent if isinstance(channel, CountedChannel) else 0

    def receive(self, seconds: float) -> tuple[Any, Request] | None:
        """(what reply() needs, the message)."""
        if not self._router.poll(int(seconds * 1000)):
            return None
        identity, number, raw = self._router.recv_multipart()
        return (identity, number), decode_request(raw)

    def reply(self, to: Any, reply: Reply) -> None:
        """And wait until the dispatcher has passed it on."""
        self._router.send_multipart([*to, encode(reply)])
        assert self.dispatcher.wait(5)
        self.dispatcher.receive()

    def close(self) -> None:
        self.dispatcher.close()
        self._context.destroy(linger=0)
        assert not self._faults.counts
