"""Fills of what an engine of another daemon has promised: a shared tier is asked again until it has come, and no longer than is worth it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.daemon import wait_until
from support.filling import Filling, filling
from support.worker import make_keys

from kvserver.l2 import ObjectName
from kvserver.protocol import AwaitFill, HandOver

KEYS = make_keys(6)


@pytest.fixture
def f() -> Iterator[Filling]:
    """An engine whose stores are in another daemon's L2: nothing of them is known here."""
    with filling() as found:
        found.only_in_l2(KEYS)
        found.tier.shared, found.tier.known = True, set()
        yield found


def begin(f: Filling, promised: int = 6, wait_ms: int = 10_000, instance_id: str = "elsewhere") -> int:
    handed_over = HandOver(instance_id, promised * f.worker.hello.chunk_tokens) if promised else None
    return f.worker.send(AwaitFill(f.worker.lookup_message(KEYS, handed_over=handed_over), wait_ms))


def probes(f: Filling) -> int:
    return sum(kind == "probe" for kind, _ in f.tier.began)


def gone(f: Filling, first: int) -> dict[ObjectName, tuple[bytes, bytes]]:
    """Take the objects from number `first` on out of the tier; returns them."""
    return {name: f.tier.objects.pop(name) for name in list(f.tier.objects) if name.key in KEYS[first:]}


def test_promised_chunks_are_read_when_they_come(f: Filling) -> None:
    later = gone(f, 0)
    number = begin(f)
    wait_until(lambda: probes(f) >= 3)
    f.tier.objects.update(later)
    assert f.reply(number).hit_chunks == 6
    assert len(f.gets()) == 6
    f.worker.end_request()
    f.audit()


def test_what_is_there_is_read_while_the_rest_is_awaited(f: Filling) -> None:
    later = gone(f, 2)
    number = begin(f)
    wait_until(lambda: len(f.gets()) == 2 and probes(f) >= 3)
    f.tier.objects.update(later)
    assert f.reply(number).hit_chunks == 6
    assert sorted(name.key for name in f.gets()) == sorted(KEYS), "each is read once"
    f.worker.end_request()
    f.audit()


def test_a_promise_that_is_not_kept_ends_at_the_requests_limit_with_what_came(f: Filling) -> None:
    gone(f, 2)
    number = begin(f, wait_ms=3_000)
    wait_until(lambda: probes(f) > 1)
    assert f.reply(number).hit_chunks == 2
    f.worker.end_request()
    f.audit()


@pytest.mark.parametrize(
    ("promised", "here"), [(0, False), (2, False), (6, True)], ids=["none", "all there", "of this daemon"]
)
def test_the_tier_is_asked_once_where_nothing_more_is_promised_by_another_daemon(
    f: Filling, promised: int, here: bool
) -> None:
    gone(f, 2)
    assert f.reply(begin(f, promised, instance_id=f.worker.instance_id if here else "elsewhere")).hit_chunks == 2
    assert probes(f) == 1


def test_a_promise_is_not_awaited_beyond_the_time_to_compute_it(f: Filling) -> None:
    later = gone(f, 0)
    (instance,) = f.running.parts.instances.by_id.values()
    instance.prefill_speed = 1e12
    assert f.reply(begin(f)).hit_chunks == 0
    assert probes(f) == 1
    f.tier.objects.update(later)


def test_a_promise_ends_with_its_request(f: Filling) -> None:
    gone(f, 0)
    number = begin(f)
    wait_until(lambda: probes(f) >= 2)
    f.worker.end_request()
    assert f.reply(number).hit_chunks == 0
    f.audit()


def test_a_promise_whose_chunks_came_to_l1_another_way_ends_at_once(f: Filling) -> None:
    gone(f, 0)
    number = begin(f)
    wait_until(lambda: probes(f) >= 2)
    f.store(KEYS)
    assert f.reply(number, seconds=9).hit_chunks == 6, "before its limit"
    assert not f.gets()


def test_what_comes_last_is_read_though_the_time_to_compute_it_is_over(f: Filling) -> None:
    later = gone(f, 1)
    number = begin(f)
    wait_until(lambda: len(f.gets()) == 1)
    f.tier.stopped = True
    wait_until(lambda: f.tier.waiting)  # a probe for the rest
    (fill,) = f.running.parts.storage.fills._fills.values()
    fill.promised_until_ns = 1
    f.tier.objects.update(later)
    f.tier.release()
    assert f.reply(number).hit_chunks == 6


def test_a_promise_takes_no_room_that_other_fills_need_before_it_comes(f: Filling) -> None:
    gone(f, 1)
    begin(f)
    wait_until(lambda: len(f.gets()) == 1 and probes(f) >= 3)
    assert f.bytes() == f.worker.chunk_bytes


def test_a_promise_of_which_little_has_come_is_not_judged_by_that(f: Filling) -> None:
    f.tier.shared, f.tier.known = False, None
    f.read_within(0.5, KEYS)
    f.worker.end_request("slow")
    f.forget_l1()
    f.tier.shared, f.tier.known = True, set()
    later = gone(f, 1)
    (instance,) = f.running.parts.instances.by_id.values()
    instance.prefill_speed = 10 * f.worker.hello.chunk_tokens  # a chunk in 0.1 s, all of them in 0.6
    number = begin(f)
    wait_until(lambda: len(f.gets()) == 7)
    f.tier.objects.update(later)
    assert f.reply(number).hit_chunks == 6
    assert instance.counts.fills_not_begun == 0


def test_a_request_that_ends_while_its_fill_reads_begins_no_wait_for_stores(f: Filling) -> None:
    f.tier.stopped = True
    promise = HandOver(f.worker.instance_id, 7 * f.worker.hello.chunk_tokens)
    lookup = f.worker.lookup_message([*KEYS, *make_keys(1, "later")], handed_over=promise)
    number = f.worker.send(AwaitFill(lookup, 10_000))
    wait_until(lambda: f.tier.waiting)
    f.worker.end_request()
    assert f.reply(number, seconds=9).hit_chunks == 0
    f.tier.release()
    f.audit()
    assert f.running.call(lambda: f.running.parts.cache.lease_count) == 0
