"""An instance serves nothing while the memory of one of its ranks is not mapped yet."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.daemon import wait_until
from support.server import L1_BYTES, PAGE_BYTES, running_server
from support.simulators import FakeDevice
from support.worker import Worker, make_keys

from kvserver._native import HostRegion
from kvserver.copy import Devices
from kvserver.protocol import Registered


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice(HostRegion(L1_BYTES), PAGE_BYTES)


@pytest.fixture
def endpoint(device: FakeDevice) -> Iterator[str]:
    with running_server(Devices(device)) as running:
        try:
            yield running.endpoint
        finally:
            wait_until(lambda: device.release_all() or not len(running.parts.lifelines), what="all unmapped")


def test_a_rank_that_is_registered_but_not_mapped_keeps_the_others_from_storing(
    device: FakeDevice, endpoint: str
) -> None:
    same = {"instance_id": "pair", "incarnation": "a", "world_size": 2, "connect_now": False}
    with Worker(endpoint, rank=0, **same) as zero, Worker(endpoint, rank=1, **same) as one:
        numbers = []
        for worker in (zero, one):
            worker.attach()
            numbers.append(worker.send(worker.registration()))
            wait_until(lambda: len(device.open) == len(numbers), what="its memory is about to be mapped")
        first, second = device.open

        device.release(first)
        reply = zero.reply_to(numbers[0])
        assert isinstance(reply, Registered)
        assert reply.namespace == ""
        zero.registered = reply
        refused = zero.error_of(zero.store_message(make_keys(1), zero.blocks_for(1)))
        assert refused.code == "not_ready"

        device.release(second)
        reply = one.reply_to(numbers[1])
        assert isinstance(reply, Registered)
        assert reply.namespace != ""
