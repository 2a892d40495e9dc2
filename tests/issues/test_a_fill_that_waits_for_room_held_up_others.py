"""A fill that found no room ended the turn for all fills behind it, those that had begun before it too (its probe had taken longer):
they read no more until it got room or was due, though it waited for the memory that they used. Both then got a part of their hit."""

from __future__ import annotations

from support.daemon import wait_until
from support.filling import Filling, filling
from support.worker import make_keys

from kvserver.tiering.fill_room import memory_bound

L1_BYTES = 4 << 20


def _written(f: Filling, chunks: int) -> list[bytes]:
    f.write(keys := make_keys(chunks))
    return keys


def test_a_fill_that_has_begun_goes_on_beside_an_earlier_one_that_waits_for_room() -> None:
    with filling(l1_bytes=L1_BYTES) as f:
        early, late = _written(f, 90), _written(f, 90)
        size = sum(len(raw) for _, raw in f.tier.objects.values())
        assert size // 2 < memory_bound(L1_BYTES) < size, "the test needs one of the fills to wait for room"
        f.forget_l1()
        f.tier.shared, f.tier.known = True, set()
        f.tier.kept_waiting = {early[0], *late[1:]}
        first = f.begin(early, "early", wait_ms=10_000)
        wait_until(lambda: ("probe", early[0]) in [(kind, name.key) for kind, name in f.tier.began])
        second = f.begin(late, "late", wait_ms=10_000)
        wait_until(lambda: len(f.gets()) >= 64)
        f.tier.kept_waiting = set(late[1:])
        f.tier.release()
        wait_until(lambda: all(begun.kind == "get" for begun in f.tier.waiting))
        f.tier.kept_waiting = set()
        f.tier.release()
        assert f.reply(second, 20).hit_chunks == 90
        f.worker.end_request("late")
        assert f.reply(first, 20).hit_chunks == 90
        f.worker.end_request("early")
        f.audit()
