"""The KV events of this vLLM, by its own publisher, are read: over its sockets, live and replayed."""

from __future__ import annotations

import tempfile
import time

import pytest
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)

from kvserver.kv_events.types import ReaderConnected
from kvserver.protocol import DescribeScheduler
from kvserver.routing import KVIndex

BLOCKS = [bytes([n]) * 32 for n in range(1, 50)]


def stored(hashes, **more):
    fields = {"parent_block_hash": None, "token_ids": [1] * 16, "block_size": 16, "lora_id": None, "medium": "GPU"}
    return BlockStored(block_hashes=hashes, **{**fields, "lora_name": None, "group_idx": 0, **more})


@pytest.fixture
def publisher():
    with tempfile.TemporaryDirectory(prefix="kvs-") as folder:
        publisher = ZmqEventPublisher(0, f"ipc://{folder}/events", f"ipc://{folder}/replay", topic="kv@engine")
        yield publisher
        publisher.shutdown()


@pytest.fixture
def index():
    index = KVIndex(64 << 20, follow_engines=True)
    yield index
    index.close()


def registered(publisher):
    """As the adapter describes this publisher."""
    config = publisher.get_publisher_config()
    endpoints = {"events_endpoint": config.endpoint, "events_replay_endpoint": config.replay_endpoint}
    names = {"instance_id": "engine", "incarnation": "1", "model_name": "m", "variant": ""}
    scheduler = DescribeScheduler(**names, **endpoints, events_topic=config.topic)
    return ReaderConnected(1, 0, scheduler, b"r", 1, 16)


def publish(publisher, *events):
    publisher.publish(KVEventBatch(ts=time.time(), events=list(events)))


def wait_for(index, blocks):
    deadline = time.monotonic() + 20
    while True:
        (match,) = index.match(index.known_engines(), b"".join(BLOCKS), 32)
        if match.l0 == blocks:
            return index.status().engines["engine"]
        assert time.monotonic() < deadline, (match, blocks, index.status())
        time.sleep(0.01)


def test_events_published_before_and_after_the_registration_are_read(publisher, index):
    publish(publisher, stored(BLOCKS[:3]))
    index.observe(registered(publisher))
    wait_for(index, 3)
    publish(publisher, stored([int.from_bytes(BLOCKS[3][-8:], "big")], session_id="s", extra_keys=[("lora",)]))
    wait_for(index, 4)
    publish(
        publisher, BlockRemoved(block_hashes=[BLOCKS[1]], medium="GPU", group_idx=0), stored([b"x" * 32], medium="CPU")
    )
    wait_for(index, 1)
    publish(publisher, AllBlocksCleared(), stored(BLOCKS[:2]))
    status = wait_for(index, 2)
    assert (status.malformed, status.lost_gaps, status.state) == (0, 0, "complete")
    assert index.instance("engine")["l0"]["blocks"] == 2
