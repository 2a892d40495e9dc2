"""A fill planned, reserved, evicted for and began to read all of its objects in one turn of the loop: of 72 objects 2 to 5 ms, in which
no lookup, store or load of another request was answered. A bound there was, on the evictions, was too large to matter."""

from __future__ import annotations

import threading
import time

import pytest
from support.filling import Filling, filling
from support.worker import make_keys

from kvserver.tiering.fill import BATCH, Fill
from kvserver.tiering.fills import Fills


def counted(monkeypatch: pytest.MonkeyPatch, f: Filling) -> list[tuple[int, int, int]]:
    """Of each step of the fills: plans, evicted chunks and reads begun."""
    found, planned = list[tuple[int, int, int]](), list[bytes]()
    step, plan = Fills.step, Fills._plan

    def counting_step(self: Fills) -> bool:
        before = len(planned), f.running.parts.cache.space.evicted_chunks, len(f.gets())
        more = step(self)
        after = len(planned), f.running.parts.cache.space.evicted_chunks, len(f.gets())
        found.append(tuple(new - old for old, new in zip(before, after, strict=True)))  # type: ignore[arg-type]
        return more

    def counting_plan(self: Fills, fill: Fill) -> None:
        planned.append(fill.namespace)
        plan(self, fill)

    monkeypatch.setattr(Fills, "step", counting_step)
    monkeypatch.setattr(Fills, "_plan", counting_plan)
    return found


def test_a_turn_plans_one_fill_or_evicts_for_one_batch_or_begins_to_read_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with filling(l1_bytes=2 << 20) as f:
        prompts = [make_keys(15) for _ in range(4)]
        for part in prompts:
            f.write(part)
        f.forget_l1()
        while not f.running.parts.cache.space.evicted_chunks:
            f.store(make_keys(15))
        of_steps = counted(monkeypatch, f)
        keys = [key for part in prompts for key in part]
        assert f.fill(keys) == 60
        f.worker.end_request()
        f.audit()  # in a later turn than the reply: all of its steps are counted
        plans, evicted, reads = zip(*of_steps, strict=True)
        assert (sum(plans), sum(reads)) == (1, 60)
        assert sum(evicted) > 2 * BATCH
        assert max(evicted) <= BATCH + 1
        assert max(reads) <= BATCH
        assert all(sum(map(bool, step)) <= 1 for step in of_steps)


def test_each_fill_is_planned_in_a_turn_of_its_own_before_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer of one for which nothing is read does not wait for the batches of the others."""
    with filling() as f:
        keys = make_keys(15)
        f.only_in_l2(keys)
        unplanned = list[int]()
        step = Fills.step

        def noting_step(self: Fills) -> bool:
            unplanned.append(sum(not fill.planned for fill in self._fills.values()))
            return step(self)

        monkeypatch.setattr(Fills, "step", noting_step)
        of_steps = counted(monkeypatch, f)
        held = threading.Event()
        f.running.server.call(lambda: held.wait(10))  # so that most of them arrive together
        numbers = [f.begin(keys, f"request {number}") for number in range(8)]
        time.sleep(0.1)
        held.set()
        assert {f.reply(number).hit_chunks for number in numbers} == {15}
        for number in range(8):
            f.worker.end_request(f"request {number}")
        f.audit()  # in a later turn than those replies: all of their steps are counted
        assert sum(plans for plans, _, _ in of_steps) == 8
        for waiting, (plans, evicted, reads) in zip(unplanned, of_steps, strict=False):
            assert plans == min(1, waiting)
            assert not plans or evicted == reads == 0
