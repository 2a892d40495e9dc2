"""A peer disconnects before its reply: it is counted, and no other peer notices."""

from __future__ import annotations

import json
from typing import Any

from support.daemon import fetch, wait_until
from support.server import L1_BYTES, PAGE_BYTES, Running, running_server
from support.worker import Worker, make_keys

from kvserver._native import CpuDevice, HostRegion
from kvserver.copy import Devices
from kvserver.protocol import Stored


class Late:
    """A real device that begins copies when the test releases them."""

    def __init__(self) -> None:
        self.jobs: list[dict[str, Any]] = []
        self._device: Any = CpuDevice(HostRegion(L1_BYTES), PAGE_BYTES, 1)

    def submit_copy(self, **job: Any) -> None:
        self.jobs.append(job)

    def release(self) -> None:
        while self.jobs:
            self._device.submit_copy(**self.jobs.pop())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


def undelivered_replies(running: Running) -> int:
    found: int = json.loads(fetch(f"http://127.0.0.1:{running.pages.port}/status")[1])["totals"]["undelivered_replies"]
    return found


def test_a_peer_that_disconnects_before_its_reply_hurts_no_other() -> None:
    device: Any = Late()
    with (
        running_server(Devices(device)) as running,
        Worker(running.endpoint) as leaving,
        Worker(running.endpoint) as other,
    ):
        leaving.begin_store(make_keys(1), leaving.blocks_for(1))
        wait_until(lambda: device.jobs)
        leaving.client.close()  # the lifeline is open: the copy goes on, its reply has nowhere to go
        other.lookup(make_keys(1))  # its socket reads from peers in turn, so it has read that the other closed
        device.release()
        wait_until(lambda: undelivered_replies(running) == 1)
        store = other.begin_store(make_keys(1), other.blocks_for(1))
        wait_until(lambda: device.jobs)
        device.release()
        assert isinstance(store.reply(), Stored)
