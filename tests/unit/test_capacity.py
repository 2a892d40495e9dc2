"""Models whose chunks do not divide each other share L1, and it stays full of payload."""

from __future__ import annotations

import random

import pytest

from kvserver.cache import Cache
from kvserver.eviction import POLICIES
from kvserver.pool import PagePool, page_bytes_for

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30
ENOUGH = 0.95

# Bytes of one chunk of one rank, as small and middling models have them.
PAIRS = {
    "512 KiB and 1.4 MiB": (256 * MiB, 512 * KiB, 1_468_006),
    "off by a hair": (256 * MiB, 3 * 128 * KiB + 100, 7 * 64 * KiB + 1),
    "one byte over a page": (256 * MiB, 20 * 4096 + 1, 47 * 4096 + 1),
    "fine and coarse": (256 * MiB, 98_304, 5_898_240),
    "SmolLM-135M and Qwen2.5-0.5B, chunks of 16 tokens, 4 GiB": (4 * GiB, 368_640, 196_608),
    "SmolLM-135M and an MLA model, chunks of 256 tokens, 16 GiB": (16 * GiB, 5_898_240, 256 * 27 * 1152),
    "an awkward 1 GiB": (GiB, 1_000_003, 777_777),
}


class Shelf:
    """A cache that two models fill, and how many bytes of theirs it holds."""

    def __init__(self, l1_bytes: int, *sizes: int) -> None:
        self.l1_bytes = l1_bytes
        self.sizes = {bytes([number]) * 32: size for number, size in enumerate(sizes)}
        self.cache = Cache(PagePool(l1_bytes, page_bytes_for(l1_bytes)), POLICIES["lru"]())
        self.made = 0

    def store(self, namespace: bytes, chunks: int = 1) -> None:
        keys = b"".join((self.made + i).to_bytes(32, "big") for i in range(chunks))
        self.made += chunks
        plan = self.cache.plan_store(namespace, 1, 0, keys, self.sizes[namespace])
        assert plan.starved == 0
        self.cache.finish_store(plan, copied=True)

    def fill(self) -> None:
        while self.cache.evicted_chunks == 0:
            for namespace in self.sizes:
                self.store(namespace)

    def payload(self) -> float:
        """Bytes of READY chunks over bytes of L1."""
        return sum(self.sizes[chunk.namespace.id] for chunk in self.cache.index if chunk.ready) / self.l1_bytes


@pytest.mark.parametrize(("l1_bytes", "one", "other"), PAIRS.values(), ids=PAIRS)
def test_two_models_that_take_turns_leave_no_room_stranded(l1_bytes: int, one: int, other: int) -> None:
    shelf = Shelf(l1_bytes, one, other)
    shelf.fill()
    worst = 1.0
    for turn in range(4000):
        for namespace in shelf.sizes:
            shelf.store(namespace)
        if turn % 100 == 0:
            worst = min(worst, shelf.payload())
    assert worst >= ENOUGH
    shelf.cache.audit()


def test_a_hundred_thousand_operations_leave_no_room_stranded() -> None:
    shelf = Shelf(256 * MiB, 512 * KiB, 1_468_006)
    shelf.fill()
    worst = 1.0
    for turn in range(50_000):
        for namespace in shelf.sizes:
            shelf.store(namespace)
        if turn % 500 == 0:
            worst = min(worst, shelf.payload())
    assert worst >= ENOUGH
    shelf.cache.audit()


@pytest.mark.parametrize("seed", range(3))
def test_bursts_of_three_models_in_no_order_leave_no_room_stranded(seed: int) -> None:
    rng = random.Random(seed)
    shelf = Shelf(256 * MiB, 400_000, 1_468_006, 131_072)
    shelf.fill()
    names = list(shelf.sizes)
    for turn in range(4000):
        shelf.store(rng.choice(names), chunks=rng.randint(1, 8))
        if turn % 100 == 0:
            assert shelf.payload() >= ENOUGH
    shelf.cache.audit()


def test_a_model_that_takes_over_gets_the_whole_of_l1() -> None:
    shelf = Shelf(256 * MiB, 512 * KiB, 1_468_006)
    first, second = shelf.sizes
    for namespace in (first, second, first):
        for _ in range(2000):
            shelf.store(namespace)
        assert {chunk.namespace.id for chunk in shelf.cache.index} == {namespace}
        assert shelf.payload() >= ENOUGH
