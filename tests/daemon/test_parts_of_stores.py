"""A long store is found, loaded and written to L2 part by part, and what a cancel or an engine's death cuts off is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.daemon import Daemon, wait_until
from support.memory import Geometry
from support.worker import Worker, make_keys

from kvserver._native import State
from kvserver.protocol import Error, Plane, Stored

BLOCK = 16 << 20  # a chunk of one block is a part
CHUNKS = 4
GEOMETRY = Geometry(CHUNKS + 1, 256, (BLOCK * (CHUNKS + 1),), (Plane(0, 0, BLOCK, BLOCK),))

MakeWorker = Callable[..., Worker]


@pytest.fixture
def pausing(make_daemon: Callable[..., Daemon], tmp_path: Path) -> Daemon:
    return make_daemon(pauses=True, copy_threads=CHUNKS, l1_size="256MiB", l2=f"file://{tmp_path / 'l2'}?size=512MiB")


def written(daemon: Daemon) -> int:
    found: int = daemon.status()["l2"][0]["written_objects"]
    return found


def test_the_first_chunk_is_loaded_and_written_to_l2_while_the_others_are_copied(
    pausing: Daemon, make_worker: MakeWorker
) -> None:
    worker, other, keys = *(make_worker(pausing, geometry=GEOMETRY) for _ in range(2)), make_keys(CHUNKS)
    content = worker.memory.blocks(worker.blocks_for(CHUNKS))
    wait_until(lambda: pausing.status()["l2"][0]["state"] == "ready")
    with pausing.paused_copies():
        store = worker.begin_store(keys, worker.blocks_for(CHUNKS))
        wait_until(lambda: written(pausing) == 1)
        assert other.lookup(keys) == 1
        other.load(keys[:1], other.blocks_for(1))
        assert other.memory.blocks(other.blocks_for(1)) == content[:1]
        assert store.state is State.RUNNING
    assert store.reply() == Stored(stored=CHUNKS, skipped=0)
    assert other.lookup(keys) == CHUNKS
    other.load(keys, other.blocks_for(CHUNKS))
    assert other.memory.blocks(other.blocks_for(CHUNKS)) == content
    other.end_request()
    wait_until(lambda: written(pausing) == CHUNKS)
    pausing.wait_for_accounting(tickets=0, pins=0, leases=0)


def test_a_cancel_cuts_off_what_is_copied_after_it(pausing: Daemon, make_worker: MakeWorker) -> None:
    worker, keys = make_worker(pausing, geometry=GEOMETRY), make_keys(CHUNKS)
    content = worker.memory.blocks(worker.blocks_for(1))
    with pausing.paused_copies():
        store = worker.begin_store(keys, worker.blocks_for(CHUNKS))
        wait_until(lambda: worker.lookup(keys) == 1)
        assert store.move(State.RUNNING, State.CANCELLED)
        worker.memory.fill()  # the engine gives the blocks to another request
    answer = store.reply()
    assert isinstance(answer, Error)
    assert answer.code == "cancelled"
    assert worker.lookup(keys) == 1
    worker.load(keys[:1], worker.blocks_for(1, first=2))
    assert worker.memory.blocks(worker.blocks_for(1, first=2)) == content
    worker.end_request()
    assert worker.store(keys, worker.blocks_for(CHUNKS)) == Stored(stored=CHUNKS - 1, skipped=1)
    pausing.wait_for_accounting(tickets=0, leases=0)


def test_an_engine_that_dies_leaves_its_whole_chunks_alone(pausing: Daemon, make_worker: MakeWorker) -> None:
    worker, other, keys = *(make_worker(pausing, geometry=GEOMETRY) for _ in range(2)), make_keys(CHUNKS)
    content = worker.memory.blocks(worker.blocks_for(1))
    with pausing.paused_copies():
        worker.begin_store(keys, worker.blocks_for(CHUNKS))
        wait_until(lambda: other.lookup(keys) == 1)
        worker.close()
        wait_until(lambda: len(pausing.status()["instances"]) == 1)
    pausing.wait_for_accounting(tickets=0)
    assert other.lookup(keys) == 1
    other.load(keys[:1], other.blocks_for(1))
    assert other.memory.blocks(other.blocks_for(1)) == content
    other.end_request()
