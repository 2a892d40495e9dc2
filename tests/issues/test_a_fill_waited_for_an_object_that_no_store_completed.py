"""An object of which L1 had one rank's bytes alone, since the other rank's store had failed, counted as being filled: a fill waited for it
until it was due, and gave nothing."""

from __future__ import annotations

from support.daemon import wait_until
from support.filling import Filling, filling
from support.worker import Worker, make_keys


def _other_rank(f: Filling) -> Worker:
    mine = f.worker
    return Worker(
        f.running.endpoint, rank=1, world_size=2, instance_id=mine.instance_id, incarnation=mine.incarnation
    )  # fmt: skip


def _store_on_both(f: Filling, other: Worker, keys: list[bytes]) -> None:
    f.worker.store(keys, f.worker.blocks_for(len(keys)))
    other.store(keys, other.blocks_for(len(keys)))
    f.written(keys)
    f.forget_l1()


def test_a_fill_reads_an_object_whole_of_which_one_rank_was_stored() -> None:
    with filling(world_size=2) as f:
        other, keys = _other_rank(f), make_keys(4)
        _store_on_both(f, other, keys)
        f.worker.store(keys[:1], f.worker.blocks_for(1))
        assert f.fill(keys) == 4
        assert {name.key for name in f.gets()} == set(keys)
        f.worker.end_request()
        f.audit()
        other.close()


def test_a_rank_that_stores_after_the_fill_has_read_its_object_stores_nothing() -> None:
    with filling(world_size=2) as f:
        other, keys = _other_rank(f), make_keys(1)
        _store_on_both(f, other, keys)
        f.worker.store(keys, f.worker.blocks_for(1))
        f.tier.stopped = True
        number = f.begin(keys)
        wait_until(lambda: f.tier.waiting)
        assert other.store(keys, other.blocks_for(1)).skipped == 1
        f.tier.release()
        assert f.reply(number).hit_chunks == 1
        f.worker.end_request()
        f.audit()
        other.close()
