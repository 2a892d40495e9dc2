"""Ranks that store by turns what all of them hold (MLA) each filled L1 with their share of a prompt that was larger: the second one found no
space or evicted the first one's chunks. Such a prompt had no prefix in L1, and got none however often it was sent."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import pytest
from support.daemon import Daemon
from support.memory import awkward
from support.worker import Worker, make_keys

from kvserver.protocol import ObjectGroup, Stored

ROOM, CHUNKS = 8, 16  # of L1, of the prompt
MLA = ObjectGroup("full", (0,), awkward().block_tokens, replicated=True)


@pytest.fixture
def make_ranks(make_daemon: Callable[..., Daemon], make_worker: Callable[..., Worker]) -> Callable[..., list[Worker]]:
    def make(count: int, **options: object) -> list[Worker]:
        daemon = make_daemon(l1_size=f"{ROOM * 24}KiB", **options)
        same = {"instance_id": uuid.uuid4().hex, "incarnation": "a", "world_size": count, "groups": (MLA,)}
        return [make_worker(daemon, rank=rank, geometry=awkward(80), **same) for rank in range(count)]

    return make


def missing(ranks: list[Worker], keys: list[bytes]) -> tuple[list[bytes], int]:
    """The chunks that a lookup does not find, and which chunk of the prompt is the first of them."""
    found = ranks[0].lookup(keys)
    return keys[found:], found


@pytest.mark.parametrize("count", [2, 3, 5])
def test_of_a_prompt_larger_than_l1_the_prefix_that_fits_is_kept(
    make_ranks: Callable[..., list[Worker]], count: int
) -> None:
    ranks, keys = make_ranks(count), make_keys(CHUNKS)
    for _ in range(2):
        rest, first = missing(ranks, keys)
        stored = [rank.store(rest, rank.blocks_for(len(rest)), first_chunk=first) for rank in ranks]
        assert sum(each.stored for each in stored) == ROOM - first
        assert missing(ranks, keys)[1] == ROOM
        ranks[0].end_request()


def test_ranks_that_store_at_the_same_time_keep_the_prefix_that_fits(make_ranks: Callable[..., list[Worker]]) -> None:
    ranks, keys = make_ranks(3, copy_delay_us=2000), make_keys(CHUNKS)
    stores = [rank.begin_store(keys, rank.blocks_for(CHUNKS)) for rank in ranks]
    replies = [store.reply() for store in stores]
    assert all(isinstance(reply, Stored) for reply in replies)
    assert missing(ranks, keys)[1] == ROOM
