"""Objects of several groups: full attention and a window, by separate messages, found at boundaries that both have."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence

import pytest
from support.daemon import Daemon, wait_until
from support.devices import on_each_device
from support.memory import two_groups
from support.worker import Worker, make_keys

from kvserver._native import NO_BLOCK, State
from kvserver.protocol import Error, ErrorCode, LookupReply, ObjectGroup, Retrieved, Status, StatusReply, Stored

pytestmark = on_each_device
MakeWorker = Callable[..., Worker]
FULL = ObjectGroup("full", (0,), 16)
GROUPS = {  # beside FULL, and the blocks of an object: a chunk has 64 tokens
    "window": (ObjectGroup("window", (1,), 16, tokens=31), 2),
    "larger blocks": (ObjectGroup("window", (1,), 32, tokens=31), 1),
    "state": (ObjectGroup("state", (1,), 64), 1),
}


def of_group(group: int, ids: Sequence[int]) -> list[tuple[int, int]]:
    """Positions that have a block of this group only."""
    return [(id, NO_BLOCK) if group == 0 else (NO_BLOCK, id) for id in ids]


def contents(worker: Worker, group: int, ids: Sequence[int]) -> list[bytes]:
    return worker.memory.blocks(of_group(group, ids))


def found(worker: Worker, keys: list[bytes]) -> tuple[int, int]:
    """(boundary, leading chunks of the full group)."""
    reply = worker.ask(worker.lookup_message(keys), LookupReply)
    return reply.hit_chunks, reply.full_chunks


@pytest.fixture(params=GROUPS)
def hybrid(request: pytest.FixtureRequest, daemon: Daemon, make_worker: MakeWorker) -> Worker:
    other, blocks = GROUPS[request.param]
    worker = make_worker(daemon, geometry=two_groups(), groups=(FULL, other))
    assert [worker.object_blocks(group) for group in (0, 1)] == [4, blocks]
    return worker


def test_each_group_is_stored_and_loaded_by_itself_byte_for_byte(hybrid: Worker) -> None:
    ids, keys, size = random.Random(1).sample(range(1, 64), 40), make_keys(4), hybrid.object_blocks(1)
    full, other = ids[:16], ids[16 : 16 + 2 * size]
    assert hybrid.store(keys, full) == Stored(stored=4, skipped=0)
    assert found(hybrid, keys) == (0, 4)
    assert hybrid.store(keys[:3:2], other, group=1) == Stored(stored=2, skipped=0)
    assert found(hybrid, keys) == (3, 4)
    assert found(hybrid, keys[:2]) == (1, 2)

    images = contents(hybrid, 0, full[:12]), contents(hybrid, 1, other[size:])
    hybrid.memory.fill()
    for group, (count, content) in enumerate(zip((3, 1), images, strict=True)):
        target = random.Random(2).sample(range(1, 64), len(content))
        expected = hybrid.memory.image_with(dict(zip(of_group(group, target), content, strict=True)))
        assert hybrid.load(keys[3 - count : 3], target, group=group) == Retrieved(chunks=count)
        assert hybrid.memory.image() == expected


def test_a_lookup_that_wants_boundaries_gets_all_at_which_a_load_can_end(hybrid: Worker) -> None:
    keys, size = make_keys(6), hybrid.object_blocks(1)
    ids = list(range(1, 25 + 3 * size))
    hybrid.store(keys, ids[:24])
    hybrid.store([keys[0], keys[2], keys[3]], ids[24:], group=1)

    def boundaries(wanted: bool) -> tuple[int, ...]:
        return hybrid.ask(hybrid.lookup_message(keys, boundaries=wanted), LookupReply).boundaries

    assert boundaries(True) == (1, 3, 4)
    assert boundaries(False) == ()


def test_each_group_is_bounded_by_its_own_number_of_blocks(daemon: Daemon, make_worker: MakeWorker) -> None:
    """SGLang's pools have different numbers of slots."""
    worker = make_worker(daemon, geometry=two_groups(), groups=(FULL, GROUPS["window"][0]), connect_now=False)
    worker.attach()
    worker.register(group_blocks=(64, 20))
    keys = make_keys(1)
    assert worker.store(keys, [60, 61, 62, 63]) == Stored(stored=1, skipped=0)
    assert worker.store(keys, [18, 19], group=1) == Stored(stored=1, skipped=0)
    assert worker.error_of(worker.store_message(make_keys(1), [19, 20], group=1)).code == ErrorCode.BAD_BLOCKS


def test_a_registration_with_blocks_of_some_groups_only_is_refused(daemon: Daemon, make_worker: MakeWorker) -> None:
    worker = make_worker(daemon, geometry=two_groups(), groups=(FULL, GROUPS["window"][0]), connect_now=False)
    worker.attach()
    error = worker.error_of(worker.registration(group_blocks=(64,)))
    assert (error.code, error.message) == (ErrorCode.BAD_PLANES, "blocks of 1 object groups, there are 2")


def test_a_load_of_an_object_that_only_another_group_has_fails_and_writes_nothing(hybrid: Worker) -> None:
    keys, size = make_keys(2), hybrid.object_blocks(1)
    hybrid.store(keys, range(1, 9))
    hybrid.store(keys[1:], range(9, 9 + size), group=1)
    image = hybrid.memory.image()
    reply = hybrid.begin_load(keys, range(20, 20 + 2 * size), group=1).reply()
    assert isinstance(reply, Error)
    assert (reply.code, "1 of 2" in reply.message) == (ErrorCode.NOT_FOUND.value, True)
    assert hybrid.memory.image() == image


def test_dropped_objects_are_freed_once_the_store_that_replaces_them_is_there(daemon: Daemon, hybrid: Worker) -> None:
    keys, size = make_keys(3), hybrid.object_blocks(1)
    hybrid.store(keys, range(1, 13))
    hybrid.store(keys[1:2], range(20, 20 + size), group=1)
    used = daemon.status()["l1"]["used_bytes"]
    assert found(hybrid, keys) == (2, 3)
    hybrid.end_request()
    daemon.wait_for_accounting(leases=0)
    hybrid.store(keys[2:], range(30, 30 + size), group=1, dropped=keys[1])
    assert (found(hybrid, keys), found(hybrid, keys[:2])) == ((3, 3), (0, 2))
    assert daemon.status()["l1"]["used_bytes"] == used
    daemon.wait_for_accounting(tickets=0, pins=0)


def test_a_store_that_fails_drops_nothing(hybrid: Worker) -> None:
    keys, size = make_keys(3), hybrid.object_blocks(1)
    hybrid.store(keys, range(1, 13))
    hybrid.store(keys[1:2], range(20, 20 + size), group=1)
    store = hybrid.store_message(keys[2:], range(30, 30 + size), group=1, dropped=keys[1])
    assert hybrid.words.move(store.word, store.sequence, State.PENDING, State.CANCELLED)
    assert hybrid.error_of(store).code == ErrorCode.CANCELLED.value
    assert found(hybrid, keys) == (2, 3)


def test_a_store_that_finds_no_space_for_some_objects_drops_nothing(
    make_daemon: Callable[..., Daemon], make_worker: MakeWorker
) -> None:
    daemon, keys = make_daemon(l1_size="64KiB", pauses=True), make_keys(8)
    worker = make_worker(daemon, geometry=two_groups(), groups=(FULL, GROUPS["window"][0]))
    worker.store(keys[:1], range(1, 5))
    worker.store(keys[:1], range(5, 7), group=1)
    assert found(worker, keys[:1]) == (1, 1)  # and leases them: they are not evicted
    with daemon.paused_copies():
        store = worker.begin_store(keys[1:], range(10, 24), group=1, dropped=keys[0])
        worker.end_request()
        worker.ask(Status(), StatusReply)  # both have been read
    reply = store.reply()
    assert isinstance(reply, Stored)
    assert reply.stored
    assert reply.starved
    assert found(worker, keys[:1]) == (1, 1)


def test_objects_are_dropped_when_the_last_rank_has_stored_what_replaces_them(
    daemon: Daemon, make_worker: MakeWorker
) -> None:
    keys, same = make_keys(2), {"instance_id": "engine", "incarnation": "one", "world_size": 2}
    ranks = [
        make_worker(daemon, geometry=two_groups(), groups=(FULL, GROUPS["window"][0]), rank=rank, **same)
        for rank in range(2)
    ]
    for rank in ranks:
        rank.store(keys, range(1, 9))
        rank.store(keys[:1], range(9, 11), group=1)
    for rank, boundary in zip(ranks, (1, 0), strict=True):
        rank.store(keys[1:], range(11, 13), group=1, dropped=keys[0])
        assert found(rank, keys[:1]) == (boundary, 1)
        rank.end_request()
        daemon.wait_for_accounting(leases=0)
    assert found(ranks[0], keys) == (2, 2)


def test_a_load_of_several_messages_saves_its_tokens_once(daemon: Daemon, hybrid: Worker) -> None:
    keys, size = make_keys(2), hybrid.object_blocks(1)
    hybrid.store(keys, range(1, 9))
    hybrid.store(keys[1:], range(9, 9 + size), group=1)
    assert found(hybrid, keys) == (2, 2)
    load = {"request_id": "r", "tokens": 128, "messages": 2}
    hybrid.load(keys, range(20, 28), **load)
    hybrid.load(keys[1:], range(30, 30 + size), group=1, **load)
    (row,) = daemon.status()["instances"]
    assert (row["requests"]["saved_tokens"], row["requests"]["loads"]) == (128, 2)

    def explained() -> int:
        _, body = daemon.http("/explain?request_id=r")
        return int(json.loads(body)["requests"][0]["tokens"]["l1"] or 0)

    wait_until(lambda: explained() == 128)


def test_engines_whose_windows_differ_share_nothing(daemon: Daemon, make_worker: MakeWorker) -> None:
    keys = make_keys(1)
    one, same, other = (
        make_worker(daemon, geometry=two_groups(), groups=(FULL, ObjectGroup("window", (1,), 16, tokens=tokens)))
        for tokens in (31, 31, 47)
    )
    for group, blocks in ((0, range(1, 5)), (1, range(5, 7))):
        one.store(keys, blocks, group=group)
    assert (found(same, keys), found(other, keys)) == ((1, 1), (0, 0))
