"""Which namespaces of a kept L1 are adopted: those whose generation every tier still has, once all tiers have answered or a deadline passed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvserver.protocol import Durability, ObjectGroup
from kvserver.restart import missed_clears
from kvserver.restart.missed_clears import WAIT_SECONDS, MissedClears, generations_of
from kvserver.restart.state import KeptNamespace

URL = "valkey://host/0"
IDS = [bytes([number]) * 32 for number in range(3)]


class AskedTier:
    """A tier that knows generations once it has been asked for them and `answers`."""

    url, shared, state = URL, True, "ready"

    def __init__(self, generations: dict[bytes, int]) -> None:
        self.answers = False
        self._generations = generations
        self._asked: set[bytes] = set()

    def generation(self, namespace: bytes) -> int | None:
        return self._generations[namespace] if self.answers and namespace in self._asked else None

    def learn_generations(self, namespaces: Sequence[bytes]) -> None:
        self._asked |= set(namespaces)


class Configured:
    def __init__(self, tier: AskedTier) -> None:
        self.tier = tier

    def admits(self, durability: Durability) -> bool:
        return durability is Durability.ANYWHERE


def kept(id: bytes, generations: dict[str, int | None], tails: bool = False) -> KeptNamespace:
    return KeptNamespace(id, "m", (ObjectGroup("full", (0,), 16),), 1, 64, tails, Durability.ANYWHERE, generations)


def clears_of(tier: AskedTier, *namespaces: KeptNamespace) -> Any:
    return MissedClears(namespaces, [Configured(tier)])  # type: ignore[list-item]


def test_namespaces_of_other_generations_are_lost_once_the_tier_has_answered() -> None:
    tier = AskedTier({IDS[0]: 7, IDS[1]: 9})
    clears = clears_of(tier, kept(IDS[0], {URL: 7}), kept(IDS[1], {URL: 7}), kept(IDS[2], {}))
    assert clears.concerned() == [True, True, False]
    assert clears.lost() is None
    tier.answers = True
    assert clears.lost() == {1: f"it was cleared in {URL}"}


def test_blocks_of_a_last_chunk_have_the_generation_of_their_chunks() -> None:
    tier = AskedTier({IDS[0]: 7})
    tier.answers = True
    clears = clears_of(tier, kept(IDS[0] + b"tails", {URL: 7}, tails=True))
    assert clears.lost() is None
    assert clears.lost() == {}
    found = generations_of(IDS[0] + b"tails", True, Durability.ANYWHERE, [Configured(tier)])  # type: ignore[list-item]
    assert found == {URL: 7}


def test_namespace_whose_generation_was_never_known_is_lost_at_once() -> None:
    clears = clears_of(AskedTier({}), kept(IDS[0], {URL: None}))
    assert clears.lost() == {0: "its generation was not known at the end"}


def test_tier_that_does_not_answer_in_time_costs_its_namespaces_only(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(missed_clears.time, "monotonic", lambda: now[0])
    clears = clears_of(AskedTier({}), kept(IDS[0], {"file:///gone": 1}), kept(IDS[1], {URL: 7}))
    now[0] = WAIT_SECONDS - 1
    assert clears.lost() is None
    now[0] = WAIT_SECONDS + 1
    assert clears.lost() == {1: "a tier of L2 did not answer"}
