"""Random engines against a slow model, count by count; and samples against the whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from math import sqrt

import pytest
from hypothesis import given
from support.block_lifetimes import HISTOGRAMS, SECOND, Engine, hold, release
from support.block_lifetimes_model import Model
from support.properties import Dice, examples, walks

from kvserver._native import BlockLifetimes, LifetimeMetrics
from kvserver.protocol import MARK, RECORD_OPERATION_SHIFT, Buckets, ExactRecords
from kvserver.telemetry import BlockLifecycle

BLOCKS, POOLS = 24, 2
OPERATIONS = ("allocated", "accessed", "released", "evicted", "cleared", "present", "owned")


class Pair:
    """A real instance and its model, to which the same happens. `rng` is what its step draws from."""

    rng: Dice

    def __init__(self, l0: BlockLifecycle, name: str) -> None:
        self.engine, self.model = Engine(l0, name, num_blocks=BLOCKS), Model()
        self.now = SECOND
        self.gaps = 0
        self.out_of_sync = False
        self.known: dict[int, bool] = {}  # whether the full state of a pool has arrived since the last gap

    def report(self, full: bool) -> None:
        raise NotImplementedError

    def tick(self) -> int:
        """Mostly forward, by microseconds to minutes."""
        self.now += int(10 ** self.rng.uniform(3, 11)) if self.rng.random() < 0.9 else 0
        return self.now

    def step(self, dice: Dice) -> None:
        self.rng = dice
        chance = dice.random()
        if chance < 0.01:
            self.lose_report()
        elif chance < 0.015:
            self.restart()
        elif chance < 0.02:
            self.engine.disconnect(died=False)
            self.restart()
        elif chance < 0.1:
            self.end_request()
        else:
            self.report(full=chance > 0.97)

    def lose_report(self) -> None:
        self.engine.ended(0, "absent")  # the first message of the engine, if there was none yet
        self.engine.sequence += self.rng.randrange(1, 4)
        self.engine.ended(0, "absent")
        self.gaps += 1
        self.model.lose()
        self.known = dict.fromkeys(self.known, False)
        self.out_of_sync = True

    def restart(self) -> None:
        has_computed = self.rng.random() < 0.5
        self.engine.restart(has_computed)
        self.model.lose()
        self.known, self.out_of_sync = {}, has_computed

    def add_pool(self, pool: int, full: bool) -> None:
        self.known[pool] = full or self.known.get(pool, False)
        if full:
            self.out_of_sync = not all(self.known.values())

    def end_request(self) -> None:
        self.engine.ended(0, "absent")

    def check(self) -> None:
        assert self.engine.counts() == self.model.metrics()
        assert self.engine.metric("report_gaps") == self.gaps
        assert self.engine.out_of_sync == self.out_of_sync

    def check_histograms(self) -> None:
        for name in HISTOGRAMS:
            (family,) = [f for f in self.engine.l0.families() if f.name == f"kvserver_l0_block_{name}_seconds"]
            (found,) = [value for labels, value in family.points if labels == self.engine.names]
            assert isinstance(found, Buckets)
            assert found.counts == self.model.buckets(name), name
            assert found.sum == pytest.approx(self.model.sum(name), rel=1e-9, abs=1e-6), name


class ExactPair(Pair):
    """Operations in any order, also such as no pool does."""

    def report(self, full: bool) -> None:
        pool = self.rng.randrange(POOLS)
        self.add_pool(pool, full)
        if full:
            self.model.lose(pool)
        records, marks = b"", b""
        now = self.tick()
        for number in range(self.rng.randrange(1, 12)):
            if number == 0 or self.rng.random() < 0.4:
                now = self.tick()
                marks += MARK.pack(number, now)
            operation = self.rng.choices(OPERATIONS, [8, 8, 14, 8, 0.1, 1, 1])[0]
            block = self.rng.randrange(BLOCKS)
            records += (OPERATIONS.index(operation) << RECORD_OPERATION_SHIFT | block).to_bytes(4, "little")
            self.model.record(pool, operation, block, now)
        self.engine.report(ExactRecords(records, marks, pool, full))


class ReportedPair(Pair):
    REQUESTS = tuple("abcdef")

    def some(self) -> list[int]:
        return self.rng.sample(range(BLOCKS), self.rng.randrange(1, 6))

    def report(self, full: bool) -> None:
        self.add_pool(0, full)
        if full:
            self.model.lose()
        now, records = self.tick(), []
        for _ in range(self.rng.randrange(1, 5)):
            request, blocks = self.rng.choice(self.REQUESTS), self.some()
            if self.rng.random() < 0.2:
                records.append(release(request, blocks))
                self.model.release(request, blocks, now)
            else:  # few contents, and mostly a block's own, so that they are met again
                contents = [b + 1 + 100 * self.rng.choice((0, 0, 0, 1)) for b in blocks[: self.rng.randrange(6)]]
                group = self.rng.choice((0, 0, 0, 1))
                records.append(hold(request, blocks, contents, group=group))
                self.model.hold(request, group, blocks, contents, now, full)
        self.engine.holds(now / SECOND, *records, full=full)

    def tick(self) -> int:
        self.now += self.rng.choice((0, 1, 5, 1000, 20_000)) * 1_000_000  # whole milliseconds
        return self.now

    def end_request(self) -> None:
        request, now = self.rng.choice(self.REQUESTS), self.tick()
        self.engine.ended(now / SECOND, request)
        self.model.end_request(request, now)


KINDS = (ExactPair, ReportedPair)


@pytest.mark.hypothesis
def test_all_counts_of_random_engines_are_those_of_a_slow_model() -> None:
    observed: Counter[tuple[type[Pair], str]] = Counter()

    @given(steps=walks(400))
    @examples(30)
    def walk(steps: list[Dice]) -> None:
        l0 = BlockLifecycle(1.0, 1)
        pairs = [kind(l0, f"{kind.__name__}{n}") for n in range(2) for kind in KINDS]
        for dice in steps:
            pair = dice.choice(pairs)
            pair.step(dice)
            pair.check()
        for pair in pairs:
            pair.check()
            pair.check_histograms()
            observed.update({(type(pair), name): len(pair.model.observed[name]) for name in HISTOGRAMS})

    walk()
    assert all(observed[kind, name] > 1000 for kind in KINDS for name in HISTOGRAMS), observed


# ---- samples --------------------------------------------------------------------------------------

LIFETIMES, GAPS = 20_000, 3
Apply = Callable[[BlockLifetimes, int], None]


def one_block(lifetimes: BlockLifetimes, number: int) -> None:
    one_lifetime(lifetimes, 1, number)


def many_blocks(lifetimes: BlockLifetimes, number: int) -> None:
    one_lifetime(lifetimes, 1 + number, number)


def one_lifetime(lifetimes: BlockLifetimes, block: int, number: int) -> None:
    """A lifetime of 1 to 2 seconds with GAPS accesses."""
    codes = [0, *[1] * GAPS, *[2] * (GAPS + 1), 3]
    records = b"".join((code << RECORD_OPERATION_SHIFT | block).to_bytes(4, "little") for code in codes)
    took = SECOND + number % 1000 * 1_000_000
    lifetimes.apply(records, MARK.pack(0, SECOND) + MARK.pack(len(codes) - 1, SECOND + took))


def sampled_metrics(apply: Apply, rate: float, seed: int = 7) -> LifetimeMetrics:
    found = LifetimeMetrics([1.5])
    lifetimes = BlockLifetimes(found, LIFETIMES + 1, rate, seed)
    for number in range(LIFETIMES):
        apply(lifetimes, number)
    return found


@pytest.mark.parametrize("apply", [one_block, many_blocks])
@pytest.mark.parametrize("rate", [0.1, 0.01])
@pytest.mark.parametrize("seed", [0, 1, 2**63])
def test_a_sample_is_as_large_as_its_rate_and_like_the_whole(apply: Apply, rate: float, seed: int) -> None:
    found = sampled_metrics(apply, rate, seed).read()
    assert (found.allocations, found.evictions, found.shared_accesses) == (LIFETIMES, LIFETIMES, GAPS * LIFETIMES)
    sampled = sum(found.lifetime.counts)
    assert abs(sampled - rate * LIFETIMES) < 4 * sqrt(LIFETIMES * rate * (1 - rate))
    spread = sqrt(1 / 12)  # seconds: lifetimes are uniform over one
    assert abs(found.lifetime.sum / sampled - 1.5) < 4 * spread / sqrt(sampled)
    assert abs(found.lifetime.counts[0] - sampled / 2) < 4 * sqrt(sampled / 4)


@pytest.mark.parametrize("rate", [0.0, 0.01, 0.1, 1.0])
def test_a_lifetime_is_observed_whole_or_not_at_all(rate: float) -> None:
    found = sampled_metrics(many_blocks, rate).read()
    sampled = sum(found.lifetime.counts)
    assert sum(found.idle_before_evict.counts) == sum(found.since_last_access.counts) == sampled
    assert sum(found.reuse_gap.counts) == GAPS * sampled
    assert (sampled == 0) == (rate == 0)
    assert (sampled == LIFETIMES) == (rate == 1)


def test_the_same_seed_samples_the_same_lifetimes_and_another_samples_others() -> None:
    sums = [sampled_metrics(many_blocks, 0.01, seed).read().lifetime.sum for seed in (7, 7, 8)]
    assert sums[0] == sums[1] != sums[2]


def test_each_lifetime_of_a_block_is_sampled_by_itself() -> None:
    found = LifetimeMetrics([1.5])
    lifetimes = BlockLifetimes(found, 2, 0.5, 0)
    seen = []
    for number in range(64):
        before = sum(found.read().lifetime.counts)
        one_lifetime(lifetimes, 1, number)
        seen.append(sum(found.read().lifetime.counts) - before)
    pairs = set(pairwise(seen))
    assert pairs == {(0, 0), (0, 1), (1, 0), (1, 1)}
