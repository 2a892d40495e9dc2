"""KV events of an engine with several object groups name, for each KV cache group, the blocks that its objects hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from support.daemon import Daemon, wait_until
from support.kv_chunks import Prompt
from support.kv_follower import Follower
from support.kv_subscriber import Blocks, Subscriber
from support.memory import two_groups
from support.worker import Worker

from kvserver.protocol import ErrorCode, KVEventsTaken, KVGroup, ObjectGroup
from kvserver.routing.block_hashes import hash_blocks

FULL, WINDOW = ObjectGroup("full", (0,), 16), ObjectGroup("window", (1,), 16, tokens=31)
KINDS = (KVGroup("full_attention"), KVGroup("sliding_window", 32))
MakeWorker = Callable[..., Worker]


@pytest.fixture
def daemon(make_daemon: Callable[..., Daemon], tmp_path_factory: pytest.TempPathFactory) -> Daemon:
    folder = tmp_path_factory.mktemp("kv")
    urls = {f"kv_events{name}_endpoint": f"ipc://{folder}/events{name}" for name in ("", "_replay")}
    return make_daemon(**urls)


@pytest.fixture
def engine(daemon: Daemon, make_worker: MakeWorker) -> Worker:
    return make_worker(daemon, geometry=two_groups(), groups=(FULL, WINDOW))


def prompt(chunks: int, first: int = 0) -> Prompt:
    return Prompt(range(first, first + 64 * chunks), chunk_blocks=4, block=16)


def store(engine: Worker, of: Prompt) -> None:
    engine.store(of.keys, range(1, 1 + 4 * len(of.keys)), contents=of.contents())


def store_window(engine: Worker, of: Prompt, chunk: int, **changes: object) -> None:
    engine.store(of.keys[chunk : chunk + 1], range(40, 42), group=1, **changes)


def followed(engine: Worker) -> Follower:
    engine.send(engine.description(groups=KINDS))
    return Follower(lambda message: engine.ask(message, KVEventsTaken), engine.instance_id, engine.incarnation)


def wait_for(follower: Follower, expected: set[tuple[int, bytes]]) -> None:
    def received() -> bool:
        follower.step()
        return follower.whole and follower.names == {("CPU", *name) for name in expected}

    wait_until(received, what=f"{len(expected)} blocks are received")
    assert follower.before == set()


def snapshot_of(body: str) -> set[tuple[str, int | None, object]]:
    """Each block is named once here: no two chunks share one."""
    blocks = Blocks()
    for line in body.splitlines()[1:]:
        event = json.loads(line)
        blocks.apply_event({**event, "block_hashes": [bytes.fromhex(name) for name in event["block_hashes"]]})
    return blocks.resident


def full(of: Prompt) -> set[tuple[int, bytes]]:
    return {(0, name) for name in of.hashes}


def window(of: Prompt, chunk: int) -> set[tuple[int, bytes]]:
    return {(1, name) for name in of.hashes[4 * chunk + 2 : 4 * chunk + 4]}


def test_of_a_window_the_blocks_are_published_that_its_objects_hold(daemon: Daemon, engine: Worker) -> None:
    subscriber = Subscriber(daemon.flags["kv_events_endpoint"], daemon.flags["kv_events_replay_endpoint"])
    follower = followed(engine)
    one, other = prompt(3), prompt(2, first=1000)
    try:
        store(engine, one)
        wait_for(follower, full(one))
        store_window(engine, one, 1)
        wait_for(follower, full(one) | window(one, 1))
        store_window(engine, one, 2, dropped=one.keys[1])
        wait_for(follower, full(one) | window(one, 2))
        store_window(engine, other, 0)  # which nothing describes yet
        store(engine, other)
        expected = full(one) | full(other) | window(one, 2) | window(other, 0)
        wait_for(follower, expected)
        subscriber.follow(lambda: subscriber.blocks.resident == {("CPU", *name) for name in expected})
        code, body = daemon.http("/kv/snapshot?model=test/model")
        assert (code, snapshot_of(body)) == (200, {("CPU", *name) for name in expected})
        daemon.http("/cache/clear", "POST")
        wait_for(follower, set())
        subscriber.follow(lambda: not subscriber.blocks.resident)
    finally:
        subscriber.close()
    (stored,) = [
        each
        for each in follower.received
        if each.stored and each.group == 1 and each.hashes == b"".join(one.hashes[10:])
    ]
    assert (stored.block_tokens, stored.parent) == (16, one.hashes[9])
    assert stored.tokens == one.contents().tokens[10 * 16 * 4 :]


def test_blocks_of_a_window_that_are_smaller_than_those_of_full_attention_are_named(
    daemon: Daemon, make_worker: MakeWorker
) -> None:
    large = ObjectGroup("full", (0,), 32)
    engine = make_worker(daemon, geometry=replace(two_groups(), block_tokens=32), groups=(large, WINDOW))
    follower = followed(engine)
    one = prompt(2)
    engine.store(one.keys, range(1, 5), contents=one.contents())
    store_window(engine, one, 1)
    wait_for(follower, {(0, name) for name in one.hashes[1::2]} | window(one, 1))
    sizes = {(each.group, each.block_tokens) for each in follower.received}
    assert sizes == {(0, 32), (1, 16)}


def test_contents_with_a_store_of_another_group_are_refused(engine: Worker) -> None:
    one = prompt(1)
    error = engine.error_of(engine.store_message(one.keys, [1, 2], group=1, contents=one.contents()))
    assert (error.code, "object group 1" in error.message) == (ErrorCode.BAD_KEYS.value, True)


def test_what_another_rank_stored_before_its_description_arrived_is_published(
    daemon: Daemon, make_worker: MakeWorker
) -> None:
    shared = (ObjectGroup("full", (0,), 16, replicated=True), WINDOW)
    same = {"instance_id": "engine", "incarnation": "one", "world_size": 2, "groups": shared}
    ranks = [make_worker(daemon, geometry=two_groups(), rank=rank, **same) for rank in range(2)]
    follower = followed(ranks[0])
    one = prompt(4)
    for rank, contents in ((ranks[1], None), (ranks[0], one.contents())):
        rank.store(one.keys, range(1, 17), contents=contents)
    wait_for(follower, full(one))


def matched(daemon: Daemon, **query: object) -> int:
    """Blocks in L1; -1 before the engine is described."""
    for found in daemon.match(**query).values():
        assert found["best"] == found["l1"]
        return int(found["l1"])
    return -1


def test_a_router_is_answered_with_the_boundary_that_a_lookup_finds(daemon: Daemon, engine: Worker) -> None:
    start, tokens = b"s" * 32, list(range(4 * 64))
    hashes = list(hash_blocks("sha256", start, 16, tokens, None, ""))
    keys = hashes[3::4]
    described = {"hash_algorithm": "sha256", "hash_start": start, "hash_block_tokens": 16}
    engine.send(engine.description(groups=KINDS, **described))
    engine.store(keys, range(1, 17))

    def wait_for_boundary(chunks: int) -> None:
        assert engine.lookup(keys) == chunks
        query = {"block_hashes": [name.hex() for name in hashes]}
        wait_until(lambda: matched(daemon, **query) == 4 * chunks, what=f"{chunks} chunks are matched")

    wait_for_boundary(0)
    for chunk in (1, 3):
        engine.store(keys[chunk : chunk + 1], range(40, 42), group=1)
        wait_for_boundary(chunk + 1)
    model = {"model": engine.model_name}
    assert (matched(daemon, tokens=tokens, **model), matched(daemon, tokens=[*tokens, 1], **model)) == (8, 16)
    engine.end_request()
    daemon.wait_for_accounting(leases=0)
    engine.store(keys[1:2], range(40, 42), group=1, dropped=keys[3])
    wait_for_boundary(2)
