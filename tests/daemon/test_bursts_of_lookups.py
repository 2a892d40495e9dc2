"""An engine sends thousands of lookups at once: each gets its answer, other engines wait for none of them, and no turn of the loop grows
with what the burst made."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from support.daemon import Daemon
from support.server import L1_BYTES, PAGE_BYTES, running_server
from support.worker import Worker, make_keys

from kvserver._native import CpuDevice, HostRegion
from kvserver.copy import Devices
from kvserver.protocol import Lookup, LookupReply, Reply, Request, Status, StatusReply
from kvserver.protocol.client import Channel

BURST, CHUNKS = 3000, 8


def lookups(worker: Worker, stored: list[bytes]) -> Iterator[Lookup]:
    """In turn all hit, a part, and none, each of a request of its own."""
    for number in range(BURST):
        known = (CHUNKS, number % CHUNKS, 0)[number % 3]
        yield worker.lookup_message(stored[:known] + make_keys(CHUNKS - known, number), f"r{number}")


def send(channel: Channel, message: Request) -> int:
    number = channel.send(message)
    assert number is not None, "the queue is full"
    return number


def replies(channel: Channel, count: int) -> dict[int, Reply]:
    found: dict[int, Reply] = {}
    deadline = time.monotonic() + 60
    while len(found) < count:
        assert time.monotonic() < deadline, f"{count - len(found)} of {count} were not answered"
        channel.wait(0.1)
        for number, reply in channel.receive():
            assert number not in found, "two answers to one lookup"
            found[number] = reply
    return found


@pytest.fixture
def channel(make_daemon: Callable[..., Daemon]) -> Iterator[Callable[[Daemon], Channel]]:
    """A connection whose queues take the whole burst; it closes with the test."""
    channels: list[Channel] = []

    def connect(daemon: Daemon) -> Channel:
        channels.append(Channel(daemon.endpoint, high_water_mark=BURST + 1))
        assert channels[-1].wait_writable(10)
        return channels[-1]

    yield connect
    for each in channels:
        each.close()


def test_each_lookup_of_a_burst_is_answered_with_what_is_stored(
    make_daemon: Callable[..., Daemon], make_worker: Callable[..., Worker], channel: Callable[[Daemon], Channel]
) -> None:
    """The engine reads no answer before it has sent all."""
    daemon = make_daemon()
    worker, stored = make_worker(daemon), make_keys(CHUNKS)
    worker.store(stored, worker.blocks_for(CHUNKS))
    engine = channel(daemon)
    expected = {
        send(engine, message): (CHUNKS, number % CHUNKS, 0)[number % 3]
        for number, message in enumerate(lookups(worker, stored))
    }
    time.sleep(0.5)  # the answers queue
    found = replies(engine, BURST)
    assert all(isinstance(reply, LookupReply) for reply in found.values()), Counter(map(type, found.values()))
    assert {number: reply.hit_chunks for number, reply in found.items() if isinstance(reply, LookupReply)} == expected
    for number in range(BURST):
        worker.end_request(f"r{number}")
    assert worker.lookup(stored) == CHUNKS
    status = daemon.status()
    assert status["instances"][0]["requests"]["lookups"] == BURST + 1
    assert (status["totals"]["undelivered_replies"], status["totals"]["errors"]) == (0, 0)


def test_another_engines_lookup_does_not_wait_for_a_burst(
    make_daemon: Callable[..., Daemon], make_worker: Callable[..., Worker], channel: Callable[[Daemon], Channel]
) -> None:
    """Both wait for the daemon when it goes on; it reads from its engines in turn."""
    daemon = make_daemon()
    worker, other, stored = make_worker(daemon), make_worker(daemon), make_keys(CHUNKS)
    worker.store(stored, worker.blocks_for(CHUNKS))
    engine, beside = channel(daemon), channel(daemon)
    daemon.freeze()
    try:
        for message in lookups(worker, stored):
            send(engine, message)
        mine = send(beside, other.lookup_message(stored))
        status = send(beside, Status())
    finally:
        daemon.thaw()
    found = replies(beside, 2)
    assert found[mine] == LookupReply(hit_chunks=CHUNKS, full_chunks=CHUNKS)
    answered = found[status]
    assert isinstance(answered, StatusReply)
    before: Any = msgspec.msgpack.decode(answered.status)
    print(before["instances"][0]["requests"]["lookups"], before["instances"][1]["requests"]["lookups"])
    assert sum(instance["requests"]["lookups"] for instance in before["instances"]) < BURST // 2
    assert len(replies(engine, BURST)) == BURST


def test_one_collection_of_garbage_looks_at_few_objects() -> None:
    """Else a turn a second lasts as long as it takes to look at all that the requests of a second left behind."""
    looked_at: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 0:
            looked_at.append(gc.get_count()[0])

    device = CpuDevice(HostRegion(L1_BYTES), PAGE_BYTES, 1)
    gc.disable()  # as the daemon does
    try:
        with running_server(Devices(device)) as running, Worker(running.endpoint) as worker:
            stored = make_keys(CHUNKS)
            worker.store(stored, worker.blocks_for(CHUNKS))
            running.call(lambda: gc.collect(0))
            gc.callbacks.append(note)
            for number in range(BURST):
                worker.lookup(stored, f"r{number}")
    finally:
        gc.enable()
        gc.callbacks.remove(note)
    assert len(looked_at) > 2
    assert max(looked_at) < 4000, looked_at
