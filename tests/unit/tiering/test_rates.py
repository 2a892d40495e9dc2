"""What a fill is expected to take: bytes over the measured rate, with what is queued before it."""

from __future__ import annotations

import pytest

from kvserver.tiering.rates import MOST_READS, ReadRates, TierReads

MIB = 1 << 20


class Scene:
    def __init__(self, tiers: int = 1) -> None:
        self.now = 100.0
        self.rates = ReadRates(tiers, lambda: self.now)

    def read(self, seconds: float, size: int = MIB, at_once: int = 1, tier: int = 0) -> None:
        """So many reads at once, of so many bytes each; 0: they fail."""
        began = [self.rates.begun(tier) for _ in range(at_once)]
        self.now += seconds
        for each in began:
            self.rates.ended(tier, each, size)

    def expected(self, objects: int, size: int = MIB) -> float | None:
        return self.rates.expected_seconds([TierReads(objects, objects * size)])


def test_time_of_a_tier_without_measured_reads_is_unknown() -> None:
    scene = Scene()
    assert scene.expected(1) is None
    assert scene.rates.bytes_per_second(0) == 0
    scene.read(1.0, size=0)
    assert scene.expected(1) is None, "a read that failed measures no rate"


def test_a_tier_that_nothing_is_read_from_need_not_be_known() -> None:
    scene = Scene(tiers=2)
    scene.read(0.5)
    assert scene.rates.expected_seconds([TierReads(1, MIB), TierReads(0, 0)]) == pytest.approx(0.5)
    assert scene.rates.expected_seconds([TierReads(1, MIB), TierReads(1, 1)]) is None


def test_reads_at_once_share_the_time() -> None:
    scene = Scene()
    scene.read(2.0, at_once=MOST_READS)
    assert scene.rates.bytes_per_second(0) == pytest.approx(MOST_READS / 2 * MIB)
    assert scene.expected(2 * MOST_READS) == pytest.approx(4.0)


def test_no_fill_is_expected_to_take_less_than_the_shortest_read() -> None:
    scene = Scene()
    scene.read(2.0, at_once=MOST_READS)
    assert scene.expected(1) == pytest.approx(2.0)


def test_a_rate_of_single_reads_is_taken_to_grow_with_reads_at_once() -> None:
    scene = Scene()
    scene.read(0.1)
    assert scene.expected(MOST_READS) == pytest.approx(0.1)
    assert scene.expected(4 * MOST_READS) == pytest.approx(0.4)
    scene.read(1.0, at_once=MOST_READS)  # it does not, and now that is known
    assert scene.expected(MOST_READS) == pytest.approx(1.0, rel=0.2)


def test_expected_time_includes_queued_reads() -> None:
    scene = Scene()
    scene.read(1.0, at_once=MOST_READS)
    scene.rates.queue(0, MOST_READS * MIB)
    assert scene.expected(MOST_READS) == pytest.approx(2.0)
    scene.rates.queue(0, -MOST_READS * MIB)
    assert scene.expected(MOST_READS) == pytest.approx(1.0)


def test_idle_time_is_no_time_of_reading() -> None:
    scene = Scene()
    scene.read(1.0, at_once=MOST_READS)
    scene.now += 30
    scene.read(1.0, at_once=MOST_READS)
    assert scene.expected(MOST_READS) == pytest.approx(1.0)


def test_reads_that_fail_cost_time() -> None:
    scene = Scene()
    scene.read(1.0, at_once=MOST_READS)
    scene.read(1.0, at_once=MOST_READS, size=0)
    assert scene.expected(MOST_READS) == pytest.approx(2.0)


def test_old_measurements_fade() -> None:
    scene = Scene()
    for _ in range(10):
        scene.read(1.0, at_once=MOST_READS)
    for _ in range(100):
        scene.read(0.1, at_once=MOST_READS)
    found = scene.expected(MOST_READS)
    assert found is not None
    assert 0.09 < found < 0.25
    for _ in range(20):
        scene.read(1.0, at_once=MOST_READS)
    assert scene.expected(MOST_READS) == pytest.approx(1.0, rel=0.1)


def test_a_tier_that_was_slow_is_tried_again() -> None:
    """Nothing is read from a tier that is too slow, so nothing would show that it is fast again."""
    scene = Scene()
    scene.read(100.0)
    assert scene.expected(1) == pytest.approx(100.0)
    scene.now += 61
    assert scene.expected(1) is None
    scene.read(0.1)
    assert scene.expected(1) == pytest.approx(0.1)
