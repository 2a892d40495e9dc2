"""Models whose chunks do not divide each other share L1, and it stays full of payload."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from support.properties import Dice, examples, walks

from kvserver.cache import POLICIES, Cache, PagePool, one_group, page_bytes_for
from kvserver.cache.pages import extents
from kvserver.config import Settings

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30
ENOUGH = 0.95

# Bytes of one chunk of one rank, as small and middling models have them.
PAIRS = {
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
        self.cache = Cache(PagePool(l1_bytes, page_bytes_for(l1_bytes)), POLICIES[Settings().eviction_policy]())
        self.made = 0

    def store(self, namespace: bytes, chunks: int = 1) -> None:
        keys = b"".join((self.made + i).to_bytes(32, "big") for i in range(chunks))
        self.made += chunks
        plan = self.cache.plan_store(namespace, one_group(1), keys, self.sizes[namespace])
        assert plan.no_space == 0
        self.cache.finish_store(plan, copied=True)

    def fill(self) -> None:
        while self.cache.space.evicted_chunks == 0:
            for namespace in self.sizes:
                self.store(namespace)

    def payload(self) -> float:
        """Bytes of READY chunks over bytes of L1."""
        return sum(self.sizes[chunk.namespace.id] for chunk in self.cache.index if chunk.ready) / self.l1_bytes


def take_turns(shelf: Shelf, turns: int) -> float:
    """The least payload of a shelf whose models store a chunk each in every turn."""
    shelf.fill()
    worst = 1.0
    for turn in range(turns):
        for namespace in shelf.sizes:
            shelf.store(namespace)
        if turn % 100 == 0:
            worst = min(worst, shelf.payload())
    shelf.cache.audit()
    return worst


@pytest.mark.parametrize(("l1_bytes", "one", "other"), PAIRS.values(), ids=PAIRS)
def test_two_models_that_take_turns_leave_no_room_stranded(l1_bytes: int, one: int, other: int) -> None:
    assert take_turns(Shelf(l1_bytes, one, other), 4000) >= ENOUGH


def test_a_hundred_thousand_operations_leave_no_room_stranded() -> None:
    assert take_turns(Shelf(256 * MiB, 512 * KiB, 1_468_006), 50_000) >= ENOUGH


@given(steps=walks(40))
@examples(4)
def test_bursts_of_three_models_in_no_order_leave_no_room_stranded(steps: list[Dice]) -> None:
    shelf = Shelf(256 * MiB, 400_000, 1_468_006, 131_072)
    shelf.fill()
    for rng in steps:
        for namespace in rng.choices(list(shelf.sizes), k=100):
            shelf.store(namespace, chunks=rng.randint(1, 8))
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


@dataclass(frozen=True)
class Model:
    """What one rank keeps of a block: `layers` runs of `layer_bytes` a token."""

    layers: int
    layer_bytes: int
    block_tokens: int = 16

    def slot_bytes(self, chunk_tokens: int) -> int:
        return max(1, chunk_tokens // self.block_tokens) * self.block_tokens * self.layers * self.layer_bytes

    def runs(self, chunk_tokens: int, cross_layer: bool) -> list[int]:
        """The contiguous bytes of L0 that a chunk is copied in, in the order of its slot."""
        run = self.block_tokens * self.layer_bytes
        blocks = max(1, chunk_tokens // self.block_tokens)
        return [run * self.layers] * blocks if cross_layer else [run] * (blocks * self.layers)


SMALL = {  # KV heads x head size x K and V x 2 bytes
    "SmolLM-135M": Model(30, 3 * 64 * 4),
    "Qwen2.5-0.5B": Model(24, 2 * 64 * 4),
    "Qwen3-0.6B": Model(28, 8 * 128 * 4),
    "Llama-3.2-1B": Model(16, 8 * 64 * 4),
}
LARGE = {
    "Llama-3.1-8B": Model(32, 8 * 128 * 4),
    "Llama-3.1-70B": Model(80, 8 * 128 * 4),
    "Llama-3.1-70B, a rank of 8": Model(80, 1 * 128 * 4),
    "Llama-3.1-70B, a rank of 4, fp8": Model(80, 2 * 128 * 2),
    "DeepSeek-V3, MLA": Model(61, 576 * 2, block_tokens=64),
    "Qwen3-235B, a rank of 4": Model(94, 1 * 128 * 4),
}
L1_SIZES = [256 * MiB, GiB, 16 * GiB, 100 * GiB, 512 * GiB]
WIDE = 64 * KiB


@pytest.mark.parametrize("l1_bytes", L1_SIZES)
@pytest.mark.parametrize("chunk_tokens", [16, 64, 256, 1024])
@pytest.mark.parametrize("model", [*SMALL.values(), *LARGE.values()], ids=[*SMALL, *LARGE])
def test_slots_of_real_models_waste_little(model: Model, chunk_tokens: int, l1_bytes: int) -> None:
    pool = PagePool(l1_bytes, page_bytes_for(l1_bytes))
    taken = pool.pages_for(model.slot_bytes(chunk_tokens)) * pool.page_bytes
    assert taken <= model.slot_bytes(chunk_tokens) * 1.05


def pieces(slot: bytes, page_bytes: int, runs: list[int]) -> Iterator[int]:
    """How the runs of a chunk are cut by the ends of its slot's extents: the bytes of each copy."""
    of_runs = set(accumulate(runs))
    of_extents = set(accumulate(count * page_bytes for _, count in extents(slot)))
    cuts = [0, *sorted(cut for cut in of_runs | of_extents if cut <= sum(runs))]
    return (end - begin for begin, end in pairwise(cuts))


@pytest.mark.parametrize("cross_layer", [True, False], ids=["cross-layer", "per layer"])
@pytest.mark.parametrize("chunk_tokens", [16, 256])
@pytest.mark.parametrize("model", LARGE.values(), ids=LARGE)
def test_large_models_that_share_l1_with_a_small_one_are_copied_in_wide_pieces(
    model: Model, chunk_tokens: int, cross_layer: bool
) -> None:
    """Chunks leave in no order at all, which is the worst for neighbours."""
    rng = random.Random(1)
    pool = PagePool(2 * GiB, page_bytes_for(512 * GiB))
    sizes = {False: pool.pages_for(SMALL["Qwen2.5-0.5B"].slot_bytes(chunk_tokens))}
    sizes[True] = pool.pages_for(model.slot_bytes(chunk_tokens))
    slots: list[bytes] = []
    taken: list[bytes] = []
    for _ in range(5_000):
        large = rng.random() < 0.5
        while (slot := pool.allocate_pages(sizes[large])) is None:
            chosen = rng.randrange(len(slots))
            slots[chosen], slots[-1] = slots[-1], slots[chosen]
            pool.free_pages(slots.pop())
        slots.append(slot)
        if large:
            taken.append(slot)
    runs = model.runs(chunk_tokens, cross_layer)
    widths = [width for slot in taken[-50:] for width in pieces(slot, pool.page_bytes, runs)]
    assert sum(widths) / len(widths) >= min(WIDE, 0.9 * runs[0])


@pytest.mark.parametrize("l1_bytes", L1_SIZES)
@pytest.mark.parametrize("model", LARGE.values(), ids=LARGE)
def test_one_models_chunks_are_copied_run_by_run(model: Model, l1_bytes: int) -> None:
    rng = random.Random(1)
    pool = PagePool(l1_bytes, page_bytes_for(l1_bytes))
    slots: list[bytes] = []
    for _ in range(3000):
        if slots and rng.random() < 0.3:
            pool.free_pages(slots.pop(rng.randrange(len(slots))))
        elif (slot := pool.allocate_pages(pool.pages_for(model.slot_bytes(256)))) is not None:
            assert len(list(extents(slot))) == 1
            slots.append(slot)
    assert slots
