"""The end of an answer of more than 8 KiB waited for the client's delayed acknowledgement: each scrape on a kept connection took
40 ms more, and so did each large /status."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
from collections.abc import Iterator

from support.server import L1_BYTES, PAGE_BYTES, running_server

from kvserver._native import CpuDevice, HostRegion
from kvserver.copy import Devices


def own_sockets() -> Iterator[socket.socket]:
    """The TCP sockets of this process, in which the server is."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # of a descriptor that was closed meanwhile
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as found:
                    if found.family == socket.AF_INET and found.type == socket.SOCK_STREAM:
                        yield found


def test_an_accepted_connection_sends_without_waiting_for_acknowledgements() -> None:
    with running_server(Devices(CpuDevice(HostRegion(L1_BYTES), PAGE_BYTES, 1))) as running:
        client = http.client.HTTPConnection("127.0.0.1", running.pages.port, timeout=10)
        client.request("GET", "/metrics")
        assert len(client.getresponse().read()) > 8192, "else one segment has the whole answer"
        assert client.sock is not None
        here, there = client.sock.getsockname(), client.sock.getpeername()
        (flag,) = (
            each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            for each in own_sockets()
            if each.getsockname() == there
            and each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 0
            and each.getpeername() == here
        )
        client.close()
    assert flag
