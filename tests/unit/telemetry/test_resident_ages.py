"""Ages of what a tier has: stored, evicted, cleared, resynced, and sampled where there is much."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.worker import make_keys

from kvserver.cache import WHOLE_CHUNKS
from kvserver.events import (
    ChunksEvicted,
    ChunksStored,
    Event,
    L1Cleared,
    L1Resynced,
    L2Cleared,
    L2Removed,
    L2Resynced,
    L2Stored,
    ResyncPart,
)
from kvserver.telemetry.resident_ages import AgeCounts, ResidentAges

SECOND = 10**9
NAMESPACE, OTHER = b"n" * 32, b"o" * 32
Make = Callable[[int, bytes, bytes], Event]


def stored_in_l1(at: int, namespace: bytes, keys: bytes) -> Event:
    return ChunksStored(at * SECOND, "e", "m", namespace, keys)


def stored_in_l2(at: int, namespace: bytes, keys: bytes) -> Event:
    return L2Stored(at * SECOND, namespace, keys, 0)


def removed_from_l1(at: int, namespace: bytes, keys: bytes) -> Event:
    return ChunksEvicted(at * SECOND, namespace, keys)


def removed_from_l2(at: int, namespace: bytes, keys: bytes) -> Event:
    return L2Removed(at * SECOND, namespace, keys, 0)


class Ages:
    def __init__(self, most: int = 4096) -> None:
        self.now = 0
        self.resident = ResidentAges(lambda: self.now * SECOND, most)

    def handle(self, *events: Event) -> None:
        for event in events:
            self.resident.handle(event)

    def of(self, tier: str) -> AgeCounts:
        return self.resident.counts()[tier]


@pytest.fixture
def ages() -> Ages:
    return Ages()


TIERS = pytest.mark.parametrize(
    ("tier", "store", "remove"),
    [("l1", stored_in_l1, removed_from_l1), ("l2", stored_in_l2, removed_from_l2)],
    ids=["l1", "l2"],
)


@TIERS
def test_a_chunk_is_as_old_as_its_store(ages: Ages, tier: str, store: Make, remove: Make) -> None:
    for at in (0, 86400, 90000 - 601, 90000 - 60, 90000):
        ages.handle(store(at, NAMESPACE, make_keys(1)[0]))
    ages.now = 90000
    assert ages.of(tier).counts == [2, 0, 2, 0, 1]
    assert ages.of(tier).oldest_seconds == 90000
    assert ages.of({"l1": "l2", "l2": "l1"}[tier]).counts == [0] * 5


@TIERS
def test_chunk_that_left_is_not_counted_and_is_young_when_it_returns(
    ages: Ages, tier: str, store: Make, remove: Make
) -> None:
    keys = b"".join(make_keys(3))
    ages.handle(store(0, NAMESPACE, keys), store(0, OTHER, keys), remove(1, NAMESPACE, keys[:64]))
    ages.now = 100
    assert ages.of(tier).counts == [0, 4, 0, 0, 0]
    ages.handle(store(99, NAMESPACE, keys[:32]))
    assert ages.of(tier).counts == [1, 4, 0, 0, 0]


def test_clear_forgets_the_ages_of_namespaces_with_its_prefix(ages: Ages) -> None:
    keys = b"".join(make_keys(3))
    for namespace in (NAMESPACE, OTHER):
        ages.handle(stored_in_l1(0, namespace, keys), stored_in_l2(0, namespace, keys))
    ages.handle(L1Cleared(1, NAMESPACE[:8]), L2Cleared(1, b""))
    assert sum(ages.of("l1").counts) == 3
    assert sum(ages.of("l2").counts) == 0


@pytest.mark.parametrize("kind", [L1Resynced, L2Resynced])
def test_a_resync_corrects_what_is_there_and_keeps_the_ages_that_are_known(ages: Ages, kind: type) -> None:
    tier, store = ("l1", stored_in_l1) if kind is L1Resynced else ("l2", stored_in_l2)
    group = WHOLE_CHUNKS if kind is L1Resynced else 0
    known, left, unknown, later = make_keys(4)
    ages.handle(store(0, NAMESPACE, known + left))
    ages.now = 3000
    ages.handle(
        kind(0, ResyncPart.BEGIN),
        store(2990, NAMESPACE, later),
        kind(0, ResyncPart.SLICE, NAMESPACE, known + unknown, group),
        kind(0, ResyncPart.END),
    )
    assert (ages.of(tier).counts, ages.of(tier).unknown) == ([1, 0, 1, 0, 0], 1)


def test_sample_of_many_chunks_shows_the_ages_of_all() -> None:
    ages = Ages(most=1000)
    keys = make_keys(20_000, "ages")
    ages.handle(stored_in_l1(0, NAMESPACE, b"".join(keys[:15_000])))
    ages.handle(stored_in_l1(3000, NAMESPACE, b"".join(keys[15_000:])))
    ages.now = 3001
    found = ages.of("l1")
    kept = sum(found.counts)
    assert kept <= 1000
    assert kept == pytest.approx(20_000 * found.share, rel=0.25)
    assert found.counts[2] / kept == pytest.approx(0.75, abs=0.08)
    ages.handle(removed_from_l1(3001, NAMESPACE, b"".join(keys)))
    assert sum(ages.of("l1").counts) == 0
