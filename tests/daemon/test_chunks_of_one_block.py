"""An engine that cannot know where in a prompt its keys begin registers chunks of one block, whatever --chunk-tokens is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.daemon import Daemon
from support.worker import Worker, make_keys

from kvserver.protocol import ErrorCode, Stored
from kvserver.protocol.client import RequestFailed

MakeWorker = Callable[..., Worker]


def test_a_worker_with_chunks_of_one_block_stores_and_finds_any_block(daemon: Daemon, make_worker: MakeWorker) -> None:
    worker = make_worker(daemon, connect_now=False)
    worker.attach()
    assert worker.chunk_blocks == 4
    worker.register(chunk_blocks=1)
    keys = make_keys(7)
    worker.memory.fill()
    stored = worker.memory.blocks(range(1, 8))
    assert worker.ask(worker.store_message(keys, range(1, 8), chunk_blocks=1), Stored) == Stored(stored=7, skipped=0)
    assert worker.lookup(keys[2:], chunk_blocks=1) == 5
    worker.load(keys[2:5], range(20, 23), chunk_blocks=1)
    assert worker.memory.blocks(range(20, 23)) == stored[2:5]


def test_chunks_of_neither_size_are_refused(daemon: Daemon, make_worker: MakeWorker) -> None:
    worker = make_worker(daemon, connect_now=False)
    worker.attach()
    with pytest.raises(RequestFailed) as refusal:
        worker.register(chunk_blocks=2)
    assert refusal.value.code == ErrorCode.BAD_PLANES
