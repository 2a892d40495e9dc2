"""A connection to the `.fd` socket that sent nothing, or brought memory that it never registered, was kept for as long as it liked:
1,024 of them shut out every worker, and each holds up to 251 descriptors."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import pytest
from support.daemon import wait_until
from support.server import L1_BYTES, PAGE_BYTES, running_server
from support.worker import Worker

from kvserver._native import CpuDevice, HostRegion
from kvserver.copy import Devices
from kvserver.engines import lifeline
from kvserver.protocol.client import Attachment


def unregistered() -> int:
    """Descriptors of the memory that was never registered: the server is in this process."""
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            count += "test-unregistered" in os.readlink(link)
    return count


def test_silent_connection_is_closed_and_that_of_a_worker_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lifeline.SILENT_SECONDS > 5, "a slow worker has time"
    monkeypatch.setattr(lifeline, "SILENT_SECONDS", 2.0)
    devices = Devices(CpuDevice(HostRegion(L1_BYTES), PAGE_BYTES, 1))
    with (
        running_server(devices) as running,
        Worker(running.endpoint) as worker,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent,
    ):
        memory = os.memfd_create("test-unregistered")
        path = worker.hello.fd_path
        silent.connect(path)
        attached = Attachment(path, worker.hello.token, [memory] * 100)
        os.close(memory)
        lifelines = running.parts.lifelines
        wait_until(lambda: len(lifelines) == 3)
        assert unregistered() == 100
        silent.settimeout(25)
        assert silent.recv(16) == b""
        wait_until(lambda: not attached.alive(), 5)
        attached.close()
        wait_until(lambda: unregistered() == 0)
        assert len(lifelines) == 1
        worker.round_trip()
