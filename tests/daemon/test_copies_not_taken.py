"""The device does not take a copy: the request is answered with an error, and nothing of it stays."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.daemon import fetch
from support.server import L1_BYTES, PAGE_BYTES, Running, running_server
from support.worker import Worker, make_keys

from kvserver._native import CpuDevice, HostRegion, State
from kvserver.copy import Devices
from kvserver.protocol import Retrieved, Stored


class Full:
    """A real device that takes no copies while `full`."""

    def __init__(self) -> None:
        self.full = False
        self._device: Any = CpuDevice(HostRegion(L1_BYTES), PAGE_BYTES, 1)

    def submit_copy(self, **job: Any) -> None:
        if self.full:
            raise MemoryError("no room for a job")
        self._device.submit_copy(**job)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


@pytest.fixture
def device() -> Full:
    return Full()


@pytest.fixture
def running(device: Full) -> Iterator[Running]:
    devices: Any = device
    with running_server(Devices(devices)) as running:
        yield running


@pytest.fixture
def worker(running: Running) -> Iterator[Worker]:
    with Worker(running.endpoint) as worker:
        yield worker


def accounting(running: Running) -> dict[str, int]:
    found: dict[str, int] = json.loads(fetch(f"http://127.0.0.1:{running.pages.port}/status")[1])["books"]
    return found


def test_a_store_that_is_not_taken_leaves_no_pages(device: Full, running: Running, worker: Worker) -> None:
    keys = make_keys(2)
    device.full = True
    operation = worker.begin_store(keys, worker.blocks_for(2))
    assert operation.reply().code == "internal"
    assert operation.state == State.FAILED
    assert worker.lookup(keys) == 0
    assert accounting(running)["pins"] == accounting(running)["tickets"] == accounting(running)["used_pages"] == 0
    device.full = False
    assert worker.store(keys, worker.blocks_for(2)) == Stored(stored=2, skipped=0)


def test_a_load_that_is_not_taken_leaves_its_chunks_free(device: Full, running: Running, worker: Worker) -> None:
    keys = make_keys(2)
    worker.store(keys, worker.blocks_for(2))
    device.full = True
    operation = worker.begin_load(keys, worker.blocks_for(2, first=20))
    assert operation.reply().code == "internal"
    assert operation.state == State.FAILED
    assert accounting(running)["pins"] == accounting(running)["tickets"] == 0
    device.full = False
    assert worker.load(keys, worker.blocks_for(2, first=20)) == Retrieved(chunks=2)
