"""What a server refuses: a typed error that states what was wrong and what was expected, and the server goes on."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from support.daemon import wait_until
from support.raw import REQUEST_ID, RawPeer
from support.refusals import HELLO, OTHERS, REFUSALS, Refused
from support.server import L1_BYTES, PAGE_BYTES, Running, running_server
from support.worker import Worker, make_keys

from kvserver._native import CpuDevice, HostRegion
from kvserver.copy import Devices
from kvserver.protocol import KEY_BYTES, Error, ErrorCode, KVServerError
from kvserver.protocol.status import AccountingStatus
from kvserver.server import Audit
from kvserver.server.copy_checks import chunk_count
from kvserver.snapshots import daemon_status


def open_memories() -> int:
    """Descriptors of engines' memory in this process: the workers', and the server's."""
    return sum("/memfd:test-" in os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))


def accounting(running: Running) -> AccountingStatus:
    return running.call(lambda: daemon_status(running.parts, running.server).books)


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    """At the end nothing is left of any request, nor of any worker's memory."""
    before = open_memories()
    with running_server(Devices(CpuDevice(HostRegion(L1_BYTES), PAGE_BYTES, 1))) as running:
        yield running
        wait_until(lambda: accounting(running).attachments == accounting(running).mappings == 0)
        assert (accounting(running).tickets, accounting(running).pins, accounting(running).leases) == (0, 0, 0)
        assert running.audited() is Audit.BALANCED
        assert open_memories() == before


@pytest.fixture
def worker(running: Running) -> Iterator[Worker]:
    """After the test it stores and loads."""
    with Worker(running.endpoint) as worker:
        yield worker
        worker.round_trip()


@pytest.mark.parametrize(
    ("code", "refused", "words"),
    [
        pytest.param(code, refused, words, id=f"{code.value}-{words[0]}")
        for code, rows in REFUSALS.items()
        for refused, words in rows
    ],
)
def test_the_error_has_the_code_and_states_what_was_wrong(
    running: Running, worker: Worker, code: ErrorCode, refused: Refused, words: list[str]
) -> None:
    error = refused(worker)
    assert error.code == code.value, error
    missing = [word for word in words if word not in error.message]
    assert not missing, f"{missing} not in {error.message!r}"
    assert len(error.message) < 2000
    instance = running.parts.instances.by_id[worker.instance_id]
    assert instance.counts.ended_requests == 0
    assert (instance.description, instance.engine_stats.status(worker.incarnation, 0.0)) == (None, None)


def test_each_code_that_answers_a_bad_input_is_tried() -> None:
    assert REFUSALS.keys() == set(ErrorCode) - OTHERS


def test_an_error_carries_the_request_id_when_there_was_one(running: Running) -> None:
    with RawPeer(running.endpoint) as peer:
        for frames, request_id in (
            ([REQUEST_ID, b"\xc1"], REQUEST_ID),
            ([REQUEST_ID, HELLO, b"more"], REQUEST_ID),
            ([b"?", HELLO], bytes(8)),
        ):
            peer.send(*frames)
            assert peer.receive()[0] == request_id


@pytest.mark.parametrize("length", [0, 1, KEY_BYTES - 1, KEY_BYTES + 1, 5 * KEY_BYTES - 1])
def test_keys_that_are_not_whole_are_refused(length: int) -> None:
    with pytest.raises(KVServerError, match=f"{length} bytes, not one or more whole keys of {KEY_BYTES}") as caught:
        chunk_count(bytes(length))
    assert caught.value.code is ErrorCode.BAD_KEYS


def test_a_scheduler_whose_ranks_are_not_all_registered_describes_itself_later(running: Running) -> None:
    with Worker(running.endpoint, world_size=2) as half:
        error = half.error_of(half.description())
        assert (error.code, "1 of 2 ranks" in error.message) == ("not_ready", True)


def test_an_attachment_without_descriptors_cannot_be_registered(running: Running) -> None:
    with Worker(running.endpoint, connect_now=False) as worker:
        worker.attach([])
        error = worker.error_of(worker.registration())
        assert (error.code, "0 descriptors" in error.message) == ("bad_memory", True)


def test_nothing_is_evicted_for_a_store_whose_deadline_has_passed(running: Running, worker: Worker) -> None:
    cache = running.parts.cache
    while not cache.space.evicted_chunks:
        worker.store(make_keys(15), worker.blocks_for(15))
    full = cache.space.evicted_chunks, cache.pool.used_pages
    late = worker.begin_store(make_keys(8), worker.blocks_for(8), deadline_ns=1).reply()
    assert isinstance(late, Error)
    assert late.code == "late"
    assert (cache.space.evicted_chunks, cache.pool.used_pages) == full
