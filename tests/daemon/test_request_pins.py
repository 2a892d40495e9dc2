"""Pins that requests ask for with their lookups: what they protect, when their clock starts, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.daemon import Daemon, wait_until
from support.pins import BLOCK, CHUNK_BLOCKS, KEYS, describe, hashes, pin, pins, press
from support.worker import Worker, make_keys

from kvserver.protocol import LookupReply, ObjectGroup

MakeDaemon, MakeWorker = Callable[..., Daemon], Callable[..., Worker]
HOUR = 3600.0


@pytest.fixture
def pressed(make_daemon: MakeDaemon) -> Daemon:
    return make_daemon(l1_size="1MiB", pin_share=0.5)


@pytest.fixture
def engine(pressed: Daemon, make_worker: MakeWorker) -> Worker:
    return make_worker(pressed)


def store(engine: Worker, keys: list[bytes], first_chunk: int = 0, **changes: Any) -> None:
    engine.store(keys, engine.blocks_for(len(keys)), first_chunk=first_chunk, **changes)


def rejected(daemon: Daemon) -> int:
    return int(daemon.metric("kvserver_cache_pin_requests_total", outcome="rejected"))


def test_what_a_request_with_a_pin_stores_stays_under_pressure_until_the_pin_is_deleted(
    pressed: Daemon, engine: Worker
) -> None:
    assert engine.lookup(KEYS, "p", pin_seconds=HOUR) == 0
    (found,) = pins(pressed)
    assert (found["outcome"], found["tokens"], found["tiers"]) == ("deferred", 0, [])
    assert found["reason"].startswith("not_stored: 8 ")
    store(engine, KEYS[:3])
    store(engine, KEYS[3:], first_chunk=3)
    engine.end_request("p")
    press(engine, pressed)
    (found,) = pins(pressed)
    assert (found["outcome"], found["tokens"]) == ("accepted", len(KEYS) * CHUNK_BLOCKS * BLOCK)
    assert found["owner"] == f"request:{engine.instance_id}/p"
    assert engine.lookup(KEYS, "q") == len(KEYS)
    engine.end_request("q")
    assert pressed.http(f"/cache/pins/{found['id']}", "DELETE")[0] == 200
    press(engine, pressed)
    assert engine.lookup(KEYS, "r") == 0
    engine.unregister()
    pressed.wait_for_clean_accounting()
    pressed.audit()


def test_a_request_that_finds_its_whole_prompt_pins_it_though_it_stores_nothing(
    pressed: Daemon, engine: Worker
) -> None:
    store(engine, KEYS)
    assert engine.lookup(KEYS, "p", pin_seconds=HOUR) == len(KEYS)
    engine.end_request("p")
    press(engine, pressed)
    assert engine.lookup(KEYS, "q") == len(KEYS)
    assert [one["outcome"] for one in pins(pressed)] == ["accepted"]


def test_the_blocks_behind_the_last_chunk_are_pinned_once_they_are_stored(
    pressed: Daemon, make_worker: MakeWorker
) -> None:
    worker = make_worker(pressed, groups=(ObjectGroup("full", (0,), BLOCK),), tails=True)
    tail = hashes()[CHUNK_BLOCKS : CHUNK_BLOCKS + 3]
    message = worker.lookup_message(KEYS[:1], "p", tail_keys=b"".join(tail), pin_seconds=HOUR)
    worker.ask(message, LookupReply)
    store(worker, KEYS[:1])
    assert worker.store(tail, [50, 51, 52], group=1, first_chunk=CHUNK_BLOCKS, after=KEYS[0]).stored == 3
    worker.end_request("p")
    press(worker, pressed)
    reply = worker.ask(worker.lookup_message(KEYS[:1], "q", tail_keys=b"".join(tail)), LookupReply)
    assert (reply.hit_chunks, reply.tail_blocks) == (1, 3)
    assert [(one["outcome"], one["tokens"]) for one in pins(pressed)] == [("accepted", (CHUNK_BLOCKS + 3) * BLOCK)]


def test_a_request_that_is_looked_up_again_has_one_pin(pressed: Daemon, engine: Worker) -> None:
    engine.lookup(KEYS, "p", pin_seconds=HOUR)
    store(engine, KEYS)
    engine.lookup(KEYS, "p", pin_seconds=HOUR)
    engine.lookup(KEYS, "q", pin_seconds=HOUR)
    assert len({one["id"] for one in pins(pressed)}) == 2
    assert pressed.status()["pins"]["ended"]["replaced"] == 1


def test_a_pin_of_an_ended_request_that_stores_nothing_expires(pressed: Daemon, engine: Worker) -> None:
    engine.lookup(KEYS, "p", pin_seconds=0.001)
    assert len(pins(pressed)) == 1, "it waits for what the request stores"
    engine.end_request("p")
    wait_until(lambda: not pins(pressed), 60, "it expires")
    assert pressed.status()["pins"]["ended"]["expired"] == 1


def test_requests_pin_no_more_than_the_share(make_daemon: MakeDaemon, make_worker: MakeWorker) -> None:
    daemon = make_daemon(l1_size="1MiB", pin_share=0.1)
    worker = make_worker(daemon)
    limit = daemon.metric("kvserver_cache_pin_limit_bytes")
    for number in range(12):
        keys = make_keys(8, ("request", number))
        worker.lookup(keys, f"p{number}", pin_seconds=HOUR)
        store(worker, keys)
        worker.end_request(f"p{number}")
        assert daemon.metric("kvserver_cache_pinned_bytes") <= limit
    assert daemon.metric("kvserver_cache_pinned_bytes") + worker.chunk_bytes > limit, "it protects less than it may"
    worker.unregister()
    daemon.wait_for_clean_accounting()
    daemon.audit()


@pytest.mark.parametrize("session", ["", "s"])
def test_a_chunk_that_a_lookup_names_twice_unbalances_nothing(pressed: Daemon, engine: Worker, session: str) -> None:
    engine.lookup([*KEYS[:2], KEYS[0], KEYS[5], KEYS[5]], "p", pin_seconds=HOUR)
    store(engine, KEYS, session_id="of the store")
    engine.lookup([*KEYS[:2], KEYS[0], KEYS[5], KEYS[5]], "q", pin_seconds=HOUR, session_id=session or None)
    for request_id in "pq":
        engine.end_request(request_id)
    engine.unregister()
    pressed.wait_for_clean_accounting()
    pressed.audit()


@pytest.mark.parametrize("seconds", [-1.0, 1e9, float("inf"), float("nan"), "long"])
def test_a_lookup_with_seconds_out_of_bounds_is_an_error_and_pins_nothing(
    pressed: Daemon, engine: Worker, seconds: Any
) -> None:
    refused = engine.error_of(engine.lookup_message(KEYS, "p", pin_seconds=seconds))
    assert refused.code == "bad_message"
    assert pins(pressed) == []


def test_more_pins_than_the_bound_are_rejected_and_the_lookups_answered(pressed: Daemon, engine: Worker) -> None:
    store(engine, KEYS)
    for number in range(770):
        assert engine.lookup(KEYS[:1], f"p{number}", pin_seconds=HOUR) == 1
    assert pressed.status()["pins"]["requests"]["accepted"] == 768
    assert rejected(pressed) == 2
    describe(engine)
    assert pin(pressed)["outcome"] == "accepted", "the rest is left to operators"


def test_a_pin_whose_first_chunk_finds_no_room_ends_for_that_reason(
    make_daemon: MakeDaemon, make_worker: MakeWorker
) -> None:
    daemon = make_daemon(l1_size="1MiB", pin_share=0.1)
    worker = make_worker(daemon)
    room = int(daemon.metric("kvserver_cache_pin_limit_bytes") // worker.chunk_bytes)
    for number, chunks in enumerate((8, room)):
        worker.lookup(make_keys(chunks, number), f"p{number}", pin_seconds=HOUR)  # nothing of either is stored yet
    store(worker, make_keys(room, 1))
    store(worker, make_keys(8, 0))
    wait_until(lambda: daemon.status()["pins"]["ended"]["no_room"] == 1, 60, "the first one ends")
    assert daemon.status()["pins"]["ended"]["lost_tier"] == 0
    assert [each["tokens"] for each in pins(daemon)] == [room * CHUNK_BLOCKS * BLOCK]


def test_a_prompt_shorter_than_a_chunk_is_pinned_block_by_block(
    make_daemon: MakeDaemon, make_worker: MakeWorker
) -> None:
    daemon = make_daemon(l1_size="1MiB", pin_share=0.5)
    worker = make_worker(daemon, groups=(ObjectGroup("full", (0,), 16),), tails=True)
    blocks = make_keys(3, "tail")
    message = worker.lookup_message([], "p", tail_keys=b"".join(blocks), pin_seconds=HOUR)
    worker.ask(message, LookupReply)
    assert rejected(daemon) == 0
    worker.store(blocks, range(1, 4), group=1)
    wait_until(lambda: daemon.metric("kvserver_cache_pinned_bytes") > 0, 20, "the blocks are protected")
