"""A turn of the loop has a share of work for fills, of which each eviction uses some. What was evicted was counted only after it had
been published, when the plan names none any more: a large fill into a full L1 evicted everything in one turn."""

from __future__ import annotations

import pytest
from support.filling import filling
from support.worker import make_keys

from kvserver.server import Fills, fills

STEPS = 5 * fills.BATCH  # of a batch and its evictions


def test_evictions_of_a_fill_use_up_its_share_of_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    with filling(l1_bytes=2 << 20) as f:
        keys: list[bytes] = []
        for _ in range(4):
            part = make_keys(15)
            f.store(part)
            f.written(part)
            keys += part
        f.forget_l1()
        while not f.running.parts.cache.evicted_chunks:
            f.store(make_keys(15))
        monkeypatch.setattr(fills, "STEPS_PER_TURN", STEPS)
        evicted_in_turns: list[int] = []
        step = Fills.step

        def counted(self: Fills) -> bool:
            before = f.running.parts.cache.evicted_chunks
            more = step(self)
            evicted_in_turns.append(f.running.parts.cache.evicted_chunks - before)
            return more

        monkeypatch.setattr(Fills, "step", counted)
        assert f.fill(keys) == 60
        assert sum(evicted_in_turns) > 2 * fills.BATCH
        assert max(evicted_in_turns) <= fills.BATCH + 1
        f.worker.end_request()
        f.audit()
