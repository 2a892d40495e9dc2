"""A lookup of what a running store brings: it waits for the store's end, and for nothing longer than its engine allows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.daemon import Daemon, wait_until
from support.worker import Worker, make_keys

from kvserver.protocol import AwaitFill, LookupReply, ObjectGroup

MakeWorker = Callable[..., Worker]
FULL, TAIL = ObjectGroup("full", (0,), 16), 1


@pytest.fixture
def pausing(make_daemon: Callable[..., Daemon]) -> Daemon:
    return make_daemon(pauses=True)


def wait_for(worker: Worker, keys: list[bytes], tail: list[bytes] = [], wait_ms: int = 10_000) -> int:  # noqa: B006
    return worker.send(AwaitFill(worker.lookup_message(keys, tail_keys=b"".join(tail)), wait_ms))


def reply_to(worker: Worker, number: int) -> LookupReply:
    reply = worker.reply_to(number)
    assert isinstance(reply, LookupReply), reply
    return reply


def test_lookup_waits_for_a_running_store_of_another_engine_and_loads_its_bytes(
    pausing: Daemon, make_worker: MakeWorker
) -> None:
    prefill, decode, keys = make_worker(pausing), make_worker(pausing), make_keys(3)
    content = prefill.memory.blocks(prefill.blocks_for(3))
    with pausing.paused_copies():
        store = prefill.begin_store(keys, prefill.blocks_for(3))
        pausing.wait_for_a_copy()
        found = decode.ask(decode.lookup_message(keys), LookupReply)
        assert (found.hit_chunks, found.fill_chunks) == (0, 3)
        number = wait_for(decode, keys)
    assert reply_to(decode, number).hit_chunks == 3
    store.reply()
    target = decode.blocks_for(3, first=1)
    decode.load(keys, target)
    assert decode.memory.blocks(target) == content
    decode.end_request()
    pausing.wait_for_accounting(tickets=0, pins=0, leases=0)


def test_lookup_is_answered_at_its_limit_while_the_store_still_runs(pausing: Daemon, make_worker: MakeWorker) -> None:
    prefill, decode, keys = make_worker(pausing), make_worker(pausing), make_keys(2)
    prefill.store(keys[:1], prefill.blocks_for(1))
    with pausing.paused_copies():
        prefill.begin_store(keys[1:], prefill.blocks_for(1))
        pausing.wait_for_a_copy()
        assert decode.ask(decode.lookup_message(keys), LookupReply).fill_chunks == 2
        assert reply_to(decode, wait_for(decode, keys, wait_ms=1)).hit_chunks == 1


def test_lookup_of_what_no_store_brings_does_not_wait(pausing: Daemon, make_worker: MakeWorker) -> None:
    decode, keys = make_worker(pausing), make_keys(2)
    found = decode.ask(decode.lookup_message(keys), LookupReply)
    assert (found.hit_chunks, found.fill_chunks) == (0, 0)
    assert reply_to(decode, wait_for(decode, keys)).hit_chunks == 0


def test_lookup_is_answered_without_a_hit_when_the_storing_engine_dies(
    pausing: Daemon, make_worker: MakeWorker
) -> None:
    prefill, decode, keys = make_worker(pausing), make_worker(pausing), make_keys(2)
    with pausing.paused_copies():
        prefill.begin_store(keys, prefill.blocks_for(2))
        pausing.wait_for_a_copy()
        number = wait_for(decode, keys)
        prefill.close()
        wait_until(lambda: len(pausing.status()["instances"]) == 1, 20, "the daemon has seen its end")
    assert reply_to(decode, number).hit_chunks == 0


def test_request_that_ends_while_it_waits_keeps_no_lease(pausing: Daemon, make_worker: MakeWorker) -> None:
    prefill, decode, keys = make_worker(pausing), make_worker(pausing), make_keys(2)
    prefill.store(keys[:1], prefill.blocks_for(1))
    with pausing.paused_copies():
        prefill.begin_store(keys[1:], prefill.blocks_for(1))
        pausing.wait_for_a_copy()
        number = wait_for(decode, keys)
        decode.end_request()
        reply_to(decode, number)
        wait_until(lambda: pausing.status()["books"]["leases"] == 0)


def test_lookup_waits_for_single_blocks_of_the_tail(pausing: Daemon, make_worker: MakeWorker) -> None:
    prefill, decode = (make_worker(pausing, groups=(FULL,), tails=True) for _ in range(2))
    keys, tail = make_keys(1), make_keys(2, "tail")
    prefill.store(keys, prefill.blocks_for(1))
    with pausing.paused_copies():
        prefill.begin_store(tail, range(1, 3), group=TAIL)
        pausing.wait_for_a_copy()
        found = decode.ask(decode.lookup_message(keys, tail_keys=b"".join(tail)), LookupReply)
        assert (found.hit_chunks, found.tail_blocks, found.fill_chunks) == (1, 0, 2)
        number = wait_for(decode, keys, tail)
    reply = reply_to(decode, number)
    assert (reply.hit_chunks, reply.tail_blocks) == (1, 2)


def test_prompt_shorter_than_a_chunk_waits_for_its_blocks(pausing: Daemon, make_worker: MakeWorker) -> None:
    prefill, decode = (make_worker(pausing, groups=(FULL,), tails=True) for _ in range(2))
    tail = make_keys(2, "tail")
    with pausing.paused_copies():
        prefill.begin_store(tail, range(1, 3), group=TAIL)
        pausing.wait_for_a_copy()
        found = decode.ask(decode.lookup_message([], tail_keys=b"".join(tail)), LookupReply)
        assert (found.hit_chunks, found.tail_blocks, found.fill_chunks) == (0, 0, 1)
        number = wait_for(decode, [], tail)
    assert reply_to(decode, number).tail_blocks == 2


def test_keys_of_a_tail_that_are_not_whole_are_refused_before_the_wait(
    pausing: Daemon, make_worker: MakeWorker
) -> None:
    worker, keys = make_worker(pausing, groups=(FULL,), tails=True), make_keys(1)
    worker.store(keys, worker.blocks_for(1))
    refused = worker.error_of(AwaitFill(worker.lookup_message(keys, tail_keys=b"abc"), 10_000))
    assert refused.code == "bad_keys"
