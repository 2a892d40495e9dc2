"""A half that sent Hello to a daemon as it ended waited 2 s for the answer, while the next daemon was there. The scheduler half went on in the
former session meanwhile: it reported that its cache was on, and each lookup could be a miss after its whole timeout.

Rule: who awaits an answer watches the connection that would bring it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from support.daemon import Daemon, wait_until

from kvserver.adapters.common import link as links
from kvserver.adapters.common.cache_status import CONNECTED
from kvserver.adapters.common.link import Link
from kvserver.protocol.client import Channel, WatchedClient


@pytest.fixture
def router(tmp_path: Path) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(f"ipc://{tmp_path}/kv.sock")
    yield router
    context.destroy(0)


def test_a_question_is_over_when_its_connection_is(router: zmq.Socket[bytes], tmp_path: Path) -> None:
    def read_and_end() -> None:
        router.recv_multipart()
        router.close(0)

    server = threading.Thread(target=read_and_end)
    server.start()
    client = WatchedClient(f"ipc://{tmp_path}/kv.sock", timeout=60)
    with client, pytest.raises(ConnectionResetError):
        client.hello()
    server.join()


def test_a_session_is_over_when_its_daemon_is_though_the_next_one_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links, "_HELLO_SECONDS", 60.0)
    daemon, context = Daemon().start(), zmq.Context()
    link = Link(daemon.endpoint, "scheduler")
    try:
        link.start(20)
        assert link.cache_status is CONNECTED
        daemon.kill()
        context.socket(zmq.ROUTER).bind(daemon.endpoint)  # of a daemon that does not come to answer
        wait_until(lambda: link.usable() is None)
        assert link.cache_status is not CONNECTED
    finally:
        context.destroy(0)
        link.stop()
        daemon.close()


def test_a_half_whose_second_connection_is_not_accepted_has_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unconnected(Channel):
        def wait_writable(self, seconds: float) -> bool:
            return False

    monkeypatch.setattr(links, "Channel", Unconnected)  # the session's, not the one that sends Hello
    daemon = Daemon().start()
    link = Link(daemon.endpoint, "scheduler")
    try:
        link.start(20)
        assert link.usable() is None
        assert link.cache_status.reason == "no_answer"
    finally:
        link.stop()
        daemon.close()
