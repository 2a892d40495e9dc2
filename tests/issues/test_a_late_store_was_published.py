"""The server looked at a store's deadline before it began, not after its last byte: a daemon that was frozen past it
published what the engine had written to the blocks since.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

import pytest
from support.daemon import wait_until
from support.devices import on_each_device
from support.server import L1_BYTES, PAGE_BYTES, running_server
from support.simulators import FakeDevice
from support.worker import Worker, make_keys

from kvserver._native import HostRegion, State
from kvserver.copy import Devices
from kvserver.protocol import Error, Stored

SLOW = 50_000  # microseconds a block


def in_time(seconds: float) -> int:
    return time.monotonic_ns() + int(seconds * 1e9)


@on_each_device
@pytest.mark.parametrize("replicated", [False, True])
def test_a_daemon_that_was_frozen_in_a_store_does_not_publish_it(make_daemon, make_worker, replicated):
    daemon = make_daemon(pauses=True)
    worker, keys = make_worker(daemon, replicated=replicated), make_keys(2)
    source = worker.blocks_for(2)
    before = worker.memory.blocks(source)
    with daemon.paused_copies():
        deadline = in_time(1.0)
        store = worker.begin_store(keys, source, deadline_ns=deadline)
        wait_until(lambda: store.state is State.RUNNING)
        assert time.monotonic_ns() < deadline, "it began too late"
        daemon.freeze()
        time.sleep(max(0.0, (deadline - time.monotonic_ns()) / 1e9) + 0.05)
        worker.memory.fill()  # the engine gives the blocks to another request
        assert worker.memory.blocks(source) != before
    daemon.thaw()
    answer = store.reply()
    assert isinstance(answer, Error)
    assert answer.code == "late"
    assert worker.lookup(keys) == 0
    daemon.wait_for_accounting(tickets=0, pins=0, used_pages=0)


@on_each_device
def test_one_ranks_late_store_keeps_a_chunk_of_all_ranks_from_being_found(make_daemon, make_worker):
    daemon = make_daemon(copy_delay_us=SLOW)
    same = {"instance_id": uuid.uuid4().hex, "incarnation": "a", "world_size": 2}
    ranks = [make_worker(daemon, **same, rank=rank) for rank in range(2)]
    keys = make_keys(1)
    late = ranks[1].begin_store(keys, ranks[1].blocks_for(1), deadline_ns=in_time(0.05))
    whole = ranks[0].begin_store(keys, ranks[0].blocks_for(1))
    assert whole.reply() == Stored(stored=1, skipped=0)
    answer = late.reply()
    assert isinstance(answer, Error)
    assert answer.code == "late"
    assert ranks[0].lookup(keys) == 0
    assert ranks[1].store(keys, ranks[1].blocks_for(1)) == Stored(stored=1, skipped=0)
    assert ranks[0].lookup(keys) == 1, "it may be stored again"


@pytest.fixture
def hands() -> Iterator[tuple[FakeDevice, Worker]]:
    """A device that moves only as the test orders, and a worker of its server."""
    device = FakeDevice(HostRegion(L1_BYTES), PAGE_BYTES)
    with running_server(Devices(device)) as running:
        endpoint = running.endpoint
        worker = Worker(endpoint, connect_now=False)
        worker.attach()
        registering = worker.send(worker.registration())
        (mapping,) = wait_until(lambda: device.open)
        device.release(mapping)
        worker.registered = worker.reply_to(registering)
        yield device, worker
        worker.hang_up()
        (unmapping,) = wait_until(lambda: device.open)
        device.release(unmapping)
        worker.close()


@pytest.mark.parametrize("seconds", [0.2, 30.0])
def test_the_last_bytes_time_decides(hands, seconds):
    device, worker = hands
    keys, deadline = make_keys(1), in_time(seconds)
    store = worker.begin_store(keys, worker.blocks_for(1), deadline_ns=deadline)
    (ticket,) = wait_until(lambda: device.open)
    device.run(ticket, worker.chunk_blocks - 1)
    assert store.state is State.RUNNING
    if seconds < 1:
        time.sleep(max(0.0, (deadline - time.monotonic_ns()) / 1e9) + 0.01)
    device.release(ticket)
    answer = store.reply()
    assert answer == Stored(stored=1, skipped=0) if seconds > 1 else answer.code == "late"
    assert worker.lookup(keys) == (1 if seconds > 1 else 0)
