"""An engine sends something every second, so the daemon never had the second of quiet that it waited for before it audited its
accounting: the alert on accounting failures could not fire while engines were connected.
"""

from __future__ import annotations

import time

import msgspec
from support.daemon import wait_until
from support.server import L1_BYTES, PAGE_BYTES, running_server
from support.worker import Worker, make_keys

from kvserver._native import CpuDevice, HostRegion
from kvserver.copy import Devices
from kvserver.protocol import Status, StatusReply
from kvserver.protocol.status import AccountingStatus, DaemonStatus

_BETWEEN_SECONDS = 0.3  # more than the quiet before an audit


def accounting(worker: Worker) -> AccountingStatus:
    """Asked as an engine asks: the message itself ends the quiet."""
    time.sleep(_BETWEEN_SECONDS)
    return msgspec.msgpack.decode(worker.ask(Status(), StatusReply).status, type=DaemonStatus).books


def test_an_engine_that_always_sends_something_does_not_keep_the_daemon_from_audits() -> None:
    with running_server(Devices(CpuDevice(HostRegion(L1_BYTES), PAGE_BYTES, 1))) as running:
        running.parts.upkeep.audit_seconds = 2 * _BETWEEN_SECONDS
        with Worker(running.endpoint) as worker:
            keys = make_keys(2)
            worker.store(keys, worker.blocks_for(2))
            first = wait_until(lambda: accounting(worker).audits, 20, "an audit")
            wait_until(lambda: accounting(worker).audits > first, 30, "another one")
            assert accounting(worker).unbalanced == 0
