"""A fill that waits for another one's reads looked at all of its chunks in each turn of the loop, those that were READY too. With 32
requests of one long prompt a turn took milliseconds, and so did every lookup meanwhile."""

from __future__ import annotations

from typing import Any

import pytest
from support.daemon import wait_until
from support.filling import filling
from support.worker import make_keys

from kvserver.tiering import fills

WAITING, CHUNKS, TURNS = 4, 48, 50


def test_a_turn_looks_at_no_chunk_again_that_another_fill_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = 0
    plain = fills.is_filling

    def counted(*of: Any) -> bool:
        nonlocal looked_at
        looked_at += 1
        return plain(*of)

    monkeypatch.setattr(fills, "is_filling", counted)
    with filling() as f:
        keys = make_keys(CHUNKS)
        f.only_in_l2(keys)
        f.tier.kept_waiting = set(keys[32:])  # the last batch
        numbers = [f.begin(keys, f"request-{each}") for each in range(1 + WAITING)]
        wait_until(lambda: len(f.tier.waiting) == 16)
        wait_until(lambda: f.lookup(keys, "other").hit_chunks == 32)
        before = looked_at
        for _ in range(TURNS):
            f.lookup(make_keys(1), "turn")
        assert looked_at - before <= 4 * WAITING * TURNS, "of each fill the chunk that it waits for, twice a turn"
        f.tier.kept_waiting = set()
        f.tier.release()
        assert [f.reply(number).hit_chunks for number in numbers] == [CHUNKS] * (1 + WAITING)
        for each in range(1 + WAITING):
            f.worker.end_request(f"request-{each}")
        f.worker.end_request("other")
        f.worker.end_request("turn")
        f.audit()
