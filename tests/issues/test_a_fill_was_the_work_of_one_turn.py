"""A fill planned, reserved, evicted for and began to read all of its objects in one turn of the loop: of 72 objects 3 to 5 ms, in which
no lookup, store or load of another request was answered. A bound there was, on the evictions, was too large to matter."""

from __future__ import annotations

import pytest
from support.filling import Filling, filling
from support.worker import make_keys

from kvserver.server import Fills, fills


def counted(monkeypatch: pytest.MonkeyPatch, f: Filling) -> list[tuple[int, int, int]]:
    """Of each step of the fills: plans, evicted chunks and reads begun."""
    found, planned = list[tuple[int, int, int]](), list[bytes]()
    step, plan = Fills.step, Fills._plan

    def counting_step(self: Fills) -> bool:
        before = len(planned), f.running.parts.cache.evicted_chunks, len(f.gets())
        more = step(self)
        after = len(planned), f.running.parts.cache.evicted_chunks, len(f.gets())
        found.append(tuple(new - old for old, new in zip(before, after, strict=True)))  # type: ignore[arg-type]
        return more

    def counting_plan(self: Fills, fill: fills.Fill) -> None:
        planned.append(fill.namespace)
        plan(self, fill)

    monkeypatch.setattr(Fills, "step", counting_step)
    monkeypatch.setattr(Fills, "_plan", counting_plan)
    return found


def test_a_turn_plans_one_fill_or_evicts_for_one_batch_or_begins_to_read_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with filling(l1_bytes=2 << 20) as f:
        prompts = [make_keys(15) for _ in range(4)]
        for part in prompts:
            f.store(part)
            f.written(part)
        f.forget_l1()
        while not f.running.parts.cache.evicted_chunks:
            f.store(make_keys(15))
        of_steps = counted(monkeypatch, f)
        keys = [key for part in prompts for key in part]
        assert f.fill(keys) == 60
        plans, evicted, reads = zip(*of_steps, strict=True)
        assert (sum(plans), sum(reads)) == (1, 60)
        assert sum(evicted) > 2 * fills.BATCH
        assert max(evicted) <= fills.BATCH + 1
        assert max(reads) <= fills.BATCH
        assert all(sum(map(bool, step)) <= 1 for step in of_steps)
        f.worker.end_request()
        f.audit()


def test_fills_that_arrive_together_are_planned_in_turns_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with filling() as f:
        keys = make_keys(15)
        f.store(keys)
        f.written(keys)
        f.forget_l1()
        of_steps = counted(monkeypatch, f)
        numbers = [f.begin(keys, f"request {number}") for number in range(8)]
        assert {f.reply(number).hit_chunks for number in numbers} == {15}
        assert sum(plans for plans, _, _ in of_steps) == 8
        assert max(plans for plans, _, _ in of_steps) == 1
        for number in range(8):
            f.worker.end_request(f"request {number}")
        f.audit()
