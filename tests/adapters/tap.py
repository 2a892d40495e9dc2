"""A relay between engines and their daemon that keeps what the engines send, and may answer in the daemon's stead.

Owns: a socket beside the daemon's. Refuses to know: what the messages mean.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import zmq
from support.daemon import Daemon

from kvserver.protocol import (
    EndRequest,
    Reply,
    ReportBlockAllocations,
    Request,
    decode_reply,
    decode_request,
    encode,
)

T = TypeVar("T")


class Tap:
    """close() at the end. What it reads is in `received` before the daemon has it."""

    def __init__(self, daemon: Daemon) -> None:
        self.endpoint = daemon.endpoint + ".tap"
        self.received: list[Request] = []
        self.instead: Callable[[Request], Reply | None] = lambda message: None
        self.edit: Callable[[Reply], Reply] = lambda reply: reply
        self._daemon = daemon.endpoint
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(self.endpoint)
        self._dealers: dict[bytes, zmq.Socket[bytes]] = {}  # by the engine's socket
        self._ends = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def of(self, kind: type[T]) -> list[T]:
        """Every message of this kind, in their order."""
        return [message for message in self.received if isinstance(message, kind)]

    def notices(self, instance_id: str | None = None) -> list[ReportBlockAllocations | EndRequest]:
        """Reports and ends, of one engine or of all."""
        found = [m for m in self.received if isinstance(m, (ReportBlockAllocations, EndRequest))]
        return [m for m in found if instance_id in (None, m.instance_id)]

    def close(self) -> None:
        self._ends = True
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        while not self._ends:
            poller = zmq.Poller()
            for socket in (self._router, *self._dealers.values()):
                poller.register(socket, zmq.POLLIN)
            ready = dict(poller.poll(20))
            for engine, dealer in list(self._dealers.items()):
                if dealer in ready:
                    number, raw = dealer.recv_multipart()
                    self._router.send_multipart([engine, number, encode(self.edit(decode_reply(raw)))])
            if self._router in ready:
                self._forward(*self._router.recv_multipart())

    def _forward(self, engine: bytes, number: bytes, raw: bytes) -> None:
        message = decode_request(raw)
        self.received.append(message)
        if (reply := self.instead(message)) is not None:
            self._router.send_multipart([engine, number, encode(reply)])
            return
        if engine not in self._dealers:
            self._dealers[engine] = self._context.socket(zmq.DEALER)
            self._dealers[engine].connect(self._daemon)
        self._dealers[engine].send_multipart([number, raw])
