"""Pins of a real daemon: what they protect under pressure, and what ends them. Most refusals are in `test_promise_refusals.py`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.commands import run
from support.daemon import Daemon, wait_until
from support.kept_l1 import restart
from support.pins import BLOCK, CHUNK_BLOCKS, KEYS, TOKENS, describe, hashes, pin, pins, post, press
from support.worker import Worker, make_keys

from kvserver.protocol import AwaitFill, LookupReply, ObjectGroup

MakeDaemon, MakeWorker = Callable[..., Daemon], Callable[..., Worker]


@pytest.fixture
def pressed(make_daemon: MakeDaemon) -> Daemon:
    return make_daemon(l1_size="1MiB", pin_share=0.5)


@pytest.fixture
def engine(pressed: Daemon, make_worker: MakeWorker) -> Worker:
    worker = make_worker(pressed)
    describe(worker)
    worker.store(KEYS, worker.blocks_for(len(KEYS)))
    return worker


def test_a_pinned_prompt_stays_under_pressure_and_leaves_after_its_deletion(pressed: Daemon, engine: Worker) -> None:
    found = pin(pressed)
    assert (found["tokens"], found["tiers"], found["ready_in_seconds"]) == (len(TOKENS), ["l1"], 0)
    assert found["bytes"] == len(KEYS) * pressed.status()["l1"]["used_bytes"] // pressed.status()["l1"]["chunks"]
    press(engine, pressed)
    assert engine.lookup(KEYS, "r1") == len(KEYS)
    engine.end_request("r1")
    (shown,) = pins(pressed)
    assert shown == found
    lines = run("status", "--http-port", str(pressed.http_port), timeout=120).stdout
    assert "pins   1: " in lines
    assert "1 accepted" in lines
    code, text = pressed.http(f"/cache/pins/{found['id']}", "DELETE")
    assert (code, json.loads(text)["outcome"], json.loads(text)["tokens"]) == (200, "accepted", len(TOKENS))
    assert pins(pressed) == []
    press(engine, pressed)
    assert engine.lookup(KEYS, "r2") == 0
    code, text = pressed.http(f"/cache/pins/{found['id']}", "DELETE")
    assert (code, json.loads(text)["outcome"]) == (404, "missing")


def test_the_same_prompt_unpinned_does_not_stay(pressed: Daemon, engine: Worker) -> None:
    press(engine, pressed)
    assert engine.lookup(KEYS, "r1") == 0


def test_the_end_of_one_pin_leaves_what_another_names(pressed: Daemon, engine: Worker) -> None:
    first, second = pin(pressed), pin(pressed, tokens=TOKENS[: 3 * CHUNK_BLOCKS * BLOCK])
    assert pressed.http(f"/cache/pins/{first['id']}", "DELETE")[0] == 200
    press(engine, pressed)
    assert engine.lookup(KEYS, "r1") == 3
    assert [shown["id"] for shown in pins(pressed)] == [second["id"]]


def test_a_pin_of_block_hashes_is_one_of_their_tokens(pressed: Daemon, engine: Worker) -> None:
    by_tokens = pin(pressed)
    by_hashes = pin(pressed, tokens=None, block_hashes=[value.hex() for value in hashes()])
    assert {**by_hashes, "id": 0, "expires_at": 0} == {**by_tokens, "id": 0, "expires_at": 0}
    assert pressed.metric("kvserver_cache_pinned_bytes") == by_tokens["bytes"], "both name the same chunks"


@pytest.mark.parametrize("chunks", [0, 2])
def test_the_blocks_behind_the_last_chunk_are_pinned_with_it(
    pressed: Daemon, make_worker: MakeWorker, chunks: int
) -> None:
    worker = make_worker(pressed, groups=(ObjectGroup("full", (0,), BLOCK),), tails=True)
    describe(worker)
    tokens = TOKENS[: (chunks * CHUNK_BLOCKS + 3) * BLOCK + 5]
    tail = hashes(tokens)[chunks * CHUNK_BLOCKS :]
    if chunks:
        worker.store(KEYS[:chunks], worker.blocks_for(chunks))
    after = KEYS[chunks - 1] if chunks else None
    assert worker.store(tail, [50, 51, 52], group=1, first_chunk=chunks * CHUNK_BLOCKS, after=after).stored == 3
    found = pin(pressed, tokens=tokens)
    assert found["tokens"] == (chunks * CHUNK_BLOCKS + 3) * BLOCK
    press(worker, pressed)
    message = worker.lookup_message(KEYS[:chunks], tail_keys=b"".join(tail))
    reply = worker.ask(message, LookupReply)
    assert (reply.hit_chunks, reply.tail_blocks) == (chunks, 3)
    worker.end_request()
    assert pressed.http(f"/cache/pins/{found['id']}", "DELETE")[0] == 200
    press(worker, pressed)
    assert worker.ask(worker.lookup_message(KEYS[:chunks], tail_keys=b"".join(tail)), LookupReply).tail_blocks == 0


def test_a_pin_of_another_salt_finds_nothing(pressed: Daemon, engine: Worker) -> None:
    pin(pressed, "missing", cache_salt="other")


def test_pins_hold_no_more_than_their_share_and_stores_go_on(make_daemon: MakeDaemon, make_worker: MakeWorker) -> None:
    daemon = make_daemon(l1_size="1MiB", pin_share=0.1)
    worker = make_worker(daemon)
    describe(worker)
    worker.store(KEYS, worker.blocks_for(len(KEYS)))
    found = pin(daemon, "clipped")
    assert found["reason"].startswith("no_room: ")
    limit = daemon.metric("kvserver_cache_pin_limit_bytes")
    assert 0 < found["bytes"] <= limit <= 0.1 * daemon.status()["l1"]["size_bytes"]
    assert found["bytes"] + worker.chunk_bytes > limit, "it protects less than it may"
    press(worker, daemon)
    assert worker.lookup(KEYS) == found["tokens"] // (CHUNK_BLOCKS * BLOCK)


def test_l1_that_is_pinned_whole_skips_stores_without_an_error(
    make_daemon: MakeDaemon, make_worker: MakeWorker
) -> None:
    daemon = make_daemon(l1_size="1MiB", pin_share=1)
    worker = make_worker(daemon)
    describe(worker)
    worker.store(make_keys(1), worker.blocks_for(1))
    room = daemon.status()["l1"]["size_bytes"] // daemon.status()["l1"]["used_bytes"]
    assert daemon.http("/cache/clear", "POST")[0] == 200
    tokens = list(range(room * CHUNK_BLOCKS * BLOCK))
    for number, key in enumerate(hashes(tokens)[CHUNK_BLOCKS - 1 :: CHUNK_BLOCKS]):
        assert worker.store([key], worker.blocks_for(1), first_chunk=number).stored == 1
    found = pin(daemon, tokens=tokens)
    assert worker.store(make_keys(2), worker.blocks_for(2)).stored == 0
    assert daemon.status()["l1"]["evictions"] == 0
    assert daemon.http(f"/cache/pins/{found['id']}", "DELETE")[0] == 200
    assert worker.store(make_keys(2), worker.blocks_for(2)).stored == 2


def test_a_clear_ends_pins_and_a_time_to_live_does(pressed: Daemon, engine: Worker) -> None:
    pin(pressed)
    assert pressed.http("/cache/clear", "POST")[0] == 200
    assert pins(pressed) == []
    engine.store(KEYS, engine.blocks_for(len(KEYS)))
    pin(pressed, ttl_seconds=0.001)
    wait_until(lambda: not pins(pressed), what="it expires")
    ended = pressed.status()["pins"]["ended"]
    assert {why: count for why, count in ended.items() if count} == {"cleared": 1, "expired": 1}
    engine.unregister()
    pressed.wait_for_clean_accounting()
    pressed.audit()


def test_a_pin_survives_its_engine(pressed: Daemon, engine: Worker, make_worker: MakeWorker) -> None:
    pin(pressed)
    engine.close()
    other = make_worker(pressed)
    press(other, pressed)
    assert other.lookup(KEYS) == len(KEYS)


def test_weights_that_change_in_place_end_the_pins_of_those_before(pressed: Daemon, make_worker: MakeWorker) -> None:
    one, two = make_worker(pressed), make_worker(pressed)
    for worker in (one, two):
        describe(worker, variant="first")
        worker.round_trip()
    one.store(KEYS, one.blocks_for(len(KEYS)), variant="first")
    pin(pressed)
    describe(one, variant="second")
    one.round_trip()
    assert len(pins(pressed)) == 1, "the other engine has the weights that it was made of"
    describe(two, variant="second")
    two.round_trip()
    assert pins(pressed) == []
    assert pressed.metric("kvserver_cache_pins_ended_total", reason="weights") == 1


def test_what_pins_cost_others_is_shown(pressed: Daemon, engine: Worker) -> None:
    pin(pressed)
    press(engine, pressed)
    assert pressed.metric("kvserver_cache_pin_passed_over_chunks_total") == len(KEYS)
    other = make_keys(1, "other")
    engine.store(other, engine.blocks_for(1))
    left = pressed.status()["l1"]["chunks"] - len(KEYS)
    press(engine, pressed, left + 2)  # so it left by 2 to 6 evictions ago, and 8 chunks more would fit without the pin
    assert engine.lookup(other, "q") == 0
    missed = pressed.metric("kvserver_lookup_missed_tokens_total", reason="pinned_out")
    assert missed == CHUNK_BLOCKS * BLOCK
    kept = "L1 without pins would have kept it"
    wait_until(lambda: kept in pressed.http("/explain?request_id=q")[1], what="the events are handled")
    assert pressed.metric("kvserver_cache_pin_requests_total", outcome="accepted") == 1


# ---- restarts -------------------------------------------------------------------------------------------


def test_a_pin_survives_a_restart_that_keeps_l1(make_daemon: MakeDaemon, make_worker: MakeWorker, path: Path) -> None:
    daemon = make_daemon(l1_size="1MiB", pin_share=0.5, l1_file=path)
    with make_worker(daemon) as worker:
        describe(worker)
        worker.store(KEYS, worker.blocks_for(len(KEYS)))
        found = pin(daemon)
        press(worker, daemon)
    restart(daemon)
    assert pins(daemon) == [found]
    with make_worker(daemon) as worker:
        press(worker, daemon)
        assert worker.lookup(KEYS) == len(KEYS)
        assert daemon.http(f"/cache/pins/{found['id']}", "DELETE")[0] == 200
        worker.end_request()
        press(worker, daemon)
        assert worker.lookup(KEYS, "r2") == 0
    daemon.wait_for_clean_accounting()
    daemon.audit()


def test_a_restart_without_pins_ends_them(make_daemon: MakeDaemon, make_worker: MakeWorker, path: Path) -> None:
    daemon = make_daemon(l1_size="1MiB", pin_share=0.5, l1_file=path)
    with make_worker(daemon) as worker:
        describe(worker)
        worker.store(KEYS, worker.blocks_for(len(KEYS)))
        pin(daemon)
    restart(daemon, pin_share=0)
    assert pins(daemon) == []


def test_a_smaller_l1_ends_a_pin_that_it_does_not_keep(
    make_daemon: MakeDaemon, make_worker: MakeWorker, path: Path
) -> None:
    daemon = make_daemon(l1_size="1MiB", pin_share=1, l1_file=path)
    with make_worker(daemon) as worker:
        describe(worker)
        for number in range(16):  # they have the first pages
            worker.store(make_keys(1, number), worker.blocks_for(1))
        worker.store(KEYS, worker.blocks_for(len(KEYS)))
        assert daemon.status()["l1"]["evictions"] == 0
        pin(daemon)
    restart(daemon, l1_size="64KiB")
    wait_until(lambda: not pins(daemon), what="no chunk of it was kept")
    assert daemon.metric("kvserver_cache_pins_ended_total", reason="not_kept") == 1


# ---- storage --------------------------------------------------------------------------------------------


def only_in_l2(
    make_daemon: MakeDaemon, make_worker: MakeWorker, l2: str, pin_share: float = 0.5
) -> tuple[Daemon, Worker]:
    """A daemon whose tier has the prompt, which has left L1."""
    daemon = make_daemon(l1_size="1MiB", pin_share=pin_share, l2=l2)
    worker = make_worker(daemon)
    describe(worker)
    worker.store(KEYS, worker.blocks_for(len(KEYS)))
    wait_until(lambda: daemon.tier()["objects"] >= len(KEYS), what="they are written")
    press(worker, daemon)
    return daemon, worker


def test_of_a_prompt_in_l2_only_the_beginning_that_will_fit_is_read_for_its_pin(
    make_daemon: MakeDaemon, make_worker: MakeWorker, tmp_path: Path
) -> None:
    daemon, worker = only_in_l2(make_daemon, make_worker, f"file://{tmp_path}/l2?size=64MiB", pin_share=0.06)
    fits = int(daemon.metric("kvserver_cache_pin_limit_bytes")) // worker.chunk_bytes
    assert 0 < fits < len(KEYS)
    found = pin(daemon, "deferred")
    assert found["reason"].startswith(f"reading: {fits} ")
    wait_until(lambda: pins(daemon)[0]["outcome"] == "clipped", 60, "what fits is read")
    (shown,) = pins(daemon)
    assert shown["tokens"] == fits * CHUNK_BLOCKS * BLOCK
    assert shown["reason"] == f"no_room: {len(KEYS) - fits} chunks of L2 do not fit into --pin-share"
    assert daemon.tier()["hits"] == fits
    press(worker, daemon)
    assert worker.lookup(KEYS, "q") == fits


def test_a_prompt_that_is_only_in_l2_is_read_for_its_pin_and_protected(
    make_daemon: MakeDaemon, make_worker: MakeWorker, tmp_path: Path
) -> None:
    daemon, worker = only_in_l2(make_daemon, make_worker, f"file://{tmp_path}/l2?size=64MiB")
    found = pin(daemon, "deferred")
    assert (found["tokens"], found["tiers"]) == (0, ["l2"])
    assert found["reason"].startswith("reading: 8 ")
    wait_until(lambda: not pins(daemon)[0]["reason"], 120, "all is read, and no request asks for it")
    (shown,) = pins(daemon)
    assert (shown["outcome"], shown["tokens"], shown["tiers"], shown["ready_in_seconds"]) == (
        "accepted", len(TOKENS), ["l1"], 0,
    )  # fmt: skip
    wait_until(lambda: daemon.metric("kvserver_cache_prefetches_live") == 0, 60, "the pin alone keeps what was read")
    press(worker, daemon)
    assert worker.lookup(KEYS, "q") == len(KEYS)
    worker.end_request("q")
    assert daemon.http(f"/cache/pins/{found['id']}", "DELETE")[0] == 200
    press(worker, daemon, 120)
    again = pin(daemon, "deferred")
    assert again["ready_in_seconds"] != 0
    assert daemon.http(f"/cache/pins/{again['id']}", "DELETE")[0] == 200
    wait_until(lambda: daemon.metric("kvserver_cache_prefetches_live") == 0, 60, "the reads end with their pin")
    worker.unregister()
    daemon.wait_for_clean_accounting()
    daemon.audit()


def without_room_for_a_read(daemon: Daemon, worker: Worker) -> dict[str, Any]:
    """A deferred pin beside as many prefetches as there may be."""
    tokens = TOKENS[: CHUNK_BLOCKS * BLOCK]
    worker.store(KEYS[:1], worker.blocks_for(1))
    for _ in range(64):
        assert post(daemon, page="/cache/prefetches", tokens=tokens)[1]["outcome"] == "accepted"
    return pin(daemon, "deferred")


def test_a_prompt_that_is_not_read_for_its_pin_is_protected_once_a_request_reads_it(
    make_daemon: MakeDaemon, make_worker: MakeWorker, tmp_path: Path
) -> None:
    daemon, worker = only_in_l2(make_daemon, make_worker, f"file://{tmp_path}/l2?size=64MiB")
    found = without_room_for_a_read(daemon, worker)
    assert (found["tiers"], found["ready_in_seconds"]) == (["l1", "l2"], None)
    assert found["reason"].startswith("in_l2: 7 ")
    assert daemon.metric("kvserver_cache_pin_deferred_chunks") == 7
    number = 0

    def filled() -> bool:
        nonlocal number
        number += 1
        message = worker.lookup_message(KEYS, f"r{number}")
        if worker.ask(message, LookupReply).hit_chunks < len(KEYS):
            worker.ask(AwaitFill(message, wait_ms=10_000), LookupReply)
        worker.end_request(f"r{number}")
        return not pins(daemon)[0]["reason"]

    wait_until(filled, 120, "all is read")
    assert pins(daemon)[0]["outcome"] == "accepted"


def test_a_pin_whose_chunks_left_the_tier_is_clipped_to_those_in_l1(
    make_daemon: MakeDaemon, make_worker: MakeWorker, tmp_path: Path
) -> None:
    daemon, worker = only_in_l2(make_daemon, make_worker, f"file://{tmp_path}/l2?size=8MiB")
    without_room_for_a_read(daemon, worker)
    number = 0

    def ended() -> bool:
        nonlocal number
        worker.store(make_keys(4, ("l2", number)), worker.blocks_for(4))
        number += 1
        return pins(daemon)[0]["reason"].startswith("lost: ")

    wait_until(ended, 120, "the tier evicts them")
    (shown,) = pins(daemon)
    assert (shown["outcome"], shown["tokens"]) == ("clipped", CHUNK_BLOCKS * BLOCK)


# ---- refusals -------------------------------------------------------------------------------------------


def test_engines_that_share_no_kv_are_refused_until_one_is_named(pressed: Daemon, make_worker: MakeWorker) -> None:
    one, other = make_worker(pressed), make_worker(pressed, layout="HND")
    for worker in (one, other):
        describe(worker)
        worker.store(KEYS, worker.blocks_for(len(KEYS)))

    def several() -> bool:
        return post(pressed, tokens=TOKENS, ttl_seconds=60)[1].get("reason", "").startswith("several_namespaces: ")

    wait_until(several, what="both are described")
    assert all(each["outcome"] == "accepted" for each in pins(pressed)), "those of the time when one was described"
    pin(pressed, instance_ids=[other.instance_id])


def test_the_pages_need_the_operators_token(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("tokenoftheoperator")
    token.chmod(0o600)
    daemon = make_daemon(pin_share=0.5, http_token_file=token)
    assert daemon.http("/cache/pins")[0] == 401
    assert daemon.http("/cache/pins/1", "DELETE")[0] == 401
    assert post(daemon, tokens=[1], ttl_seconds=1)[0] == 401
