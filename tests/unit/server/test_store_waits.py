"""Waits for handed-over stores end with their reason, not with their time: the clock of these tests stands still."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from kvserver.engines import Instances
from kvserver.engines.counts import Counts
from kvserver.protocol import HandOver, Lookup
from kvserver.server.store_waits import MOST_PROMISED, StoreWaits
from unit.cache.small_cache import NS, keys, make_cache, plan, store

TOKENS = 64


class Scene:
    def __init__(self) -> None:
        self.cache, self.counts, self.answers = make_cache(8), Counts(), 0
        worker = SimpleNamespace(spec=SimpleNamespace(chunk_tokens=TOKENS))
        decode = SimpleNamespace(counts=self.counts, any_worker=lambda: worker)
        self.engines: dict[str, object] = {"decode": decode, "prefill": SimpleNamespace()}
        instances = cast(Instances, SimpleNamespace(by_id=self.engines))
        self.waits = StoreWaits(self.cache, instances, clock=lambda: 1.0)

    def begin(self, names: str, request_id: str = "r") -> bool:
        promise = HandOver("prefill", len(names) * TOKENS)
        lookup = Lookup("decode", "1", request_id, 4, keys(names), handed_over=promise)
        return self.waits.begin(NS, lookup, 10**12, self.answered)

    def answered(self) -> None:
        self.answers += 1

    def step(self) -> int:
        self.waits.step()
        return self.answers


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_wait_ends_once_all_that_was_promised_is_there(scene: Scene) -> None:
    assert scene.begin("ab")
    store(scene.cache, "a")
    assert scene.step() == 0
    store(scene.cache, "b")
    assert scene.step() == 1
    assert (scene.counts.store_waits, scene.counts.lost_handovers) == (1, 0)


def test_wait_ends_when_the_engine_that_promised_disconnects(scene: Scene) -> None:
    assert scene.begin("ab")
    assert scene.step() == 0
    del scene.engines["prefill"]
    assert scene.step() == 1
    assert scene.counts.lost_handovers == 1


def test_wait_ends_when_the_promised_store_fails(scene: Scene) -> None:
    assert scene.begin("ab")
    filling = plan(scene.cache, "ab")
    assert scene.step() == 0
    scene.cache.finish_store(filling, copied=False)
    assert scene.step() == 1
    assert scene.counts.lost_handovers == 1


def test_request_that_ends_is_answered_and_counts_as_no_lost_hand_over(scene: Scene) -> None:
    assert scene.begin("ab")
    scene.waits.end(("decode", "r"))
    assert (scene.answers, scene.waits.next_due_ns) == (1, None)
    assert scene.counts.lost_handovers == 0


def test_made_up_hand_overs_make_only_so_many_requests_wait(scene: Scene) -> None:
    assert all(scene.begin("a", f"r{number}") for number in range(MOST_PROMISED))
    assert not scene.begin("a", "one more")
    filling = plan(scene.cache, "b")
    assert scene.begin("b", "of a store that runs"), "others wait for what runs all the same"
    scene.cache.finish_store(filling, copied=True)
    assert scene.step() == 1
