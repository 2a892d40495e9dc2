"""When a fill ends: at its deadline, with its request, its engine or a clear, and what others with the same prompt have then."""

from __future__ import annotations

import time

from support.daemon import wait_until
from support.filling import filling
from support.worker import make_keys

from kvserver.protocol import Clear, Cleared, LookupReply


def test_an_answer_is_due_although_a_read_hangs_and_its_pages_stay_until_it_ends() -> None:
    with filling() as f:
        keys = make_keys(4)
        f.only_in_l2(keys)
        f.tier.hangs = True
        f.tier.stopped = True
        began = time.monotonic()
        assert f.fill(keys, wait_ms=300) == 0
        assert 0.25 <= time.monotonic() - began < 5
        used = f.running.call(lambda: f.running.parts.cache.pool.used_pages)
        assert used > 0, "the reads may still write"
        f.tier.hangs = False
        f.tier.release()
        f.audit()


def test_two_requests_with_one_prompt_wait_for_the_same_reads() -> None:
    with filling() as f:
        keys = make_keys(4)
        f.only_in_l2(keys)
        f.tier.stopped = True
        one = f.begin(keys, "one")
        wait_until(lambda: len(f.tier.waiting) == 4)
        two = f.begin(keys, "two")
        wait_until(lambda: f.running.call(lambda: f.running.parts.storage.fills.open) >= 2)
        f.tier.release()
        assert (f.reply(one).hit_chunks, f.reply(two).hit_chunks) == (4, 4)
        assert len(f.gets()) == 4
        for name in ("one", "two"):
            f.worker.end_request(name)
        f.audit()


def test_the_end_of_a_request_leaves_another_with_its_prompt_the_whole_hit() -> None:
    with filling() as f:
        keys = make_keys(4)
        content = f.only_in_l2(keys)
        f.tier.stopped = True
        one = f.begin(keys, "one")
        wait_until(lambda: len(f.tier.waiting) == 4)
        two = f.begin(keys, "two")
        wait_until(lambda: f.running.call(lambda: f.running.parts.storage.fills.open) >= 3)
        f.worker.end_request("one")
        assert f.reply(one).hit_chunks == 0
        f.tier.release()
        assert f.reply(two).hit_chunks == 4
        assert len(f.gets()) == 8
        assert f.loaded(keys, "two") == content
        f.worker.end_request("two")
        f.audit()


def test_clear_during_a_fill_ends_the_fill_with_no_hit() -> None:
    with filling() as f:
        keys = make_keys(4)
        f.only_in_l2(keys)
        f.tier.stopped = True
        number = f.begin(keys)
        wait_until(lambda: len(f.tier.waiting) == 4)
        f.worker.ask(Clear(), Cleared)
        assert f.reply(number).hit_chunks == 0
        f.tier.release()
        assert f.lookup(keys) == LookupReply(0)
        f.audit()


def test_fill_ends_with_its_request_and_with_its_engine() -> None:
    with filling() as f:
        keys = make_keys(4)
        f.only_in_l2(keys)
        f.tier.stopped = True
        number = f.begin(keys)
        wait_until(lambda: len(f.tier.waiting) == 4)
        f.worker.end_request()
        f.reply(number)
        wait_until(lambda: not f.tier.waiting)
        number = f.begin(keys, "second", wait_ms=10_000)
        wait_until(lambda: len(f.tier.waiting) == 4)
        began = time.monotonic()
        f.worker.hang_up()
        wait_until(lambda: not f.tier.waiting, 20)
        assert time.monotonic() - began < 8, "not only at its limit"
        f.tier.release()
        f.audit()


def test_more_objects_than_may_be_read_at_once_are_read_in_turn() -> None:
    with filling() as f:
        keys = make_keys(90)
        f.only_in_l2(keys)
        f.tier.stopped = True
        number = f.begin(keys)
        wait_until(lambda: len(f.tier.waiting) == 64)
        assert f.lookup(make_keys(1), "the loop goes on").hit_chunks == 0
        assert len(f.tier.waiting) == 64
        f.tier.release()
        assert f.reply(number).hit_chunks == 90
        f.worker.end_request()
        f.forget_l1()
        f.tier.stopped = True
        number = f.begin(keys, "ends early")
        wait_until(lambda: len(f.tier.waiting) == 64)
        f.worker.end_request("ends early")
        assert f.reply(number).hit_chunks == 0
        f.audit()
        used = f.running.call(lambda: f.running.parts.cache.pool.used_pages)
        assert used == 0, "what was reserved is free"
