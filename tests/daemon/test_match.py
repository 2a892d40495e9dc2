"""A real daemon reports what engines would find of a prompt: in L1 by their stores, in L0 by their own KV events."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.daemon import Daemon, wait_until
from support.engine_publisher import EnginePublisher, removed, stored
from support.worker import Worker

from kvserver.routing.block_hashes import hash_blocks

START = b"s" * 32
TOKENS = list(range(500, 1012))  # 32 blocks, 8 chunks
HASHES = list(hash_blocks("sha256", START, 16, TOKENS, None, ""))
KEYS = HASHES[3::4]


def introduce(worker: Worker, **more: Any) -> None:
    worker.send(worker.description(hash_algorithm="sha256", hash_start=START, hash_block_tokens=16, **more))


def found(daemon: Daemon, worker: Worker, tier: str) -> int:
    matched = daemon.match(block_hashes=[value.hex() for value in HASHES]).get(worker.instance_id)
    return -1 if matched is None else int(matched[tier])


def wait_for(daemon: Daemon, worker: Worker, tier: str, blocks: int) -> None:
    wait_until(lambda: found(daemon, worker, tier) == blocks, what=f"{blocks} blocks in {tier}")


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[EnginePublisher]:
    folder = daemon.folder / "engine"
    folder.mkdir()
    publisher = EnginePublisher(folder)
    yield publisher
    publisher.close()
    for path in Path(folder).iterdir():
        path.unlink()
    folder.rmdir()


def test_what_one_engine_stored_is_found_by_all_that_can_load_it(
    daemon: Daemon, make_worker: Callable[..., Worker]
) -> None:
    one, two, other = make_worker(daemon), make_worker(daemon), make_worker(daemon, layout="HND")
    for worker in (one, two, other):
        introduce(worker)
    one.store(KEYS[:5], one.blocks_for(5))
    for worker, blocks in ((one, 20), (two, 20), (other, 0)):
        wait_for(daemon, worker, "l1", blocks)
    answer = daemon.match(model=one.model_name, tokens=TOKENS)
    assert (answer[one.instance_id]["best"], answer[one.instance_id]["blocks"]) == (20, 32)
    assert daemon.http("/cache/clear", "POST")[0] == 200
    wait_for(daemon, two, "l1", 0)


def test_engine_that_connects_later_matches_chunks_stored_earlier(
    daemon: Daemon, make_worker: Callable[..., Worker]
) -> None:
    first = make_worker(daemon)
    first.store(KEYS, first.blocks_for(8))
    first.close()
    second = make_worker(daemon)
    introduce(second)
    wait_for(daemon, second, "l1", 32)


def test_match_continues_between_blocks_of_the_engine_and_l1(
    daemon: Daemon, worker: Worker, engine: EnginePublisher
) -> None:
    endpoints = {"events_endpoint": engine.endpoint, "events_replay_endpoint": engine.replay_endpoint}
    introduce(worker, events_topic=engine.topic, **endpoints)
    engine.wait_for_subscriber()
    engine.publish(stored(HASHES[:6]), stored([int.from_bytes(value[-8:], "big") for value in HASHES[8:10]]))
    wait_for(daemon, worker, "l0", 6)
    worker.store(KEYS[1:2], worker.blocks_for(1))
    wait_for(daemon, worker, "best", 10)
    assert (found(daemon, worker, "l0"), found(daemon, worker, "l1")) == (6, 0)
    engine.publish(removed(HASHES[:1]))
    wait_for(daemon, worker, "best", 0)
    (shown,) = json.loads(daemon.http("/instances")[1])["instances"]
    assert (shown["instance_id"], shown["l0"]["blocks"], shown["l1"]["chunks"]) == (worker.instance_id, 7, 1)
    assert shown["l0"]["kv_events"]["state"] == "complete"
    name = {"instance_id": worker.instance_id, "model_name": worker.model_name}
    assert daemon.metric("kvserver_engine_events_following", **name) == 1
    assert daemon.metric("kvserver_engine_events_gaps_total", **name) == 0
    worker.close()
    wait_until(lambda: daemon.metric("kvserver_engine_events_following", **name) is None)


def test_disconnected_engine_is_in_no_match(daemon: Daemon, worker: Worker) -> None:
    introduce(worker)
    wait_for(daemon, worker, "best", 0)
    worker.close()
    wait_for(daemon, worker, "best", -1)


def test_the_index_is_in_the_status(daemon: Daemon, worker: Worker) -> None:
    introduce(worker)
    worker.store(KEYS, worker.blocks_for(8))

    def blocks() -> int:
        observers = daemon.status()["kv_events"]["observers"]
        (index,) = (observer for observer in observers if observer["name"] == "index")
        return int(index["blocks"])

    wait_until(lambda: blocks() == 8)


def test_queries_are_counted_and_timed_also_malformed_ones(daemon: Daemon) -> None:
    def count() -> float:
        return daemon.metric("kvserver_kv_match_seconds_count")

    before, seconds = count(), daemon.metric("kvserver_kv_match_seconds_sum")
    daemon.match(block_hashes=[value.hex() for value in HASHES])
    with pytest.raises(urllib.error.HTTPError):
        daemon.match(block_hashes=7)
    assert count() == before + 2
    assert daemon.metric("kvserver_kv_match_seconds_bucket", le="+Inf") == before + 2
    assert 0 < daemon.metric("kvserver_kv_match_seconds_sum") - seconds < 5


def test_malformed_match_bodies_are_refused_and_the_daemon_serves_on(daemon: Daemon) -> None:
    for content_type in ("application/json", "application/msgpack", "text/plain"):
        for body in (b"", b"\xc1", b"[" * 50_000, msgspec.msgpack.encode({"block_hashes": 7})):
            request = urllib.request.Request(
                f"http://127.0.0.1:{daemon.http_port}/kv/match", body, {"Content-Type": content_type}
            )
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request, timeout=5)
            assert refused.value.code in (400, 415)
            refused.value.close()
