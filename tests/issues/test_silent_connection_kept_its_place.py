"""A connection to the `.fd` socket that sent nothing, or brought memory that it never registered, was kept for as long as it liked:
1,024 of them shut out every worker, and each holds up to 251 descriptors."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

from support.daemon import Daemon, wait_until
from support.worker import Worker

from kvserver.protocol.client import Attachment


def test_who_does_not_register_is_hung_up_on_and_a_worker_is_not(
    make_daemon: Callable[..., Daemon], make_worker: Callable[..., Worker]
) -> None:
    daemon = make_daemon()
    worker = make_worker(daemon)
    memory = os.memfd_create("test-unregistered")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.connect(str(daemon.sockets[1]))
        attached = Attachment(str(daemon.sockets[1]), worker.hello.token, [memory] * 100)
        os.close(memory)
        began = time.monotonic()
        wait_until(lambda: daemon.accounting()["attachments"] == 3)
        before = daemon.open_memfds()
        silent.settimeout(25)
        assert silent.recv(16) == b""
        assert time.monotonic() - began > 5, "a slow worker has time"
        wait_until(lambda: not attached.alive(), 5)
        attached.close()
    assert daemon.open_memfds() == before - 100
    assert daemon.accounting()["attachments"] == 1
    worker.round_trip()
