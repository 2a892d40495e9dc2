"""The gate before listening ZMQ sockets, with the libzmq that is installed: one that the gate does not know fails here."""

from __future__ import annotations

import contextlib
import logging
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from support.daemon import wait_until

from kvserver.config import SocketFile, listen_gate
from kvserver.config.listen_gate import ListenGate

URLS = ["ipc", "tcp://127.0.0.1:*"]


class Bound:
    """A ROUTER behind a gate."""

    def __init__(self, folder: str, url: str, kind: int = zmq.ROUTER) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.connected: list[zmq.Socket[bytes]] = []
        self.peers: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(kind)
        self.gate = ListenGate(self.socket)
        self.file = SocketFile(f"{folder}/s") if url == "ipc" else None
        if self.file is not None:
            self.file.bind(self.socket)
        else:
            self.socket.bind(url)

    def connect(self) -> None:
        """One more peer connects, and sends a message."""
        peer = self.peers.socket(zmq.DEALER)
        peer.setsockopt(zmq.LINGER, 0)
        peer.connect(self.socket.getsockopt_string(zmq.LAST_ENDPOINT))
        peer.send(b"hello")
        self.connected.append(peer)

    def received(self, seconds: float) -> bool:
        if not self.socket.poll(int(seconds * 1000)):
            return False
        self.socket.recv_multipart()
        return True

    def wait_for_gate(self, listeners: int = 1) -> None:
        wait_until(lambda: self.gate.gated == listeners, what="libzmq's listener in an epoll set")

    def close(self) -> None:
        self.peers.destroy(0)
        self.gate.close()
        self.context.destroy(0)


@pytest.fixture(params=URLS)
def bound(request: pytest.FixtureRequest) -> Iterator[Bound]:
    with (
        tempfile.TemporaryDirectory(prefix="kvs-") as folder,
        contextlib.closing(Bound(folder, request.param)) as bound,
    ):
        yield bound


def _shut(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Descriptors are free once the event is set."""
    free = threading.Event()
    monkeypatch.setattr(listen_gate, "has_free_descriptors", lambda wanted: free.is_set())
    return free


def test_a_client_waits_until_descriptors_are_free(bound: Bound, monkeypatch: pytest.MonkeyPatch) -> None:
    bound.wait_for_gate()
    free = _shut(monkeypatch)
    bound.connect()
    assert not bound.received(0.5)
    free.set()
    assert bound.received(10)


def test_each_connection_is_looked_at(bound: Bound, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    bound.wait_for_gate()
    monkeypatch.setattr(listen_gate, "has_free_descriptors", lambda wanted: not looks.append(wanted))
    for _ in range(20):
        bound.connect()
    assert all(bound.received(10) for _ in range(20))
    assert len(looks) >= 20


def test_a_listener_that_was_added_is_gated_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="kvs-") as folder, contextlib.closing(Bound(folder, "ipc")) as bound:
        assert bound.file is not None
        Path(bound.file.path).unlink()
        bound.file.bind(bound.socket)
        bound.wait_for_gate(2)
        free = _shut(monkeypatch)
        bound.connect()
        assert not bound.received(0.5)
        free.set()
        assert bound.received(10)


def test_an_idle_gate_does_not_wake(bound: Bound) -> None:
    bound.connect()
    assert bound.received(10)
    bound.wait_for_gate()
    (thread,) = [each for each in threading.enumerate() if each.name == "listen-gate"]
    status = Path(f"/proc/self/task/{thread.native_id}/status")
    switches = lambda: [line for line in status.read_text().splitlines() if "ctxt_switches" in line]  # noqa: E731
    assert not bound.received(0.3)
    before = switches()
    assert not bound.received(1.0)
    assert switches() == before


def test_without_a_view_of_the_epoll_set_clients_connect_and_a_warning_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listen_gate, "_entry_of", lambda listener: None)
    monkeypatch.setattr(listen_gate, "_PLUG_SECONDS", 0.0)
    with (
        caplog.at_level(logging.WARNING),
        tempfile.TemporaryDirectory(prefix="kvs-") as folder,
        contextlib.closing(Bound(folder, "ipc")) as bound,
    ):
        bound.connect()
        assert bound.received(10)
    assert "are not bounded by free descriptors" in caplog.text
