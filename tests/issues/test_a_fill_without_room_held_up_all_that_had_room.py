"""A fill that waited for room let none begin that arrived after it: a request of one chunk, for which there was room, waited as long as the
prompt of a hundred before it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from support.filling import Filling, filling
from support.worker import make_keys

from kvserver.tiering.fill_room import memory_bound

L1_BYTES = 4 << 20


def _written(f: Filling, chunks: int) -> list[bytes]:
    f.write(keys := make_keys(chunks))
    return keys


@contextmanager
def _nearly_full() -> Iterator[tuple[Filling, list[bytes], list[bytes]]]:
    """A fill that was not loaded yet uses most of the bound. Returns a prompt that has no room beside it, and one that has."""
    with filling(l1_bytes=L1_BYTES) as f:
        first, large, small = _written(f, 90), _written(f, 60), _written(f, 4)
        size = sum(len(raw) for _, raw in f.tier.objects.values()) // 154
        assert 94 * size <= memory_bound(L1_BYTES) < 150 * size, "the test needs room for the small prompt alone"
        f.forget_l1()
        assert f.fill(first, "first") == 90
        yield f, large, small
        for request in ("first", "large", "small"):
            f.worker.end_request(request)
        f.audit()


def test_a_fill_that_has_room_overtakes_one_that_waits_for_room() -> None:
    with _nearly_full() as (f, large, small):
        waiting = f.begin(large, "large", wait_ms=10_000)
        assert f.reply(f.begin(small, "small", wait_ms=10_000), 4).hit_chunks == 4
        f.worker.end_request("first")
        assert f.reply(waiting).hit_chunks == 60


def test_none_overtakes_a_fill_that_has_waited_for_half_of_its_time() -> None:
    with _nearly_full() as (f, large, small):
        began = time.monotonic()
        waiting = f.begin(large, "large", wait_ms=4000)
        time.sleep(2.5)
        assert f.fill(small, "small", wait_ms=10_000) == 4
        assert time.monotonic() - began >= 4, "the small one has waited for the end of the large one"
        assert f.reply(waiting).hit_chunks == 0


def test_a_fill_slightly_larger_than_the_bound_is_cut_to_the_bound() -> None:
    with filling(l1_bytes=1 << 20) as f:
        keys = _written(f, 60)
        size = sum(len(raw) for _, raw in f.tier.objects.values()) // 60
        fitting = memory_bound(1 << 20) // size
        assert 30 < fitting < 60, "the test needs a prompt that is a little larger than the bound"
        f.forget_l1()
        assert f.fill(keys[: fitting + 1], "first") == fitting
        f.worker.end_request("first")
        f.audit()
