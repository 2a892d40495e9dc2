"""A daemon that freezes: which copies may be given up, and what it does with late ones."""

from __future__ import annotations

import os
import time

from support.daemon import wait_until
from support.devices import on_each_device
from support.slow_copies import AT_ONCE, assert_failed, wait_for_state
from support.worker import make_keys

from kvserver._native import State
from kvserver.protocol import Retrieved

pytestmark = on_each_device


def test_loads_that_a_frozen_daemon_holds_can_be_given_up_by_the_rule(slow, make_worker):
    """PENDING may be taken back at once and its blocks reused; RUNNING keeps them until it is acknowledged."""
    worker = make_worker(slow)
    keys = make_keys(3)
    worker.store(keys, worker.blocks_for(3))
    with slow.paused_copies():
        running = [worker.begin_load(keys, worker.blocks_for(3, first=1 + 12 * i)) for i in range(AT_ONCE)]
        for load in running:
            wait_for_state(load, State.RUNNING)
        pending_blocks = worker.blocks_for(3, first=50)
        pending = worker.begin_load(keys, pending_blocks)
        slow.wait_for_accounting(tickets=AT_ONCE + 1)
        slow.freeze()
        try:
            assert not pending.move(State.RUNNING, State.CANCELLING)
            assert pending.move(State.PENDING, State.CANCELLED)
            for load in running:
                assert load.state == State.RUNNING
                assert not load.move(State.PENDING, State.CANCELLED)
                assert load.move(State.RUNNING, State.CANCELLING)
            for block in pending_blocks:  # another request of the engine writes its own KV here
                worker.memory.write(block, os.urandom(worker.geometry.block_bytes))
            reused = worker.memory.blocks(pending_blocks)
        finally:
            slow.thaw()
    for load in running:
        wait_for_state(load, State.CANCELLED)
    image = worker.memory.image()  # from here on every block is the engine's again
    for load in (*running, pending):
        assert_failed(load, "cancelled")
    slow.wait_for_accounting(tickets=0, pins=0)
    assert worker.memory.image() == image
    assert worker.memory.blocks(pending_blocks) == reused
    assert worker.lookup(keys) == 3


def test_stores_that_a_frozen_daemon_holds_can_be_cancelled_and_their_blocks_reused(slow, make_worker):
    worker = make_worker(slow)
    keys = make_keys(3 * (AT_ONCE + 1))
    firsts = range(0, len(keys), 3)
    with slow.paused_copies():
        stores = [worker.begin_store(keys[i : i + 3], worker.blocks_for(3, first=1 + 4 * i)) for i in firsts]
        for store in stores[:-1]:
            wait_for_state(store, State.RUNNING)
        slow.wait_for_accounting(tickets=len(stores))
        slow.freeze()
        try:
            for store in stores[:-1]:
                assert store.move(State.RUNNING, State.CANCELLED)
            assert stores[-1].move(State.PENDING, State.CANCELLED)
            worker.memory.fill()
            image = worker.memory.image()
        finally:
            slow.thaw()
    for store in stores:
        assert_failed(store, "cancelled")
        assert store.state == State.CANCELLED
    for key in keys:
        assert worker.lookup([key]) == 0
    slow.wait_for_accounting(tickets=0, pins=0, used_pages=0)
    assert worker.memory.image() == image


def test_a_load_that_a_frozen_daemon_finishes_later_is_whole(slow, make_worker):
    worker = make_worker(slow)
    keys = make_keys(3)
    content = worker.memory.blocks(worker.blocks_for(3))
    worker.store(keys, worker.blocks_for(3))
    with slow.paused_copies():
        load = worker.begin_load(keys, worker.blocks_for(3, first=30))
        wait_for_state(load, State.RUNNING)
        slow.freeze()
        slow.thaw()
    assert load.reply() == Retrieved(chunks=3)
    assert load.state == State.DONE
    assert worker.memory.blocks(worker.blocks_for(3, first=30)) == content


def test_copies_that_a_frozen_daemon_reads_after_their_deadline_are_dropped(slow, make_worker):
    worker = make_worker(slow)
    keys = make_keys(1)
    worker.store(keys, worker.blocks_for(1))
    slow.freeze()
    try:
        deadline = time.monotonic_ns() + 20_000_000
        late = [
            worker.begin_load(keys, worker.blocks_for(1, first=30), deadline_ns=deadline),
            worker.begin_store(make_keys(1), worker.blocks_for(1), deadline_ns=deadline),
        ]
        image = worker.memory.image()
        wait_until(lambda: time.monotonic_ns() > deadline)
    finally:
        slow.thaw()
    for copy in late:
        assert_failed(copy, "late")
        assert copy.state == State.FAILED
    assert worker.memory.image() == image
    assert slow.status()["l1"]["chunks"] == 1


def test_copies_whose_deadline_passes_in_the_queue_are_dropped(slow, make_worker):
    worker = make_worker(slow)
    keys = make_keys(3)
    worker.store(keys, worker.blocks_for(3))
    with slow.paused_copies():
        busy = [worker.begin_load(keys, worker.blocks_for(3, first=1 + 12 * i)) for i in range(AT_ONCE)]
        for load in busy:
            wait_for_state(load, State.RUNNING)
        blocks = worker.blocks_for(3, first=50)
        untouched = worker.memory.blocks(blocks)
        deadline = time.monotonic_ns() + 10_000_000
        late = worker.begin_load(keys, blocks, deadline_ns=deadline)
        wait_until(lambda: time.monotonic_ns() > deadline)
    assert_failed(late, "late")
    assert late.state == State.FAILED
    assert all(isinstance(load.reply(), Retrieved) for load in busy)
    assert worker.memory.blocks(blocks) == untouched


def test_an_operation_under_a_word_that_was_used_again_is_not_started(slow, make_worker):
    worker = make_worker(slow)
    first = worker.store_message(make_keys(1), worker.blocks_for(1))
    worker.words.arm(first.word, first.sequence + 1000)  # given up, and armed for something else
    assert_failed(worker.begin(first), "cancelled")
    assert worker.words.state(first.word) == State.PENDING
    assert slow.status()["l1"]["chunks"] == 0
