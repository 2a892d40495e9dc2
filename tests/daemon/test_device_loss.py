"""The device is lost: copies fail with the reason, nothing half-written is found, and the daemon runs on."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator

import pytest
from support.daemon import fetch, wait_until
from support.server import L1_BYTES, PAGE_BYTES, Running, running_server
from support.simulators import FakeDevice
from support.worker import Worker, make_keys

from kvserver._native import HostRegion, State
from kvserver.copy import Devices
from kvserver.protocol import Error, Retrieved, Stored
from kvserver.protocol.client import RequestFailed

REASON = "Xid 79: the GPU has fallen off the bus"


class Machine:
    """A server over a fake device that copies on while `stepping` is set."""

    def __init__(self, device: FakeDevice, running: Running) -> None:
        self.device = device
        self.port = running.pages.port
        self.endpoint = running.endpoint
        self.stepping = threading.Event()
        self.over = threading.Event()
        self.stepping.set()
        self.thread = threading.Thread(target=self._step)
        self.thread.start()

    def _step(self) -> None:
        while not self.over.is_set():
            if self.stepping.is_set():
                self.device.step()
            time.sleep(0.0005)

    def stop_in_the_middle(self, worker: Worker, word: int) -> None:
        """Stand still with some bytes of the only open copy moved. REQUIRES: `stepping` was cleared before it began."""
        (ticket,) = wait_until(lambda: self.device.open)
        self.device.run(ticket, 2)
        assert worker.words.state(word) == State.RUNNING

    def get(self, path: str) -> tuple[int, str]:
        return fetch(f"http://127.0.0.1:{self.port}{path}")

    @property
    def status(self) -> dict:
        return json.loads(self.get("/status")[1])


@pytest.fixture
def machine() -> Iterator[Machine]:
    device = FakeDevice(HostRegion(L1_BYTES), PAGE_BYTES)
    with running_server(Devices(device)) as running:
        machine = Machine(device, running)
        try:
            yield machine
        finally:
            machine.over.set()
            machine.thread.join()


def test_readiness_fails_with_the_reason_and_the_daemon_runs_on(machine: Machine) -> None:
    assert machine.get("/readyz") == (200, "ready\n")
    machine.device.lose(REASON)
    assert machine.get("/readyz") == (503, f"the device is lost: {REASON}\n")
    assert machine.get("/livez") == (200, "alive\n")
    assert machine.status["ready"] is False


def test_store_under_way_at_a_device_loss_fails_and_is_never_found(machine: Machine) -> None:
    with Worker(machine.endpoint) as worker:
        keys = make_keys(2)
        machine.stepping.clear()
        store = worker.begin_store(keys, worker.blocks_for(2))
        machine.stop_in_the_middle(worker, store.word)
        machine.device.lose(REASON)
        reply = store.reply()
        assert isinstance(reply, Error)
        assert (reply.code, reply.message) == ("device_lost", REASON)
        assert store.state == State.FAILED
        machine.device.recover()
        assert worker.lookup(keys) == 0
        assert machine.status["l1"]["chunks"] == 0


def test_load_under_way_at_a_device_loss_fails_and_returns_its_blocks(machine: Machine) -> None:
    with Worker(machine.endpoint) as worker:
        keys = make_keys(1)
        worker.store(keys, worker.blocks_for(1))
        machine.stepping.clear()
        load = worker.begin_load(keys, worker.blocks_for(1, first=20))
        machine.stop_in_the_middle(worker, load.word)
        machine.device.lose(REASON)
        reply = load.reply()
        assert isinstance(reply, Error)
        assert reply.code == "device_lost"
        assert load.state == State.FAILED
        assert machine.status["books"]["tickets"] == machine.status["books"]["pins"] == 0


def test_lookups_miss_and_copies_are_refused_after_a_device_loss(machine: Machine) -> None:
    with Worker(machine.endpoint) as worker:
        keys = make_keys(1)
        worker.store(keys, worker.blocks_for(1))
        assert worker.lookup(keys) == 1
        machine.device.lose(REASON)
        assert worker.lookup(keys) == 0
        for message in (
            worker.load_message(keys, worker.blocks_for(1)),
            worker.store_message(make_keys(1), worker.blocks_for(1)),
        ):
            assert worker.error_of(message).code == "device_lost"
            assert worker.words.state(message.word) == State.FAILED


def test_engines_can_unregister_but_not_register_after_a_device_loss(machine: Machine) -> None:
    worker = Worker(machine.endpoint)
    machine.device.lose(REASON)
    with pytest.raises(RequestFailed, match=REASON) as refused:
        Worker(machine.endpoint)
    assert refused.value.code == "device_lost"
    worker.unregister()
    worker.close()
    wait_until(lambda: machine.status["books"]["mappings"] == machine.status["books"]["attachments"] == 0)


def test_a_device_that_returned_serves_what_was_stored_before(machine: Machine) -> None:
    with Worker(machine.endpoint) as worker:
        keys, source, target = make_keys(1), worker.blocks_for(1), worker.blocks_for(1, first=20)
        content = worker.memory.blocks(source)
        assert worker.store(keys, source) == Stored(stored=1, skipped=0)
        machine.device.lose(REASON)
        machine.device.recover()
        assert machine.get("/readyz")[0] == 200
        assert worker.lookup(keys) == 1
        assert worker.load(keys, target) == Retrieved(chunks=1)
        assert worker.memory.blocks(target) == content
