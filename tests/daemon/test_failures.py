"""What engines and machines do to a daemon: die, truncate, freeze, restart, hang, and come twice."""

from __future__ import annotations

import os
import random
import socket
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from support.daemon import Daemon, pin_l1, wait_until
from support.devices import on_each_device
from support.engine_process import EngineProcess
from support.raw import REQUEST_ID, RawPeer
from support.worker import Operation, Worker, make_keys

from kvserver._native import State
from kvserver.protocol import Error, Retrieved, Status, Stored, Unregistered, UnregisterWorker, encode
from kvserver.protocol.client import RequestFailed

pytestmark = on_each_device
# Per block, or per operation of a GPU's stream: three chunks take 120 or 300 ms, time enough to act in the middle.
COPY_DELAY_US = {"cpu": 10_000, "gpu": 60_000}
CHUNKS = 3
STORED, UNFINISHED = make_keys(CHUNKS, "stored"), make_keys(CHUNKS, "unfinished")
AT_ONCE = 4  # copies of one direction: copying threads, or batches that a lane has in flight


@pytest.fixture(scope="module")
def slow_module_daemon(device: str, gpu: str, gpu_flags: dict[str, Any]) -> Iterator[Daemon]:
    gpu_flags = {**gpu_flags, "gpus": gpu} if gpu else {}
    daemon = Daemon(l1_size="16MiB", copy_delay_us=COPY_DELAY_US[device], copy_threads=AT_ONCE, **gpu_flags).start()
    if gpu:
        pin_l1(daemon)  # until then one copy at a time
    yield daemon
    daemon.close()


@pytest.fixture
def slow(slow_module_daemon: Daemon) -> Iterator[Daemon]:
    """A daemon whose copies can be interrupted; after every test it runs and holds nothing."""
    if not slow_module_daemon.running():
        slow_module_daemon.start()
    yield slow_module_daemon
    slow_module_daemon.clear_and_check()


def assert_failed(operation: Operation, code: str) -> None:
    reply = operation.reply()
    assert isinstance(reply, Error), reply
    assert reply.code == code, reply


def wait_for_state(operation: Operation, state: State) -> None:
    wait_until(lambda: operation.state == state, what=f"word {state!r}, is {operation.state!r}")


# ---- workers that die -------------------------------------------------------------------------


@pytest.fixture
def victim(slow: Daemon, gpu: str) -> Iterator[EngineProcess]:
    """It has stored chunks and leased them, and is in the middle of a store of others and a load."""
    with EngineProcess(slow.endpoint, instance_id="victim", gpu=gpu) as engine:
        engine.ask("store", "stored", 1, CHUNKS)
        engine.ask("lookup", "stored", CHUNKS)
        engine.ask("begin_store", "unfinished", 20, CHUNKS)
        engine.ask("begin_load", "stored", 40, CHUNKS)
        yield engine


def test_nothing_of_a_worker_killed_in_the_middle_of_its_copies_stays(slow, make_worker, victim):
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
    failing = one.begin_store(keys, one.blocks_for(2))
    wait_for_state(failing, State.RUNNING)
    assert failing.move(State.RUNNING, State.CANCELLED)
    assert_failed(failing, "cancelled")
    assert zero.lookup(keys) == 0
    assert one.store(keys, one.blocks_for(2)) == Stored(stored=2, skipped=0)
    assert zero.lookup(keys) == 2


# ---- memory that is taken away ----------------------------------------------------------------


@pytest.fixture
def on_host(device: str) -> None:
    if device == "gpu":
        pytest.skip("the owner of GPU memory cannot take it back: the driver holds it while it is mapped")


@pytest.mark.parametrize("memory", [0, 1])
def test_memory_truncated_during_a_store_drops_the_instance_and_publishes_nothing(slow, make_worker, on_host, memory):
    worker, other = make_worker(slow), make_worker(slow)
    keys = make_keys(3)
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
    copies = [
        worker.begin_load(keys, worker.blocks_for(3, first=30)),
        worker.begin_store(make_keys(3), worker.blocks_for(3)),
        worker.begin_store(make_keys(3), worker.blocks_for(3, first=13)),
    ]
    wait_for_state(copies[0], State.RUNNING)
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


# ---- workers that leave -----------------------------------------------------------------------


def test_unregister_with_copies_in_flight_is_answered_when_the_memory_is_unmapped(slow, make_worker):
    worker = make_worker(slow)
    keys = make_keys(3)
    worker.store(keys, worker.blocks_for(3))
    copies = [
        worker.begin_load(keys, worker.blocks_for(3, first=20)),
        worker.begin_store(make_keys(3), worker.blocks_for(3)),
        worker.begin_load(keys, worker.blocks_for(3, first=40)),
        worker.begin_store(make_keys(3), worker.blocks_for(3)),
    ]
    wait_for_state(copies[0], State.RUNNING)
    number = worker.send(UnregisterWorker(boot_id=worker.hello.boot_id, registration=worker.number))
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


# ---- a daemon that freezes --------------------------------------------------------------------


def test_loads_that_a_frozen_daemon_holds_can_be_given_up_by_the_rule(slow, make_worker):
    """PENDING may be taken back at once and its blocks reused; RUNNING keeps them until it is acknowledged."""
    worker = make_worker(slow)
    keys = make_keys(3)
    worker.store(keys, worker.blocks_for(3))
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
    busy = [worker.begin_load(keys, worker.blocks_for(3, first=1 + 12 * i)) for i in range(AT_ONCE)]
    for load in busy:
        wait_for_state(load, State.RUNNING)
    blocks = worker.blocks_for(3, first=50)
    untouched = worker.memory.blocks(blocks)
    late = worker.begin_load(keys, blocks, deadline_ns=time.monotonic_ns() + 10_000_000)
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


# ---- a daemon that ends -----------------------------------------------------------------------


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


def test_a_killed_daemon_ends_the_lifeline_and_writes_no_more(make_daemon, make_worker, device):
    daemon = make_daemon(copy_delay_us=COPY_DELAY_US[device])
    worker = make_worker(daemon)
    keys = make_keys(3)
    worker.store(keys, worker.blocks_for(3))
    load = worker.begin_load(keys, worker.blocks_for(3, first=30))
    wait_for_state(load, State.RUNNING)
    assert worker.attachment.alive()
    daemon.kill()
    wait_until(lambda: not worker.attachment.alive())
    image = worker.memory.image()
    assert load.state == State.RUNNING  # no process is left to move it: the end of the lifeline is the answer
    daemon.start()
    assert worker.memory.image() == image


# ---- peers that hang --------------------------------------------------------------------------


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
        assert daemon.rss_bytes() - before < 100 * 2**20
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


# ---- cancels at any moment --------------------------------------------------------------------


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
