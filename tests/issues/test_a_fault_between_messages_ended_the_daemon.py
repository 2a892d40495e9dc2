"""A fault while a message was handled became its reply, but one in what the loop does between messages ended the loop, and with
it the cache of every engine.
"""

from __future__ import annotations

import pytest
from support.daemon import wait_until
from support.server import L1_BYTES, PAGE_BYTES, running_server
from support.worker import Worker, make_keys

from kvserver._native import CpuDevice, HostRegion
from kvserver.copy import Devices


@pytest.mark.parametrize("part", ["upkeep.tick", "upkeep.step", "upkeep.audit_if_idle", "lifelines.accept"])
def test_the_loop_goes_on_and_the_fault_is_counted(monkeypatch, caplog, part):
    owner_name, name = part.split(".")
    with running_server(Devices(CpuDevice(HostRegion(L1_BYTES), PAGE_BYTES, 1))) as running:
        server, owner = running.server, getattr(running.parts, owner_name)
        right, faults = getattr(owner, name), []

        def raise_once():
            if not faults:
                faults.append(part)
                raise RuntimeError("planted")
            return right()

        raise_once.__name__ = name
        errors = server.rpc.errors["internal", "loop"]
        monkeypatch.setattr(owner, name, raise_once)
        worker = Worker(running.endpoint)  # connects, registers: the loop turns
        try:
            wait_until(lambda: faults)
            wait_until(lambda: server.rpc.errors["internal", "loop"] == errors + 1)
            assert worker.lookup(make_keys(1)) == 0
        finally:
            worker.close()
    assert "planted" in caplog.text
