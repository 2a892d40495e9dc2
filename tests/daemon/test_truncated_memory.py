"""Memory that its owner truncates under a daemon: a typed error, and the daemon goes on."""

from __future__ import annotations

import os

import pytest
from support.devices import on_each_device
from support.slow_copies import assert_failed, wait_for_state
from support.worker import make_keys

from kvserver._native import State
from kvserver.protocol import Error

pytestmark = on_each_device


@pytest.fixture
def on_host(device: str) -> None:
    if device == "gpu":
        pytest.skip("the owner of GPU memory cannot take it back: the driver holds it while it is mapped")


@pytest.mark.parametrize("memory", [0, 1])
def test_memory_truncated_during_a_store_drops_the_instance_and_publishes_nothing(slow, make_worker, on_host, memory):
    worker, other = make_worker(slow), make_worker(slow)
    keys = make_keys(3)
    with slow.paused_copies():
        store = worker.begin_store(keys, worker.blocks_for(3))
        wait_for_state(store, State.RUNNING)
        worker.memory.truncate(memory)
    assert_failed(store, "memory_lost")
    assert store.state == State.FAILED
    slow.wait_for_accounting(attachments=1, mappings=3)
    assert [i["instance_id"] for i in slow.status()["instances"]] == [other.instance_id]
    assert other.lookup(keys) == 0
    assert not worker.attachment.alive()
    other.round_trip()


def test_memory_truncated_during_a_load_drops_the_instance_and_keeps_the_chunks(slow, make_worker, on_host):
    worker, other = make_worker(slow), make_worker(slow)
    keys = make_keys(3)
    content = other.memory.blocks(other.blocks_for(3))
    other.store(keys, other.blocks_for(3))
    with slow.paused_copies():
        load = worker.begin_load(keys, worker.blocks_for(3))
        wait_for_state(load, State.RUNNING)
        worker.memory.truncate()
    assert_failed(load, "memory_lost")
    slow.wait_for_accounting(attachments=1, mappings=3)
    other.memory.fill()
    other.load(keys, other.blocks_for(3, first=9))
    assert other.memory.blocks(other.blocks_for(3, first=9)) == content


def test_memory_truncated_under_several_copies_is_unmapped_once_they_have_ended(slow, make_worker, on_host):
    """The last copy that ended so once left the mappings open."""
    worker, other = make_worker(slow), make_worker(slow)
    keys = make_keys(3)
    other.store(keys, other.blocks_for(3))
    with slow.paused_copies():
        copies = [
            worker.begin_load(keys, worker.blocks_for(3, first=30)),
            worker.begin_store(make_keys(3), worker.blocks_for(3)),
            worker.begin_store(make_keys(3), worker.blocks_for(3, first=13)),
        ]
        wait_for_state(copies[0], State.RUNNING)
        slow.wait_for_accounting(tickets=3)  # a message that arrives later is refused, and its word stays as it was
        worker.memory.truncate()
    for copy in copies:
        assert isinstance(copy.reply(), Error)
        assert copy.state == State.FAILED
    slow.wait_for_accounting(attachments=1, mappings=3, tickets=0)


def test_memory_truncated_behind_the_blocks_of_a_store_is_noticed(slow, make_worker, on_host):
    worker = make_worker(slow)
    worker.memory.truncate(1, worker.geometry.sizes[1] - 1)
    assert_failed(worker.begin_store(make_keys(1), worker.blocks_for(1)), "memory_lost")
    slow.wait_for_accounting(attachments=0, mappings=0)


def test_the_state_words_of_a_worker_cannot_be_truncated(slow, make_worker):
    worker = make_worker(slow)
    with pytest.raises(OSError, match="Operation not permitted"):
        os.ftruncate(worker.words.fd, 0)
    worker.round_trip()
