"""A fill found that L1 had got all of its chunks while it asked a tier. It had nothing to read, and its request waited until its limit."""

from __future__ import annotations

from support.daemon import wait_until
from support.filling import filling
from support.worker import make_keys

KEYS = make_keys(6)


def test_a_fill_whose_chunks_came_to_l1_during_the_probe_is_answered_at_once() -> None:
    with filling() as f:
        f.only_in_l2(KEYS)
        f.tier.shared, f.tier.known, f.tier.stopped = True, set(), True
        number = f.begin(KEYS, wait_ms=10_000)
        wait_until(lambda: any(kind == "probe" for kind, _ in f.tier.began))
        f.store(KEYS)
        f.tier.release()
        assert f.reply(number, seconds=9).hit_chunks == 6, "before its limit"
        assert not f.gets()
