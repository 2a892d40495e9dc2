"""Ranks that all hold the same bytes, as MLA's do: stored once, by turns (protocol 4: by rank 0), loaded by every rank."""

from __future__ import annotations

import uuid

import pytest
from support.daemon import wait_until
from support.devices import on_each_device
from support.memory import awkward
from support.worker import make_keys

from kvserver._native import State
from kvserver.protocol import Error, ObjectGroup, Retrieved, Stored
from kvserver.protocol.client import RequestFailed

pytestmark = on_each_device


@pytest.fixture
def make_ranks(make_worker):
    """All ranks of one engine; they hold the same bytes."""

    def make(daemon, world_size=3, **options):
        same = {"instance_id": uuid.uuid4().hex, "incarnation": "a", "world_size": world_size, "replicated": True}
        ranks = [make_worker(daemon, **{**same, **options}, rank=rank) for rank in range(world_size)]
        for rank in ranks[1:]:
            for mine, first in zip(rank.memory.maps, ranks[0].memory.maps, strict=True):
                mine[:] = first[:]
        return ranks

    return make


def test_rank_0_stores_for_all_and_every_rank_loads_its_bytes(daemon, make_ranks):
    cold, warm = make_ranks(daemon), make_ranks(daemon)
    keys, source = make_keys(2), cold[0].blocks_for(2)
    content = cold[0].memory.blocks(source)
    used = daemon.accounting()["used_pages"]
    assert cold[0].store(keys, source) == Stored(stored=2, skipped=0)
    once = daemon.accounting()["used_pages"] - used
    pages = -(-cold[0].chunk_bytes // daemon.status()["l1"]["page_bytes"])
    assert once == 2 * pages, "one slot for each chunk"
    target = cold[0].blocks_for(2, first=30)
    for rank in warm:
        expected = rank.memory.image_with(dict(zip(target, content, strict=True)))
        assert rank.lookup(keys) == 2, "READY after rank 0's bytes"
        assert rank.load(keys, target) == Retrieved(chunks=2)
        assert rank.memory.image() == expected
    assert daemon.accounting()["used_pages"] - used == once


@pytest.fixture
def make_striped(make_ranks):
    """Ranks that take turns, as engines of this protocol do."""
    return lambda daemon: make_ranks(
        daemon, groups=(ObjectGroup("full", (0,), awkward().block_tokens, replicated=True),)
    )


def test_ranks_take_turns_by_the_chunks_of_the_prompt(daemon, make_striped):
    """Also where a store begins within the prompt: the same chunk is always the same rank's."""
    cold, warm = make_striped(daemon), make_striped(daemon)
    keys, source = make_keys(8), cold[0].blocks_for(8)
    content = cold[0].memory.blocks(source)
    per_chunk, before = cold[0].chunk_blocks, daemon.status()["totals"]["stored_bytes"]
    for first, end in ((0, 5), (5, 8)):
        for number, rank in enumerate(cold):
            own = [at for at in range(first, end) if at % 3 == number]
            reply = rank.store(keys[first:end], source[first * per_chunk : end * per_chunk], first_chunk=first)
            assert reply == Stored(stored=len(own), skipped=end - first - len(own))
    for rank in warm:
        target = rank.blocks_for(8, first=30)
        expected = rank.memory.image_with(dict(zip(target, content, strict=True)))
        assert rank.lookup(keys) == 8
        assert rank.load(keys, target) == Retrieved(chunks=8)
        assert rank.memory.image() == expected
    assert daemon.status()["totals"]["stored_bytes"] - before == 8 * cold[0].chunk_bytes
    again = [rank.store(keys, source) for rank in cold]
    assert again == [Stored(stored=0, skipped=8)] * 3


def test_a_chunk_is_missing_until_its_rank_has_stored_it(daemon, make_striped):
    ranks, keys = make_striped(daemon), make_keys(3)
    for rank, found in ((2, 0), (0, 1), (1, 3)):
        ranks[rank].store(keys, ranks[rank].blocks_for(3))
        assert ranks[0].lookup(keys) == found


@pytest.mark.parametrize("rank", [1, 2])
def test_other_ranks_stores_are_skipped_and_never_read(daemon, make_ranks, rank):
    ranks, keys = make_ranks(daemon), make_keys(2)
    before = daemon.status()["totals"]["stored_bytes"]
    store = ranks[rank].begin_store(keys, ranks[rank].blocks_for(2))
    assert store.reply() == Stored(stored=0, skipped=2)
    assert store.state is State.FAILED, "a rank that waits on the word learns that nothing is read"
    assert ranks[0].lookup(keys) == 0
    assert daemon.status()["totals"]["stored_bytes"] == before
    assert ranks[0].store(keys, ranks[0].blocks_for(2)) == Stored(stored=2, skipped=0)


def test_all_ranks_load_one_chunk_at_the_same_time(make_daemon, make_ranks):
    daemon = make_daemon(copy_delay_us=20_000, copy_threads=2)
    ranks, keys = make_ranks(daemon), make_keys(1)
    content = ranks[0].memory.blocks(ranks[0].blocks_for(1))
    ranks[0].store(keys, ranks[0].blocks_for(1))
    target = ranks[0].blocks_for(1, first=20)
    loads = [rank.begin_load(keys, target) for rank in ranks]
    assert [load.reply() for load in loads] == [Retrieved(chunks=1)] * 3
    assert all(rank.memory.blocks(target) == content for rank in ranks)


def test_until_every_rank_is_registered_nothing_is_stored(daemon, make_worker, make_ranks):
    alone = make_worker(daemon, instance_id="alone", incarnation="a", world_size=2, replicated=True)
    with pytest.raises(RequestFailed, match="1 of 2 ranks"):
        alone.store(make_keys(1), alone.blocks_for(1))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_during_the_store_leaves_nothing_half_stored(make_daemon, make_ranks, victim):
    """Rank 0's death ends the copy; another one's does not touch it, but the engine's namespace ends with it."""
    daemon = make_daemon(pauses=True)
    ranks, reader = make_ranks(daemon), make_ranks(daemon)
    keys = make_keys(1)
    content = ranks[0].memory.blocks(ranks[0].blocks_for(1))
    with daemon.paused_copies():
        store = ranks[0].begin_store(keys, ranks[0].blocks_for(1))
        wait_until(lambda: store.state is State.RUNNING)
        ranks[victim].hang_up()
        daemon.wait_for_accounting(attachments=len(ranks) + len(reader) - 1)
    if victim == 0:
        assert isinstance(store.reply(), Error)
        assert reader[1].lookup(keys) == 0
    else:
        assert store.reply() == Stored(stored=1, skipped=0)
        target = reader[1].blocks_for(1, first=20)
        assert reader[1].load(keys, target) == Retrieved(chunks=1)
        assert reader[1].memory.blocks(target) == content
    daemon.wait_for_accounting(tickets=0, pins=0)


def test_engines_with_and_without_replication_share_nothing(daemon, make_worker, make_ranks):
    (one,) = make_ranks(daemon, world_size=1)
    other, keys = make_worker(daemon), make_keys(1)
    one.store(keys, one.blocks_for(1))
    assert (one.lookup(keys), other.lookup(keys)) == (1, 0)


@pytest.mark.parametrize(
    ("changes", "stated"),
    [
        ({"layout": "HND"}, "layout='HND'"),
        ({"geometry": awkward(scale=2)}, "runs="),
        ({"replicated": False}, "object_groups="),
    ],
)
def test_a_rank_that_arranges_its_bytes_otherwise_is_refused(daemon, make_worker, changes, stated):
    same = {"instance_id": "differs", "incarnation": "a", "world_size": 2, "replicated": True}
    first = make_worker(daemon, **same)
    with pytest.raises(RequestFailed, match=f"rank 1 states {stated}"):
        make_worker(daemon, **{**same, **changes}, rank=1)
    assert first.lookup(make_keys(1)) == 0
