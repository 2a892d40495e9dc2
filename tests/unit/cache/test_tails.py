"""Single blocks behind the last full chunk of a prompt: how far they extend a hit, and that they leave L1 before it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.properties import examples

from kvserver.cache import POLICIES, Cache, Groups, LookupOutcome, MissReason, PagePool, tails_of
from kvserver.config import Settings
from kvserver.protocol import MAX_OBJECT_GROUPS, ObjectGroup, has_tails

PAGE, CHUNK = 4096, 64
NS, FOREVER = b"n" * 32, 1e9
OWNER = ("engine", "request")
FULL = ObjectGroup("full", (0,), 16)
BLOCKS = CHUNK // 16


def key(number: int) -> bytes:
    """Of block `number` of a prompt; of a chunk it is that of its last block."""
    return number.to_bytes(32, "big")


def keys(numbers: Any) -> bytes:
    return b"".join(map(key, numbers))


def chunk_keys(numbers: Any) -> bytes:
    return keys((number + 1) * BLOCKS - 1 for number in numbers)


class OneModel:
    """A cache of one model; an object has a page, whatever it holds."""

    def __init__(self, *groups: ObjectGroup, ranks: int = 1, pages: int = 1000) -> None:
        self.cache = Cache(PagePool(pages * PAGE, PAGE), POLICIES[Settings().eviction_policy]())
        groups = groups or (FULL,)
        self.of_chunks = Groups(groups, ranks, CHUNK)
        self.of_blocks = Groups(groups, ranks, 16, tails=True)

    def store(self, chunks: Any, slots: Any = None) -> None:
        self._store(NS, self.of_chunks, chunk_keys(chunks), slots)

    def store_tail(self, blocks: Any, slots: Any = None, after: int | None = None) -> None:
        of = None if after is None else (NS, chunk_keys([after]))
        self._store(tails_of(NS), self.of_blocks, keys(blocks), slots, of)

    def _store(self, id: bytes, groups: Groups, names: bytes, slots: Any, after: Any = None) -> None:
        for group, first in enumerate(groups.first):
            for slot in range(first, first + groups.slots[group]):
                if slots is None or slot in slots:
                    plan = self.cache.plan_store(
                        id, groups, names, PAGE, group=group, slots=range(slot, slot + 1), after=after
                    )
                    self.cache.finish_store(plan, copied=True)

    def hit(self, chunks: int, blocks: Any) -> tuple[int, int]:
        """(chunks, blocks behind them) that a prompt of so many chunks finds; no lease stays."""
        found = self.cache.lookup(NS, chunk_keys(range(chunks)), OWNER, FOREVER).hit_chunks
        tail = self.cache.lookup_tail(NS, keys(blocks), OWNER, FOREVER)
        self.cache.end_lease(OWNER)
        self.cache.audit()
        return found, tail

    def there(self) -> set[int]:
        """Numbers of the blocks of tails in L1."""
        space = self.cache.index.find_namespace(tails_of(NS))
        return {int.from_bytes(chunk.key, "big") for chunk in space.chunks.values()} if space is not None else set()


@examples(200)
@given(st.data())
def test_a_hit_is_the_longest_prefix_of_which_chunks_or_then_blocks_are_there(data: Any) -> None:
    """Against the rule block by block: blocks [0, n) where each is in a chunk, or behind the last such chunk alone."""
    prompt = data.draw(st.integers(0, 5 * BLOCKS))
    stored = data.draw(st.sets(st.integers(0, 4)))
    tails = data.draw(st.sets(st.integers(0, 5 * BLOCKS - 1)))
    of = OneModel(ranks=data.draw(st.sampled_from([1, 2])))
    of.store(sorted(stored))
    of.store_tail(sorted(tails))

    whole = prompt // BLOCKS
    chunks = next((n for n in range(whole) if n not in stored), whole)
    behind = range(chunks * BLOCKS, min(prompt, (chunks + 1) * BLOCKS))
    blocks = next((n for n, block in enumerate(behind) if block not in tails), len(behind))
    assert of.hit(whole, behind) == (chunks, blocks)


def test_a_block_is_found_when_every_rank_and_group_has_stored_it() -> None:
    of = OneModel(FULL, ObjectGroup("full", (1,), 16, replicated=True), ranks=2)
    of.store_tail(range(2), slots={0, 1})
    assert of.hit(0, range(2)) == (0, 0)
    of.store_tail(range(2), slots={2})
    assert of.hit(0, range(2)) == (0, 2)


def test_the_block_that_ends_a_chunk_is_not_mistaken_for_the_chunk() -> None:
    of = OneModel()
    of.store_tail(range(BLOCKS))
    assert of.hit(1, range(BLOCKS)) == (0, BLOCKS)
    of.store([0])
    assert of.hit(1, range(BLOCKS, 2 * BLOCKS)) == (1, 0)
    outcome = of.cache.lookup(b"m" * 32, chunk_keys([1]), OWNER, FOREVER)
    assert outcome.missed == ((MissReason.NEVER_STORED, 1),), "nor is it a chunk of another namespace"


def test_a_request_leases_its_chunks_and_blocks_until_it_ends() -> None:
    of = OneModel(pages=3)
    of.store([0])
    of.store_tail([BLOCKS, BLOCKS + 1], after=0)
    assert of.cache.lookup(NS, chunk_keys([0]), OWNER, FOREVER).hit_chunks == 1
    assert of.cache.lookup_tail(NS, keys([BLOCKS, BLOCKS + 1]), OWNER, FOREVER) == 2
    assert of.cache.lease_count == 1
    of.store([7])
    assert of.hit(1, [BLOCKS, BLOCKS + 1]) == (1, 2), "nothing was evicted: all is leased"
    of.cache.end_lease(OWNER)
    of.store([7])
    assert of.there() == {BLOCKS}


def test_blocks_alone_can_be_leased() -> None:
    of = OneModel()
    of.store_tail([0])
    assert of.cache.lookup_tail(NS, key(0), OWNER, FOREVER) == 1
    assert of.cache.lease_count == 1
    of.cache.expire_leases(FOREVER)
    while of.cache.step():
        pass
    assert of.cache.lease_count == 0
    of.cache.audit()


def test_a_tail_leaves_before_the_chunks_that_it_follows_its_last_block_first() -> None:
    of = OneModel(pages=5)
    of.store([0, 1])
    of.store_tail([8, 9, 10], after=1)
    left = []
    for number in range(20, 25):
        before = of.there()
        of.store([number])
        left.append((sorted(before - of.there()), of.hit(2, [])[0]))
    assert left[:3] == [([10], 2), ([9], 2), ([8], 2)]


def test_a_tail_without_its_chunk_is_the_youngest() -> None:
    of = OneModel(pages=2)
    of.store([0])
    of.store_tail([8], after=1)
    of.store([5])
    assert of.there() == {8}


def test_tails_are_counted_apart_from_chunks() -> None:
    of = OneModel(pages=4)
    of.store([0])
    of.store_tail([4, 5], after=0)
    index = of.cache.index
    assert (index.chunk_count, index.tail_blocks, of.cache.pool.used_pages) == (1, 2, 3)
    of.store(range(10, 13))
    assert (index.tail_blocks, of.cache.space.evicted_chunks) == (0, 0)
    assert of.cache.space.evicted_pages == 2


def test_a_clear_removes_tails_too_and_counts_chunks() -> None:
    of = OneModel()
    of.store([0])
    of.store_tail([4, 5], after=0)
    assert of.cache.clear_namespaces(NS) == 1
    while of.cache.step():
        pass
    assert of.hit(1, [4, 5]) == (0, 0)
    assert of.cache.pool.used_pages == 0


def test_what_a_tail_covers_is_not_missed() -> None:
    """Chunks of 64 tokens; a prompt of 4 chunks and 50 tokens."""
    inside = LookupOutcome(4, 2, ((MissReason.EVICTED, 1), (MissReason.NEVER_STORED, 1)), tail_blocks=3, tail_tokens=48)
    assert inside.missed_tokens(CHUNK, 4 * CHUNK + 50) == {
        MissReason.EVICTED: 16, MissReason.NEVER_STORED: 64, MissReason.PARTIAL_CHUNK: 50
    }  # fmt: skip
    assert inside.looked_up_tokens(CHUNK) == 4 * CHUNK
    behind = LookupOutcome(4, 4, tail_blocks=3, tail_tokens=48)
    assert behind.missed_tokens(CHUNK, 4 * CHUNK + 50) == {MissReason.PARTIAL_CHUNK: 2}
    assert behind.missed_tokens(CHUNK, 4 * CHUNK + 48) == {}
    assert behind.looked_up_tokens(CHUNK) == 4 * CHUNK + 48


@pytest.mark.parametrize(
    ("groups", "chunk_tokens", "expected"),
    [
        ((FULL,), 64, True),
        ((FULL, ObjectGroup("full", (1,), 16, replicated=True)), 64, True),
        ((FULL,), 16, False),  # a chunk is a block
        ((FULL, ObjectGroup("window", (1,), 16, tokens=31)), 64, False),
        ((ObjectGroup("state", (0,), 16),), 64, False),
        ((FULL, ObjectGroup("full", (1,), 32)), 64, False),
        ((FULL,) * (MAX_OBJECT_GROUPS // 2 + 1), 64, False),  # a load has no so many parts
    ],
)  # fmt: skip
def test_full_attention_alone_has_tails(groups: Any, chunk_tokens: int, expected: bool) -> None:
    assert has_tails(groups, chunk_tokens) is expected
