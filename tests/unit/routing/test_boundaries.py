"""What the index answers for engines with several object groups is what a lookup of the server finds, at once and with L2."""

from __future__ import annotations

import hashlib
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.properties import examples

from kvserver.cache import POLICIES, Cache, Groups, PagePool
from kvserver.config import Settings
from kvserver.kv_events.types import KeysCleared, KeysRemoved, KeysStored, ReaderConnected, Tier
from kvserver.protocol import DescribeScheduler, ObjectGroup
from kvserver.routing import KVIndex
from kvserver.routing.prefix_index import Match
from kvserver.tiering.presence import hit_with

PAGE, PREFIX = 4096, b"n" * 64
BLOCK_TOKENS, CHUNK_BLOCKS, CHUNKS = 4, 2, 12
CHUNK_TOKENS = BLOCK_TOKENS * CHUNK_BLOCKS
HASHES = [hashlib.sha256(bytes([number])).digest() for number in range(CHUNKS * CHUNK_BLOCKS)]
KEYS = HASHES[CHUNK_BLOCKS - 1 :: CHUNK_BLOCKS]
FULL = ObjectGroup("full", (0,), BLOCK_TOKENS)
WINDOW = ObjectGroup("window", (1,), BLOCK_TOKENS, tokens=CHUNK_TOKENS + 1)
STATE = ObjectGroup("state", (2,), CHUNK_TOKENS)


class World:
    """A cache and an index that have the same objects."""

    def __init__(self, *groups: ObjectGroup) -> None:
        self.cache = Cache(PagePool(1000 * PAGE, PAGE), POLICIES[Settings().eviction_policy]())
        self.groups, self.specs = Groups(groups, 1, CHUNK_TOKENS), groups
        self.in_l2 = [0] * len(groups)  # bits of chunks
        self.index = KVIndex(64 << 20, follow_engines=False)
        scheduler = DescribeScheduler(instance_id="engine", incarnation="1", model_name="model", variant="")
        self.engine = ReaderConnected(1, 0, scheduler, PREFIX, CHUNK_BLOCKS, BLOCK_TOKENS, groups)
        self.index.observe(self.engine)

    def store(self, group: int, *chunks: int) -> None:
        keys = [KEYS[chunk] if chunk >= 0 else bytes([1] * 32) for chunk in chunks]
        plan = self.cache.plan_store(
            PREFIX,
            self.groups,
            b"".join(keys),
            PAGE,
            group=group,
            slots=range(self.groups.first[group], self.groups.first[group] + 1),
        )
        self.cache.finish_store(plan, copied=True)
        self.index.observe(KeysStored(Tier.L1, PREFIX, keys, group))

    def drop(self, group: int, *chunks: int) -> None:
        keys = [KEYS[chunk] for chunk in chunks]
        self.cache.drop_objects(PREFIX, group, b"".join(keys))
        self.index.observe(KeysRemoved(Tier.L1, PREFIX, keys, group))

    def spill(self, group: int, *chunks: int) -> None:
        self.in_l2[group] |= sum(1 << chunk for chunk in chunks)
        self.index.observe(KeysStored(Tier.L2, PREFIX, [KEYS[chunk] for chunk in chunks], group))

    def filled(self, chunks: int = CHUNKS) -> int:
        """What a lookup finds after a fill."""
        resident = self.cache.index.find_chunks(PREFIX, b"".join(KEYS[:chunks]))
        return hit_with(self.groups, self.specs, CHUNK_TOKENS, resident, self.in_l2).chunks

    def looked_up(self, chunks: int = CHUNKS) -> int:
        owner = ("engine", "request")
        found = self.cache.lookup(PREFIX, b"".join(KEYS[:chunks]), owner, 1e9).hit_chunks
        self.cache.end_lease(owner)
        return found

    def matched(self, chunks: int = CHUNKS, tokens: int = 0) -> int:
        """In chunks, of L1."""
        match = self.match(chunks, tokens)
        assert match.l1 % CHUNK_BLOCKS == 0
        assert match.l1 == match.l1_l2 or any(self.in_l2)
        return match.l1 // CHUNK_BLOCKS

    def match(self, chunks: int, tokens: int = 0) -> Match:
        (match,) = self.index.match([self.engine], b"".join(HASHES[: chunks * CHUNK_BLOCKS]), 32, tokens)
        assert match.best == match.l1_l2
        return match


GROUPS = st.lists(
    st.builds(
        ObjectGroup,
        st.sampled_from(["full", "full", "window", "local", "state"]),
        st.just((0,)),
        st.just(BLOCK_TOKENS),
        tokens=st.integers(1, 4 * CHUNK_TOKENS),
    ),
    min_size=1,
    max_size=4,
)


@examples(200)
@given(GROUPS, st.data())
def test_a_match_is_the_hit_of_a_lookup(groups: list[ObjectGroup], data: Any) -> None:
    of = World(*groups)
    of.store(0, -1)  # of another prompt: without any object there is no namespace, and no hit of what needs none
    try:
        absent_most = data.draw(st.booleans())
        for number in range(len(groups)):
            there = data.draw(st.sets(st.integers(0, CHUNKS - 1)))
            of.store(number, *sorted(there if absent_most else set(range(CHUNKS)) - there))
        dropped = data.draw(st.tuples(st.integers(0, len(groups) - 1), st.sets(st.integers(0, CHUNKS - 1))))
        of.drop(dropped[0], *sorted(chunk for chunk in dropped[1]))
        lengths = (CHUNKS, data.draw(st.integers(0, CHUNKS)))
        for chunks in lengths:
            assert of.matched(chunks) == of.looked_up(chunks)
        for number in range(len(groups)):
            of.spill(number, *data.draw(st.sets(st.integers(0, CHUNKS - 1))))
        for chunks in lengths:
            assert of.matched(chunks) == of.looked_up(chunks)
            assert of.match(chunks).l1_l2 == CHUNK_BLOCKS * of.filled(chunks)
    finally:
        of.index.close()


def test_a_prompt_that_ends_at_a_boundary_is_found_to_the_boundary_before_it() -> None:
    for groups, hit in (((FULL, WINDOW), 3), ((FULL, STATE), 3), ((FULL, FULL), 4)):
        of = World(*groups)
        for group in (0, 1):
            of.store(group, *range(6))
        tokens = 4 * CHUNK_TOKENS
        assert of.matched(4, tokens) == hit == of.looked_up(hit)
        assert of.matched(4, tokens + 1) == 4
        of.index.close()


def test_evicted_chunks_have_no_object_of_any_group() -> None:
    of = World(FULL, STATE)
    of.store(0, *range(6))
    of.store(1, 1, 3)
    assert of.matched() == 4
    of.index.observe(KeysRemoved(Tier.L1, PREFIX, [KEYS[3]]))
    assert of.matched() == 2
    of.store(0, 3)
    assert of.matched() == 2, "its state was evicted, too"
    of.index.observe(KeysCleared(Tier.L1, PREFIX))
    assert of.matched() == 0
    assert of.index.status().blocks == 0
    of.index.close()


def test_a_window_in_l2_carries_on_what_full_attention_has_in_l1() -> None:
    of = World(FULL, STATE)
    of.store(0, *range(6))
    of.spill(1, 1, 4)
    match = of.match(CHUNKS)
    assert (match.l1, match.l2, match.l1_l2) == (0, 0, 5 * CHUNK_BLOCKS)
    of.index.close()


def test_an_index_without_a_free_owner_finds_no_boundary_rather_than_a_wrong_one() -> None:
    of = World(FULL, STATE)
    of.store(0, *range(6))
    for number in range(63):  # each of an engine, so that none makes room
        prefix = number.to_bytes(64, "big")
        scheduler = DescribeScheduler(instance_id=str(number), incarnation="1", model_name="model", variant="")
        of.index.observe(ReaderConnected(1, 0, scheduler, prefix, CHUNK_BLOCKS, BLOCK_TOKENS))
        of.index.observe(KeysStored(Tier.L1, prefix, KEYS[:1]))
    of.index.observe(KeysStored(Tier.L1, PREFIX, KEYS, 1))
    assert of.matched() == 0
    of.index.close()
