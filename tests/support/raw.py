"""A DEALER socket that sends whatever frames a test wants."""

from __future__ import annotations

import msgspec
import zmq

from kvserver.protocol import Error, Reply, decode_reply

from .leftovers import closed, opened

REQUEST_ID = b"\x01\x02\x03\x04\x05\x06\x07\x08"


class RawPeer:
    """REQUIRES: closed by its user (it is a context manager)."""

    def __init__(self, endpoint: str, high_water_mark: int = 1000) -> None:
        self._context = zmq.Context()
        opened(self)
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, high_water_mark)
        self.socket.setsockopt(zmq.RCVHWM, high_water_mark)
        self.socket.connect(endpoint)

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def receive(self, seconds: float = 30.0) -> tuple[bytes, Reply]:
        """(request id, reply). TimeoutError if none comes."""
        if not self.socket.poll(int(seconds * 1000), zmq.POLLIN):
            raise TimeoutError(f"no reply within {seconds} s")
        request_id, raw = self.socket.recv_multipart()
        return request_id, decode_reply(raw)

    def error(self, *frames: bytes) -> Error:
        """Send these frames; the error that answers them."""
        self.send(*frames)
        reply = self.receive()[1]
        assert isinstance(reply, Error), reply
        return reply

    def error_of(self, content: object) -> Error:
        """Send this as msgpack; the error that answers it."""
        return self.error(REQUEST_ID, content if isinstance(content, bytes) else msgspec.msgpack.encode(content))

    def close(self) -> None:
        self._context.destroy(linger=0)
        closed(self)

    def __enter__(self) -> RawPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
