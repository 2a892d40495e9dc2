"""A client that was cut off in the middle of its headers had its request carried out: the cache was cleared by half a request."""

from __future__ import annotations

import socket

import pytest
from support.daemon import Daemon, wait_until
from support.worker import Worker, make_keys

CLEAR = b"POST /cache/clear HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize("sent", [CLEAR, CLEAR + b"Origin: http://else", CLEAR + b"X-A: b\r\n", CLEAR[:-2], CLEAR[:24]])
def test_half_a_request_is_not_carried_out(daemon: Daemon, worker: Worker, sent: bytes) -> None:
    worker.store(make_keys(1), worker.blocks_for(1))
    with socket.create_connection(("127.0.0.1", daemon.http_port), timeout=5) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(4096) == b""
    assert daemon.status()["l1"]["chunks"] == 1


def test_half_a_body_is_not_an_answer_of_the_index(daemon: Daemon) -> None:
    head = b"POST /kv/match HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 40\r\n\r\n"
    with socket.create_connection(("127.0.0.1", daemon.http_port), timeout=5) as connection:
        connection.sendall(head + b'{"block_hashes": []}')
        connection.shutdown(socket.SHUT_WR)
        answer = connection.recv(4096)
    assert answer.split()[1] == b"400"
    assert b"ended early" in answer
    wait_until(lambda: daemon.status()["http"]["connections"] == 1)
