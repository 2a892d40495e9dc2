"""Single blocks behind the last full chunk of a prompt: stored, found with the chunks, loaded, counted, published and matched."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from support.daemon import Daemon, wait_until
from support.devices import on_each_device
from support.kv_chunks import Prompt
from support.kv_follower import Follower
from support.memory import awkward, two_groups
from support.worker import Worker, make_keys

from kvserver.protocol import (
    Error,
    ErrorCode,
    KVEventsTaken,
    KVGroup,
    LookupReply,
    LookupTail,
    ObjectGroup,
    Retrieved,
    Stored,
)
from kvserver.protocol.client import RequestFailed

pytestmark = on_each_device
MakeWorker = Callable[..., Worker]
FULL = ObjectGroup("full", (0,), 16)
TAIL = 1  # the number of the group of single blocks
CHUNK, BLOCK = 64, 16  # tokens


@pytest.fixture
def engine(daemon: Daemon, make_worker: MakeWorker) -> Worker:
    return make_worker(daemon, groups=(FULL,), tails=True)


def ask(worker: Worker, keys: list[bytes], tail: list[bytes] = [], **changes: Any) -> LookupReply:  # noqa: B006
    return worker.ask(worker.lookup_message(keys, tail_keys=b"".join(tail), **changes), LookupReply)


def tail_message(worker: Worker, tail: list[bytes], request_id: str = "r") -> LookupTail:
    return LookupTail(worker.instance_id, worker.incarnation, request_id, b"".join(tail))


def go_on(worker: Worker, tail: list[bytes], request_id: str = "r") -> LookupReply:
    return worker.ask(tail_message(worker, tail, request_id), LookupReply)


def found(reply: LookupReply) -> tuple[int, int, bool]:
    return reply.hit_chunks, reply.tail_blocks, reply.wants_tail


def counts(daemon: Daemon, worker: Worker) -> dict[str, Any]:
    row = next(i for i in daemon.status()["instances"] if i["instance_id"] == worker.instance_id)
    counted = dict(row["requests"])
    counted["missed_tokens"] = {reason: tokens for reason, tokens in counted["missed_tokens"].items() if tokens}
    return counted


def test_blocks_are_stored_and_loaded_byte_for_byte_beside_chunks(engine: Worker) -> None:
    chunks, tail = make_keys(2), make_keys(3)
    content = engine.memory.blocks([*range(1, 9), 20, 30, 40])
    assert engine.store(chunks, range(1, 9)) == Stored(stored=2, skipped=0)
    assert engine.store(tail, [20, 30, 40], group=TAIL, first_chunk=8, after=chunks[1]) == Stored(stored=3, skipped=0)
    assert found(ask(engine, chunks, tail)) == (2, 3, False)

    engine.memory.fill()
    target = [*range(41, 49), 3, 1, 2]
    expected = engine.memory.image_with(dict(zip(target, content, strict=True)))
    assert engine.load(chunks, target[:8], messages=2) == Retrieved(chunks=2)
    assert engine.load(tail, target[8:], group=TAIL, messages=2) == Retrieved(chunks=3)
    assert engine.memory.image() == expected


def test_a_prompt_shorter_than_a_chunk_is_found_by_its_blocks(engine: Worker) -> None:
    tail = make_keys(3)
    engine.store(tail[:2], [5, 6], group=TAIL)
    assert found(ask(engine, [], tail)) == (0, 2, False)


def test_where_the_chunks_end_early_the_lookup_goes_on_inside_the_next_one(daemon: Daemon, engine: Worker) -> None:
    """The next turn of a chat: its prompt begins with the last turn's, whose end lies inside a chunk of it."""
    chunks, tail, other = make_keys(4), make_keys(2), make_keys(2)
    engine.store(chunks[:2], range(1, 9))
    engine.store(tail, [20, 21], group=TAIL, first_chunk=8, after=chunks[1])
    before = counts(daemon, engine)["lookups"]
    assert found(ask(engine, chunks, other, tokens=4 * CHUNK + 40)) == (2, 0, True)
    assert counts(daemon, engine)["lookups"] == before, "it is not over"
    assert found(go_on(engine, [*tail, *other])) == (2, 2, False)
    after = counts(daemon, engine)
    assert (after["lookups"], after["hits"]) == (1, 1)
    assert (after["lookup_tokens"], after["hit_tokens"]) == (4 * CHUNK, 2 * CHUNK + 2 * BLOCK)
    assert after["missed_tokens"] == {"never_stored": 2 * CHUNK - 2 * BLOCK, "partial_chunk": 40}


def test_missed_tokens_of_the_last_chunk_are_those_that_no_block_covers(daemon: Daemon, engine: Worker) -> None:
    chunks, tail = make_keys(1), make_keys(3)
    engine.store(chunks, range(1, 5))
    engine.store(tail[:2], [20, 21], group=TAIL, first_chunk=4, after=chunks[0])
    assert found(ask(engine, chunks, tail, tokens=CHUNK + 50)) == (1, 2, False)
    counted = counts(daemon, engine)
    assert (counted["lookup_tokens"], counted["hit_tokens"]) == (CHUNK + 32, CHUNK + 32)
    assert counted["missed_tokens"] == {"partial_chunk": 18}


@pytest.mark.parametrize("end", ["the request ends", "it is looked up again", "the engine sends no keys"])
def test_a_lookup_whose_tail_is_never_named_counts_once(daemon: Daemon, engine: Worker, end: str) -> None:
    engine.store(make_keys(1), [20], group=TAIL)
    keys = make_keys(2)
    assert found(ask(engine, keys)) == (0, 0, True)
    if end == "the request ends":
        engine.end_request()
    elif end == "it is looked up again":
        assert found(ask(engine, keys)) == (0, 0, True)
        assert counts(daemon, engine)["lookups"] == 1
        engine.end_request()
    else:
        assert found(go_on(engine, [])) == (0, 0, False)
    lookups = 2 if end == "it is looked up again" else 1
    wait_until(lambda: counts(daemon, engine)["ended_requests"] > 0 or end == "the engine sends no keys")
    assert counts(daemon, engine)["lookups"] == lookups
    assert counts(daemon, engine)["missed_tokens"] == {"never_stored": lookups * 2 * CHUNK}
    assert engine.error_of(tail_message(engine, make_keys(1))).code == ErrorCode.BAD_KEYS.value


def test_without_any_tail_in_the_namespace_a_lookup_is_over_at_once(daemon: Daemon, engine: Worker) -> None:
    assert found(ask(engine, make_keys(2))) == (0, 0, False)
    assert counts(daemon, engine)["lookups"] == 1


def test_a_lookup_that_ends_in_two_steps_is_one_event_and_explained_with_its_tail(
    daemon: Daemon, engine: Worker
) -> None:
    tail = make_keys(2)
    engine.store(tail, [20, 21], group=TAIL)
    ask(engine, make_keys(2), tokens=2 * CHUNK + 8, request_id="two-steps")
    go_on(engine, tail, "two-steps")

    def explained() -> dict[str, Any] | None:
        _, body = daemon.http("/explain?request_id=two-steps")
        requests = json.loads(body).get("requests")
        return requests[0] if requests else None

    wait_until(lambda: explained() is not None)
    facts = explained()
    assert facts is not None
    assert facts["waits"]["lookups"] == 1
    assert facts["tokens"]["found"] == 2 * BLOCK
    assert (facts["missing"]["chunk"], facts["missing"]["token"]) == (0, 2 * BLOCK)
    assert facts["missed_tokens"] == {"never_stored": 2 * CHUNK - 2 * BLOCK, "partial_chunk": 8}


def test_a_load_of_blocks_alone_saves_their_tokens_once(daemon: Daemon, engine: Worker) -> None:
    chunks, tail = make_keys(1), make_keys(2)
    engine.store(chunks, range(1, 5))
    engine.store(tail, [20, 21], group=TAIL, first_chunk=4, after=chunks[0])
    engine.end_request("warm", prefill_tokens_per_second=1.0)
    engine.load(tail, [30, 31], group=TAIL, tokens=32, request_id="blocks", messages=1)
    assert counts(daemon, engine)["saved_tokens"] == 32
    engine.load(chunks, range(40, 44), tokens=96, request_id="both", messages=2)
    engine.load(tail, [32, 33], group=TAIL, tokens=96, request_id="both", messages=2)
    counted = counts(daemon, engine)
    assert counted["saved_tokens"] == 32 + 96
    assert counted["prefill_seconds_gained"] == pytest.approx(128, abs=2)
    assert (counted["stored_chunks"], counted["loaded_chunks"]) == (1, 1), "blocks are no chunks"


def test_ranks_that_take_turns_store_each_block_once_and_load_all(daemon: Daemon, make_worker: MakeWorker) -> None:
    same = {"instance_id": uuid.uuid4().hex, "incarnation": "a", "world_size": 2, "tails": True}
    groups = (ObjectGroup("full", (0,), 16, replicated=True),)
    ranks = [make_worker(daemon, groups=groups, rank=rank, **same) for rank in range(2)]
    for mine, first in zip(ranks[1].memory.maps, ranks[0].memory.maps, strict=True):
        mine[:] = first[:]
    tail = make_keys(3)
    content = ranks[0].memory.blocks([20, 21, 22])
    stored = [rank.store(tail, [20, 21, 22], group=TAIL, first_chunk=5).stored for rank in ranks]
    assert stored == [1, 2], "block 6 is rank 0's turn, blocks 5 and 7 are rank 1's"
    for rank in ranks:
        assert found(ask(rank, [], tail)) == (0, 3, False)
        expected = rank.memory.image_with(dict(zip([1, 2, 3], content, strict=True)))
        assert rank.load(tail, [1, 2, 3], group=TAIL) == Retrieved(chunks=3)
        assert rank.memory.image() == expected


def test_a_block_is_found_once_every_rank_has_stored_it(daemon: Daemon, make_worker: MakeWorker) -> None:
    same = {"instance_id": uuid.uuid4().hex, "incarnation": "a", "world_size": 2, "tails": True}
    ranks = [make_worker(daemon, groups=(FULL,), rank=rank, **same) for rank in range(2)]
    tail = make_keys(2)
    for rank, blocks in zip(ranks, (0, 2), strict=True):
        rank.store(tail, [20, 21], group=TAIL)
        assert found(ask(rank, [], tail)) == (0, blocks, False)


def test_an_engine_without_tails_shares_chunks_with_one_that_has_them(daemon: Daemon, make_worker: MakeWorker) -> None:
    """As an older adapter: it learns of no tails, and may not name any."""
    newer = make_worker(daemon, groups=(FULL,), tails=True)
    older = make_worker(daemon, groups=(FULL,))
    chunks, tail = make_keys(2), make_keys(1)
    newer.store(chunks[:1], range(1, 5))
    newer.store(tail, [20], group=TAIL, first_chunk=4, after=chunks[0])
    assert found(ask(older, chunks)) == (1, 0, False)
    assert older.load(chunks[:1], range(1, 5)) == Retrieved(chunks=1)
    for message in (
        older.lookup_message(chunks, tail_keys=tail[0]),
        older.store_message(tail, [20], group=TAIL, chunk_blocks=1),
    ):
        assert older.error_of(message).code == ErrorCode.BAD_KEYS.value


def test_more_blocks_than_a_chunk_has_are_refused(engine: Worker) -> None:
    assert engine.error_of(engine.lookup_message([], tail_keys=b"".join(make_keys(5)))).code == ErrorCode.BAD_KEYS.value
    assert engine.error_of(engine.lookup_message([])).code == ErrorCode.BAD_KEYS.value


@pytest.mark.parametrize(
    "groups", [(FULL, ObjectGroup("window", (1,), 16, tokens=31)), (ObjectGroup("full", (0,), 64),)]
)
def test_an_engine_of_windows_or_whole_blocks_cannot_register_tails(
    daemon: Daemon, make_worker: MakeWorker, groups: tuple[ObjectGroup, ...]
) -> None:
    geometry = two_groups() if len(groups) > 1 else awkward(block_tokens=64)
    with pytest.raises(RequestFailed) as failed:
        make_worker(daemon, geometry=geometry, groups=groups, tails=True)
    assert failed.value.code == ErrorCode.BAD_PLANES.value


def test_ranks_that_disagree_about_tails_are_refused(daemon: Daemon, make_worker: MakeWorker) -> None:
    same = {"instance_id": uuid.uuid4().hex, "incarnation": "a", "world_size": 2, "groups": (FULL,)}
    make_worker(daemon, rank=0, tails=True, **same)
    with pytest.raises(RequestFailed) as failed:
        make_worker(daemon, rank=1, **same)
    assert failed.value.code == ErrorCode.RANKS_DISAGREE.value


def test_a_load_of_blocks_that_were_cleared_fails_and_writes_nothing(daemon: Daemon, engine: Worker) -> None:
    chunks, tail = make_keys(1), make_keys(2)
    engine.store(chunks, range(1, 5))
    engine.store(tail, [20, 21], group=TAIL, first_chunk=4, after=chunks[0])
    assert (daemon.status()["l1"]["chunks"], daemon.status()["l1"]["tail_blocks"]) == (1, 2)
    code, _ = daemon.http("/cache/clear", method="POST")
    assert code == 200
    image = engine.memory.image()
    reply = engine.begin_load(tail, [30, 31], group=TAIL).reply()
    assert isinstance(reply, Error)
    assert reply.code == ErrorCode.NOT_FOUND.value
    assert engine.memory.image() == image
    assert daemon.status()["l1"]["tail_blocks"] == 0
    daemon.wait_for_accounting(tickets=0, pins=0)


def test_events_and_matches_name_the_blocks_that_lookups_find(make_daemon: Any, make_worker: MakeWorker) -> None:
    """Through evictions and a clear; a tail is known by itself, also where its block is in no chunk."""
    daemon = make_daemon(l1_size="1MiB", kv_events="on")
    engine = make_worker(daemon, groups=(FULL,), tails=True)
    engine.send(engine.description(groups=[KVGroup("full_attention")], hash_start=b"start"))
    follower = Follower(lambda message: engine.ask(message, KVEventsTaken), engine.instance_id, engine.incarnation)
    prompts = [Prompt(range(100 * number, 100 * number + 7 * BLOCK), 1, block=BLOCK) for number in range(30)]

    def chunk_of(one: Prompt) -> Prompt:
        return Prompt(one.tokens[:CHUNK], 4, block=BLOCK)

    def hit(number: int) -> int:
        """Blocks of the prompt that a lookup finds."""
        reply = ask(engine, chunk_of(prompts[number]).keys, prompts[number].keys[4:], request_id=str(number))
        tail = reply.tail_blocks
        if reply.wants_tail:
            tail = go_on(engine, prompts[number].keys[:4], str(number)).tail_blocks
        engine.end_request(str(number))
        return 4 * reply.hit_chunks + tail

    def agree() -> list[int]:
        hits = [hit(number) for number in range(len(prompts))]
        resident = {one.hashes[at] for one, found in zip(prompts, hits, strict=True) for at in range(found)}
        # Blocks of a tail whose chunk was evicted are there, and no lookup finds them.
        wait_until(
            lambda: (
                follower.step().whole
                and resident <= set(follower.blocks)
                and all(one.hashes[0] in resident for one in prompts if one.hashes[0] in follower.blocks)
            )
        )
        for one, found in zip(prompts, hits, strict=True):
            matched = daemon.match(block_hashes=[value.hex() for value in one.hashes])[engine.instance_id]
            assert (matched["l1"], matched["l1_l2"], matched["best"]) == (found, found, found)
        return hits

    for one in prompts:
        chunk = chunk_of(one)
        engine.store(chunk.keys, range(1, 5), contents=chunk.contents())
        engine.store(
            one.keys[4:], [20, 21, 22], group=TAIL, first_chunk=4, after=chunk.keys[0], contents=one.contents(4)
        )
    l1 = daemon.status()["l1"]
    assert l1["tail_blocks"] < 90
    assert l1["evictions"] + l1["chunks"] == 30
    hits = agree()
    assert 7 in hits
    assert 0 in hits
    named = [event for event in follower.received if event.stored and prompts[-1].hashes[5] in event.hashes]
    assert [(event.parent, event.tokens) for event in named] == [
        (prompts[-1].hashes[4], prompts[-1].contents(5, 6).tokens)
    ]
    daemon.http("/cache/clear", method="POST")
    wait_until(lambda: not follower.step().more and not follower.blocks)
    assert agree() == [0] * 30
    assert daemon.status()["kv_events"]["unannounced"] == {"undescribed": 0, "memory": 0, "mismatched": 0}
    daemon.wait_for_accounting(tickets=0, pins=0)


def test_contents_of_single_blocks_must_fit_them(engine: Worker) -> None:
    one = Prompt(range(2 * BLOCK), 1, block=BLOCK)
    for contents in (one.contents(0, 1), one.contents(hashes=one.hashes[0])):
        message = engine.store_message(one.keys, [20, 21], group=TAIL, contents=contents)
        assert engine.error_of(message).code == ErrorCode.BAD_KEYS.value
