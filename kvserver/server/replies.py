"""The way of a reply: from the part that answers a request to the socket, at once or when a ticket ends.

Owns: sending on the ROUTER socket, and the counts of requests. Refuses to know: how requests are read, and what they mean.
Runs in the loop's thread; nothing here blocks.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import zmq

from kvserver.events import Bus, ErrorSent
from kvserver.protocol import Error, Reply, encode
from kvserver.telemetry import UNREADABLE, Rpc

log = logging.getLogger(__name__)

_LAST = int(zmq.NOBLOCK)  # plain numbers: each | of zmq's own flags costs half a microsecond
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


class Replies:
    def __init__(self, router: zmq.Socket[bytes], bus: Bus) -> None:
        self.rpc = Rpc()
        self._send = router.send
        self._bus = bus

    def send(self, call: Call, reply: Reply) -> None:
        """Send without waiting: a peer that disconnected or does not read loses its replies, and no other peer does."""
        if isinstance(reply, Error):
            self.rpc.errors[reply.code, call.type_name] += 1
            self._bus.publish(ErrorSent(time.monotonic_ns(), call.type_name, reply.code))
            log.debug("%s: %s: %s", call.type_name, reply.code, reply.message)
        self.rpc.observe(call.type_name, time.monotonic() - call.started)
        raw = encode(reply)
        try:  # in a third of send_multipart's time; only the first frame can fail
            self._send(call.peer, _MORE)
            self._send(call.request_id, _MORE)
            self._send(raw, _LAST)
        except zmq.ZMQError:
            self.rpc.undelivered += 1


@dataclass(slots=True)
class Call:
    """A request on its way to exactly one reply."""

    replies: Replies
    peer: bytes
    request_id: bytes
    started: float
    type_name: str = UNREADABLE
    answered: bool = False

    def respond(self, reply: Reply) -> None:
        assert not self.answered, f"a second reply to {self.type_name}"
        self.answered = True
        self.replies.send(self, reply)
