"""A lookup of what a running store brings: it waits for the store's end, and for nothing longer than its engine allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.daemon import Daemon, wait_until
from support.memory import two_groups
from support.worker import Worker, make_keys

from kvserver._native import State
from kvserver.protocol import AwaitFill, Error, HandOver, Lookup, LookupReply, ObjectGroup

MakeWorker = Callable[..., Worker]
FULL, TAIL = ObjectGroup("full", (0,), 16), 1
CHUNK = 64
STATE = ObjectGroup("state", (1,), CHUNK)
LONG = 10_000  # ms: the most that a lookup may wait. Nothing waits for its end


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


def test_an_end_by_another_incarnation_ends_no_wait(pausing: Daemon, make_worker: MakeWorker) -> None:
    prefill, decode, keys = make_worker(pausing), make_worker(pausing), make_keys(2)
    with pausing.paused_copies():
        store = prefill.begin_store(keys, prefill.blocks_for(2))
        pausing.wait_for_a_copy()
        number = wait_for(decode, keys)
        refused = decode.reply_to(decode.end_request(incarnation="another"))
        assert isinstance(refused, Error)
        assert refused.code == "duplicate_instance"
    assert reply_to(decode, number).hit_chunks == 2
    store.reply()


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


def test_lookup_that_waited_counts_what_it_found(pausing: Daemon, make_worker: MakeWorker) -> None:
    prefill, decode, keys = make_worker(pausing), make_worker(pausing), make_keys(3)
    with pausing.paused_copies():
        prefill.begin_store(keys, prefill.blocks_for(3))
        pausing.wait_for_a_copy()
        decode.ask(decode.lookup_message(keys), LookupReply)
        number = wait_for(decode, keys)
        wait_until(lambda: requests_of(pausing, decode)["store_waits"] == 1)
    reply_to(decode, number)
    counts = requests_of(pausing, decode)
    assert (counts["lookups"], counts["hit_tokens"], counts["store_waits"]) == (1, 3 * CHUNK, 1)
    assert not any(counts["missed_tokens"].values())


def test_hybrid_waits_for_a_state_whose_chunks_are_there(pausing: Daemon, make_worker: MakeWorker) -> None:
    prefill, decode = (make_worker(pausing, groups=(FULL, STATE), geometry=two_groups()) for _ in range(2))
    keys = make_keys(2)
    prefill.store(keys, range(1, 9), group=0)
    with pausing.paused_copies():
        prefill.begin_store(keys, [9, 10], group=1)
        pausing.wait_for_a_copy()
        found = decode.ask(decode.lookup_message(keys), LookupReply)
        assert (found.hit_chunks, found.full_chunks, found.fill_chunks) == (0, 2, 2)
        number = wait_for(decode, keys)
    assert reply_to(decode, number).hit_chunks == 2


# ---- hand-overs: the store may not have arrived ------------------------------------------------


def handed(worker: Worker, keys: list[bytes], by: str, tokens: int, tail: list[bytes] = []) -> Lookup:  # noqa: B006
    return worker.lookup_message(keys, tail_keys=b"".join(tail), handed_over=HandOver(by, tokens))


def requests_of(daemon: Daemon, worker: Worker) -> dict[str, Any]:
    (row,) = (row for row in daemon.status()["instances"] if row["instance_id"] == worker.instance_id)
    counts: dict[str, Any] = row["requests"]
    return counts


def test_handed_over_prompt_waits_for_a_store_that_has_not_arrived(daemon: Daemon, make_worker: MakeWorker) -> None:
    prefill, decode = (make_worker(daemon, groups=(FULL,), tails=True) for _ in range(2))
    keys, tail = make_keys(2), make_keys(3, "tail")
    lookup = handed(decode, keys, prefill.instance_id, 2 * CHUNK + 40, tail)
    found = decode.ask(lookup, LookupReply)
    assert (found.hit_chunks, found.fill_chunks) == (0, 2)
    number = decode.send(AwaitFill(lookup, LONG))
    wait_until(lambda: requests_of(daemon, decode)["store_waits"] == 1)
    prefill.store(keys, prefill.blocks_for(2))
    prefill.store(tail[:2], range(1, 3), group=TAIL)
    reply = reply_to(decode, number)
    assert (reply.hit_chunks, reply.tail_blocks) == (2, 2), "40 tokens behind the chunks are two blocks"
    counts = requests_of(daemon, decode)
    assert (counts["handed_over_tokens"], counts["lost_handovers"], counts["late_handovers"]) == (2 * CHUNK + 32, 0, 0)


def test_handed_over_prompt_that_is_there_does_not_wait(daemon: Daemon, make_worker: MakeWorker) -> None:
    prefill, decode, keys = make_worker(daemon), make_worker(daemon), make_keys(2)
    prefill.store(keys, prefill.blocks_for(2))
    found = decode.ask(handed(decode, keys, prefill.instance_id, 10**6), LookupReply)
    assert (found.hit_chunks, found.fill_chunks) == (2, 0)
    assert requests_of(daemon, decode)["lost_handovers"] == 0


def test_hand_over_by_an_engine_that_is_not_here_is_lost_at_once(daemon: Daemon, make_worker: MakeWorker) -> None:
    decode, keys = make_worker(daemon), make_keys(2)
    lookup = handed(decode, keys, "elsewhere", 2 * CHUNK)
    found = decode.ask(lookup, LookupReply)
    assert (found.hit_chunks, found.fill_chunks) == (0, 0)
    assert reply_to(decode, decode.send(AwaitFill(lookup, LONG))).hit_chunks == 0
    counts = requests_of(daemon, decode)
    assert (counts["store_waits"], counts["handed_over_tokens"]) == (0, 2 * CHUNK)
    assert counts["lost_handovers"] > 0


def test_wait_for_a_handed_over_prompt_ends_when_the_prefill_engine_dies(
    daemon: Daemon, make_worker: MakeWorker
) -> None:
    prefill, decode, keys = make_worker(daemon), make_worker(daemon), make_keys(2)
    prefill.store(keys[:1], prefill.blocks_for(1))
    number = decode.send(AwaitFill(handed(decode, keys, prefill.instance_id, 2 * CHUNK), LONG))
    wait_until(lambda: requests_of(daemon, decode)["store_waits"] == 1)
    prefill.close()
    assert reply_to(decode, number).hit_chunks == 1
    assert requests_of(daemon, decode)["lost_handovers"] == 1


def test_wait_for_a_handed_over_prompt_ends_when_its_store_fails(pausing: Daemon, make_worker: MakeWorker) -> None:
    prefill, decode, keys = make_worker(pausing), make_worker(pausing), make_keys(2)
    with pausing.paused_copies():
        store = prefill.begin_store(keys, prefill.blocks_for(2))
        pausing.wait_for_a_copy()
        number = decode.send(AwaitFill(handed(decode, keys, prefill.instance_id, 2 * CHUNK), LONG))
        wait_until(lambda: requests_of(pausing, decode)["store_waits"] == 1)
        assert store.move(State.RUNNING, State.CANCELLED)
    assert reply_to(decode, number).hit_chunks == 0
    assert requests_of(pausing, decode)["lost_handovers"] == 1


def test_hand_over_that_brings_nothing_is_answered_at_its_limit_and_counted(
    daemon: Daemon, make_worker: MakeWorker
) -> None:
    prefill, decode, keys = make_worker(daemon), make_worker(daemon), make_keys(1)
    number = decode.send(AwaitFill(handed(decode, keys, prefill.instance_id, CHUNK), 20))
    assert reply_to(decode, number).hit_chunks == 0
    assert requests_of(daemon, decode)["lost_handovers"] == 1


def test_handed_over_prompt_whose_store_still_runs_at_the_limit_is_late(
    pausing: Daemon, make_worker: MakeWorker
) -> None:
    prefill, decode, keys = make_worker(pausing), make_worker(pausing), make_keys(1)
    with pausing.paused_copies():
        prefill.begin_store(keys, prefill.blocks_for(1))
        pausing.wait_for_a_copy()
        number = decode.send(AwaitFill(handed(decode, keys, prefill.instance_id, CHUNK), 1))
        assert reply_to(decode, number).hit_chunks == 0
        assert requests_of(pausing, decode)["late_handovers"] == 1
