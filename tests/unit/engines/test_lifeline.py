"""The `.fd` socket: who may attach, and that descriptors are closed that no worker claims."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator

import msgspec
import pytest

from kvserver.config import SocketFile
from kvserver.engines import Lifelines
from kvserver.protocol import (
    PROTOCOL_VERSION,
    Attach,
    Attached,
    Error,
    ErrorCode,
    Hello,
    KVServerError,
    decode_attach_reply,
    encode,
)

ATTACH = encode(Attach(token="token"))


@pytest.fixture
def lifelines() -> Iterator[Lifelines]:
    with tempfile.TemporaryDirectory(prefix="kvs-") as folder:
        lifelines = Lifelines(SocketFile(f"{folder}/fd", socket.SOCK_SEQPACKET), "token")
        yield lifelines
        lifelines.shut()


@pytest.fixture
def peer(lifelines: Lifelines) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.settimeout(10)
        peer.connect(lifelines.path)
        assert lifelines.accept() is not None
        yield peer


@pytest.fixture
def memory() -> Iterator[int]:
    fd = os.memfd_create("test-lifeline")
    yield fd
    os.close(fd)


def others_open() -> int:
    """Descriptors of the memory, without the test's own."""
    links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return sum("memfd:test-lifeline" in link for link in links) - 1


def read(lifelines: Lifelines) -> bool:
    """The server reads from its only connection. Whether that has ended."""
    return lifelines.read(lifelines.connection_fds()[0]) is not None


def attached(lifelines: Lifelines, peer: socket.socket, fds: list[int]) -> int:
    """The number of the attachment."""
    socket.send_fds(peer, [ATTACH], fds)
    assert not read(lifelines)
    reply = decode_attach_reply(peer.recv(4096))
    assert isinstance(reply, Attached)
    return reply.attachment


REFUSED = {
    "HTTP": (b"GET / HTTP/1.1", "bad_message"),
    "a number": (b"\x00", "bad_message"),
    "a map that is cut off": (b"\x81", "bad_message"),
    "Hello": (encode(Hello(protocol_version=PROTOCOL_VERSION)), "bad_message"),
    "nested lists": (b"\x82\xa4type\xa6Attach\xa1x" + b"\x91" * 4000, "bad_message"),
    "a long type": (msgspec.msgpack.encode({"type": "N" * 3900}), "bad_message"),
    "a token that is a number": (msgspec.msgpack.encode({"type": "Attach", "token": 7}), "bad_message"),
    "no token": (msgspec.msgpack.encode({"type": "Attach"}), "bad_message"),
    "another token": (encode(Attach(token="guessed")), "bad_token"),
    "more than an attach": (ATTACH + bytes(5000), "too_large"),
}


@pytest.mark.parametrize(("raw", "code"), REFUSED.values(), ids=REFUSED)
def test_message_other_than_attach_with_the_token_gets_an_error_and_is_disconnected(
    lifelines: Lifelines, peer: socket.socket, memory: int, raw: bytes, code: str
) -> None:
    socket.send_fds(peer, [raw], [memory])
    assert read(lifelines)
    reply = decode_attach_reply(peer.recv(65536))
    assert isinstance(reply, Error)
    assert reply.code == code
    assert len(reply.message) < 2000
    assert peer.recv(16) == b""
    assert (others_open(), lifelines.refused) == (0, {code: 1})


def test_too_many_descriptors_are_refused_and_closed(lifelines: Lifelines, peer: socket.socket, memory: int) -> None:
    socket.send_fds(peer, [ATTACH], [memory] * 253)
    assert read(lifelines)
    reply = decode_attach_reply(peer.recv(4096))
    assert isinstance(reply, Error)
    assert (reply.code, "at most 251 descriptors" in reply.message) == ("too_large", True)
    assert others_open() == 0


def test_descriptors_that_no_worker_claims_are_closed_with_their_connection(
    lifelines: Lifelines, peer: socket.socket, memory: int
) -> None:
    attached(lifelines, peer, [memory] * 200)
    assert others_open() == 200
    peer.close()
    assert read(lifelines)
    assert others_open() == 0


def test_what_comes_after_attach_is_ignored(lifelines: Lifelines, peer: socket.socket, memory: int) -> None:
    number = attached(lifelines, peer, [memory])
    for _ in range(20):
        socket.send_fds(peer, [b"noise"], [memory] * 10)
        assert not read(lifelines)
    assert others_open() == 1
    assert len(lifelines.unused(number).fds) == 1


def test_an_attachment_serves_one_registration(lifelines: Lifelines, peer: socket.socket) -> None:
    number = attached(lifelines, peer, [])
    lifelines.unused(number).registration = 1
    for wrong in (number, number + 1):
        with pytest.raises(KVServerError, match=f"attachment {wrong} is unknown, ended or used") as caught:
            lifelines.unused(wrong)
        assert caught.value.code is ErrorCode.UNKNOWN_ATTACHMENT


def test_a_connection_that_has_not_attached_serves_none(lifelines: Lifelines, peer: socket.socket) -> None:
    with pytest.raises(KVServerError, match="attachment 1 is unknown"):
        lifelines.unused(1)
