"""What engines do to a daemon: die, leave, hang, cancel and connect twice; and what one that ended leaves to the next."""

from __future__ import annotations

import os
import random
import socket
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from support.daemon import Daemon, wait_until
from support.devices import on_each_device
from support.engine_process import EngineProcess
from support.raw import REQUEST_ID, RawPeer
from support.slow_copies import assert_failed, wait_for_state
from support.worker import Worker, make_keys

from kvserver._native import State
from kvserver.protocol import Error, Status, StatusReply, Stored, Unregistered, UnregisterWorker, encode
from kvserver.protocol.client import RequestFailed

pytestmark = on_each_device
CHUNKS = 3
STORED, UNFINISHED = make_keys(CHUNKS, "stored"), make_keys(CHUNKS, "unfinished")


@pytest.fixture
def victim(slow: Daemon, gpu: str) -> Iterator[EngineProcess]:
    """It has stored chunks and leased them."""
    with EngineProcess(slow.endpoint, instance_id="victim", gpu=gpu) as engine:
        engine.ask("store", "stored", 1, CHUNKS)
        engine.ask("lookup", "stored", CHUNKS)
        yield engine


def begin_copies(victim: EngineProcess) -> None:
    victim.ask("begin_store", "unfinished", 20, CHUNKS)
    victim.ask("begin_load", "stored", 40, CHUNKS)


def test_nothing_of_a_worker_killed_in_the_middle_of_its_copies_stays(slow, make_worker, victim):
    with slow.paused_copies():
        begin_copies(victim)
        slow.wait_for_accounting(tickets=2, leases=1, mappings=3, attachments=1)
        victim.kill()
    slow.wait_for_clean_accounting()
    assert slow.open_memfds() == 0
    assert slow.mapped_memfds() == []
    assert slow.status()["instances"] == []
    assert slow.status()["l1"]["chunks"] == CHUNKS
    worker = make_worker(slow)
    assert worker.lookup(UNFINISHED) == 0
    assert worker.lookup(STORED) == CHUNKS
    assert worker.store(UNFINISHED, worker.blocks_for(CHUNKS)).stored == CHUNKS


def test_a_second_engine_of_one_id_is_refused_until_the_first_has_died(slow, make_worker, victim):
    with slow.paused_copies():
        begin_copies(victim)
        with pytest.raises(RequestFailed, match=r"duplicate_instance: .*'victim' belongs to another live engine"):
            make_worker(slow, instance_id="victim")
        slow.wait_for_accounting(attachments=1)
        victim.kill()
    slow.wait_for_accounting(attachments=0)
    assert make_worker(slow, instance_id="victim").lookup(STORED) == CHUNKS


def test_a_worker_that_leaves_while_its_memory_is_mapped_leaves_nothing(slow, make_worker):
    for _ in range(20):
        worker = make_worker(slow, connect_now=False)
        worker.attach()
        worker.send(worker.registration())
        worker.hang_up()
    slow.wait_for_clean_accounting()
    assert slow.open_memfds() == 0


def test_workers_that_connect_and_disconnect_do_not_stop_the_daemon(slow, gpu):
    """Native threads once waited for the GIL with the queue locked: a few dozen workers were enough."""
    for _ in range(150):
        with Worker(slow.endpoint, gpu=gpu) as worker:
            worker.begin_store(make_keys(1), worker.blocks_for(1))
    slow.wait_for_clean_accounting()


def test_a_store_that_failed_on_one_rank_publishes_nothing_and_can_be_repeated(slow, make_worker):
    same = {"instance_id": "pair", "incarnation": "a", "world_size": 2}
    zero, one = make_worker(slow, rank=0, **same), make_worker(slow, rank=1, **same)
    keys = make_keys(2)
    zero.store(keys, zero.blocks_for(2))
    with slow.paused_copies():
        failing = one.begin_store(keys, one.blocks_for(2))
        wait_for_state(failing, State.RUNNING)
        assert failing.move(State.RUNNING, State.CANCELLED)
    assert_failed(failing, "cancelled")
    assert zero.lookup(keys) == 0
    assert one.store(keys, one.blocks_for(2)) == Stored(stored=2, skipped=0)
    assert zero.lookup(keys) == 2


def test_unregister_with_copies_in_flight_is_answered_when_the_memory_is_unmapped(slow, make_worker):
    worker = make_worker(slow)
    keys = make_keys(3)
    worker.store(keys, worker.blocks_for(3))
    with slow.paused_copies():
        copies = [
            worker.begin_load(keys, worker.blocks_for(3, first=20)),
            worker.begin_store(make_keys(3), worker.blocks_for(3)),
            worker.begin_load(keys, worker.blocks_for(3, first=40)),
            worker.begin_store(make_keys(3), worker.blocks_for(3)),
        ]
        wait_for_state(copies[0], State.RUNNING)
        number = worker.send(UnregisterWorker(boot_id=worker.hello.boot_id, registration=worker.number))
        worker.ask(Status(), StatusReply)  # it has been read
    assert worker.reply_to(number) == Unregistered()
    assert slow.mapped_memfds() == []
    assert slow.open_memfds() == 0
    image = worker.memory.image()
    for copy in copies:
        assert_failed(copy, "cancelled")
        assert copy.state == State.FAILED
    slow.wait_for_accounting(tickets=0, pins=0, attachments=0)
    assert worker.memory.image() == image
    assert worker.error_of(worker.load_message(keys, worker.blocks_for(3))).code == "stale_registration"
    assert worker.connect().lookup(keys) == 3


def test_a_restarted_daemon_refuses_what_was_meant_for_the_last_one(make_daemon, make_worker):
    daemon = make_daemon()
    worker = make_worker(daemon)
    keys = make_keys(1)
    worker.store(keys, worker.blocks_for(1))
    old = worker.hello.boot_id
    daemon.kill()
    assert worker.attachment.alive() is False
    daemon.start()
    assert daemon.boot_id != old
    for message in (
        worker.store_message(keys, worker.blocks_for(1)),
        worker.load_message(keys, worker.blocks_for(1)),
        UnregisterWorker(boot_id=old, registration=worker.number),
    ):
        error = worker.error_of(message)
        assert error.code == "stale_boot"
        assert old in error.message
        assert daemon.boot_id in error.message
    worker.hang_up()
    assert worker.connect().lookup(keys) == 0
    worker.round_trip()


def test_a_killed_daemon_ends_the_lifeline_and_writes_no_more(make_daemon, make_worker):
    daemon = make_daemon(pauses=True)
    worker = make_worker(daemon)
    keys = make_keys(3)
    worker.store(keys, worker.blocks_for(3))
    with daemon.paused_copies():
        load = worker.begin_load(keys, worker.blocks_for(3, first=30))
        wait_for_state(load, State.RUNNING)
        assert worker.attachment.alive()
        daemon.kill()
    wait_until(lambda: not worker.attachment.alive())
    image = worker.memory.image()
    assert load.state == State.RUNNING  # no process is left to move it: the end of the lifeline is the answer
    daemon.start()
    assert worker.memory.image() == image


def test_a_client_that_never_reads_its_replies_stops_no_other(make_daemon, make_worker):
    daemon = make_daemon(l1_size="1MiB")
    worker = make_worker(daemon)
    worker.round_trip()  # a GPU's staging memory is the host's here
    before = daemon.rss_bytes()
    with RawPeer(daemon.endpoint, high_water_mark=10) as deaf:
        message = encode(Status())
        for _ in range(15_000):  # the queue of a peer holds 10,000
            deaf.send(REQUEST_ID, message)
        worker.round_trip()
        wait_until(lambda: daemon.status()["totals"]["undelivered_replies"] > 0)
        worker.round_trip()
        assert daemon.rss_bytes() - before < 10_000 * len(daemon.http("/status")[1])
    worker.round_trip()


def test_hung_readers_of_the_status_pages_stop_neither_the_loop_nor_the_pages(make_daemon, make_worker):
    daemon = make_daemon()
    worker = make_worker(daemon)
    connections = []
    try:
        for number in range(60):
            connection = socket.create_connection(("127.0.0.1", daemon.http_port))
            if number % 2:
                connection.sendall(b"GET /status HTTP/1.1\r\nHost: x\r\n\r\n" * 50)  # and reads nothing
            else:
                connection.sendall(b"GET /sta")
            connections.append(connection)
        for _ in range(20):
            worker.round_trip()
        assert daemon.http("/status")[0] == 200
        assert daemon.http("/readyz") == (200, "ready\n")
    finally:
        for connection in connections:
            connection.close()
    assert daemon.terminate() == 0


def test_copies_cancelled_at_random_moments_never_write_late_and_never_publish_garbage(make_daemon, make_worker):
    """The state-word rule under a real race, a few hundred times, with copies of other blocks around it."""
    source = random.Random(7)
    daemon = make_daemon(l1_size="16MiB", copy_delay_us=200)
    worker = make_worker(daemon)
    keys = make_keys(3)
    worker.store(keys, worker.blocks_for(3))
    loaded = worker.memory.blocks(worker.blocks_for(3))
    outcomes: Counter[str] = Counter()
    for _ in range(150):
        target = worker.blocks_for(3, first=16)
        load = worker.begin_load(keys, target)
        pause(source.uniform(0, 0.004))
        if load.move(State.PENDING, State.CANCELLED):
            outcomes["load never ran"] += 1
        elif load.move(State.RUNNING, State.CANCELLING):
            outcomes["load cancelled"] += 1
            wait_until(lambda: load.state not in (State.RUNNING, State.CANCELLING))  # noqa: B023
            assert load.state == State.CANCELLED
        else:
            outcomes["load done"] += 1
            assert load.state == State.DONE
            assert worker.memory.blocks(target) == loaded
        for block in target:  # the blocks are the engine's again
            worker.memory.write(block, os.urandom(worker.geometry.block_bytes))
        reused = worker.memory.blocks(target)

        fresh = make_keys(3)
        content = worker.memory.blocks(worker.blocks_for(3, first=32))
        store = worker.begin_store(fresh, worker.blocks_for(3, first=32))
        pause(source.uniform(0, 0.004))
        cancelled = store.move(State.PENDING, State.CANCELLED) or store.move(State.RUNNING, State.CANCELLED)
        for block in worker.blocks_for(3, first=32) if cancelled else []:
            worker.memory.write(block, os.urandom(worker.geometry.block_bytes))
        outcomes["store cancelled" if cancelled else "store done"] += 1
        reply = store.reply()
        assert isinstance(reply, Error) is cancelled
        assert worker.lookup(fresh) == (0 if cancelled else 3)
        if not cancelled:
            worker.load(fresh, worker.blocks_for(3, first=48))
            assert worker.memory.blocks(worker.blocks_for(3, first=48)) == content
        load.reply()
        assert worker.memory.blocks(target) == reused
    assert all(outcomes[name] for name in ("load cancelled", "load done", "store cancelled", "store done")), outcomes
    worker.close()
    daemon.wait_for_clean_accounting()


def pause(seconds: float) -> None:
    """Spin, since a sleep would choose the moment."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
