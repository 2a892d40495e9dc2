"""Fills: what L1 lacks and L2 has is read before the engine is answered, and found only where its read was whole."""

from __future__ import annotations

import pytest
from support.daemon import wait_until
from support.filling import FULL, WINDOW, filling, store_hybrid
from support.memory import two_groups
from support.plain_tier import PlainTier
from support.worker import Worker, make_keys

from kvserver.l2 import TierOutcome
from kvserver.protocol import LookupReply


def test_a_fill_that_is_requested_once_serving_is_off_reads_nothing() -> None:
    with filling() as f:
        keys = make_keys(4)
        f.only_in_l2(keys)
        assert f.lookup(keys) == LookupReply(0, fill_chunks=4)
        f.running.call(lambda: f.running.parts.serving.switch("off"))
        assert (f.fill(keys), f.gets()) == (0, [])


def test_chunks_that_left_l1_come_back_from_l2_byte_for_byte() -> None:
    with filling() as f:
        keys = make_keys(10)
        content = f.only_in_l2(keys)
        assert f.lookup(keys) == LookupReply(0, fill_chunks=10)
        assert f.fill(keys) == 10
        assert f.loaded(keys) == content
        assert f.lookup(keys) == LookupReply(10, 10)
        assert [name.key for name in f.gets()] == keys
        f.worker.end_request()
        f.audit()


def test_only_what_l1_lacks_is_read() -> None:
    with filling() as f:
        keys = make_keys(6)
        content = f.only_in_l2(keys)
        f.tier.objects, objects = {}, f.tier.objects
        f.worker.store(keys[:2], f.worker.blocks_for(2))
        f.tier.objects = objects
        assert f.lookup(keys) == LookupReply(2, 2, fill_chunks=6)
        assert f.fill(keys) == 6
        assert {name.key for name in f.gets()} == set(keys[2:])
        assert f.loaded(keys) == content


def test_what_a_fill_reads_is_of_no_session_and_what_was_resident_stays_the_sessions() -> None:
    with filling() as f:
        keys = make_keys(8)
        f.only_in_l2(keys)
        f.tier.objects, objects = {}, f.tier.objects
        f.worker.store(keys[:2], f.worker.blocks_for(2), session_id="a")
        f.tier.objects = objects
        assert f.worker.lookup(keys, "r", session_id="a") == 2
        assert f.fill(keys, session_id="a") == 8
        assert f.worker.lookup(keys, "r", session_id="a") == 8
        sessions = f.running.call(lambda: [one.chunks for one in f.running.parts.cache.sessions])
        assert sessions == [2]


def test_a_hit_after_a_fill_shares_what_another_session_stored_meanwhile() -> None:
    with filling() as f:
        keys = make_keys(8)
        f.only_in_l2(keys)
        assert f.worker.lookup(keys, "r", session_id="b") == 0
        f.worker.store(keys, f.worker.blocks_for(8), session_id="a")
        assert f.fill(keys, session_id="b") == 8
        sessions = f.running.call(lambda: [one.chunks for one in f.running.parts.cache.sessions])
        assert sessions == [0, 0]


def test_a_hit_ends_at_a_hole() -> None:
    with filling() as f:
        keys = make_keys(6)
        f.only_in_l2(keys)
        hole = next(name for name in f.tier.objects if name.key == keys[3])
        del f.tier.objects[hole]
        assert f.lookup(keys).fill_chunks == 3
        assert f.fill(keys) == 3
        assert {name.key for name in f.gets()} == set(keys[:3])


@pytest.mark.parametrize("outcome", [TierOutcome.CORRUPT, TierOutcome.MISSING, TierOutcome.TIMEOUT])
def test_an_object_whose_read_fails_is_never_found(outcome: TierOutcome) -> None:
    with filling() as f:
        keys = make_keys(6)
        content = f.only_in_l2(keys)
        f.tier.fail = {keys[4]: outcome}
        assert f.fill(keys) == 4
        assert f.lookup(keys).hit_chunks == 4
        per_chunk = len(content) // 6
        assert f.loaded(keys[:4]) == content[: 4 * per_chunk]
        f.audit()


def test_the_next_tier_is_read_where_the_first_one_fails() -> None:
    with filling(more=["second"]) as f:
        keys = make_keys(6)
        content = f.write(keys)
        second = f.running.parts.storage.tiers.all[1].tier
        assert isinstance(second, PlainTier)
        wait_until(lambda: len(second.objects) == 6)
        f.forget_l1()
        f.tier.fail = {keys[2]: TierOutcome.CORRUPT}
        assert f.fill(keys) == 6
        assert [name.key for kind, name in second.began if kind == "get"] == [keys[2]]
        assert f.loaded(keys) == content


def test_another_namespace_finds_nothing() -> None:
    with filling() as f:
        keys = make_keys(3)
        f.only_in_l2(keys)
        other = Worker(f.running.endpoint, layout="other")
        assert other.ask(other.lookup_message(keys), LookupReply) == LookupReply(0)
        assert f.lookup(keys).fill_chunks == 3
        other.close()


def test_two_ranks_are_filled_together() -> None:
    with filling(world_size=2) as f:
        names = {"instance_id": f.worker.instance_id, "incarnation": f.worker.incarnation}
        other = Worker(f.running.endpoint, rank=1, world_size=2, **names)
        keys = make_keys(4)
        f.store(keys)
        blocks = other.blocks_for(4)
        content = other.memory.blocks(blocks)
        other.store(keys, blocks)
        f.written(keys)
        f.forget_l1()
        assert f.fill(keys) == 4
        other.memory.fill()
        other.load(keys, blocks)
        assert other.memory.blocks(blocks) == content
        other.close()
        f.worker.end_request()


def test_an_engine_that_shares_with_no_other_reads_nothing() -> None:
    with filling(connect_now=False) as f:
        f.worker.attach()
        f.worker.register(private="for a reason")
        keys = make_keys(2)
        f.store(keys)
        assert f.fill(keys) == 2
        assert not f.tier.began


def test_the_windows_of_the_greatest_boundary_are_read_first_and_no_others() -> None:
    with filling(geometry=two_groups(), groups=(FULL, WINDOW)) as f:
        keys = make_keys(12)
        store_hybrid(f, keys, [4, 10])
        assert f.lookup(keys).fill_chunks == 10
        assert f.fill(keys) == 10
        assert [(name.group, name.key) for name in f.gets()] == [(1, keys[9]), *((0, key) for key in keys[:10])]
        f.worker.end_request()
        f.audit()
