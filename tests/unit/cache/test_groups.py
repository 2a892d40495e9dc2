"""Objects of several groups in one L1: which boundary a lookup finds, what it leases, what is dropped and evicted."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.properties import examples
from support.turns import repeat

from kvserver.cache import POLICIES, Cache, Groups, MissReason, PagePool, Protection
from kvserver.config import Settings
from kvserver.protocol import KVServerError, ObjectGroup

PAGE, CHUNK = 4096, 4
NS, FOREVER = b"n" * 32, 1e9
OWNER = ("engine", "request")
FULL = ObjectGroup("full", (0,), 1)
WINDOW = ObjectGroup("window", (1,), 1, tokens=2 * CHUNK)
STATE = ObjectGroup("state", (2,), 1)


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def keys(numbers: Any) -> bytes:
    return b"".join(map(key, numbers))


class OneModel:
    """A cache of one model, its objects stored one page each."""

    def __init__(self, *groups: ObjectGroup, ranks: int = 1, pages: int = 10_000) -> None:
        self.cache = Cache(PagePool(pages * PAGE, PAGE), POLICIES[Settings().eviction_policy]())
        self.groups = Groups(groups, ranks, CHUNK)

    def store(self, group: int, numbers: Any, slot: int | None = None) -> None:
        first, count = self.groups.first[group], self.groups.slots[group]
        for each in range(first, first + count) if slot is None else [slot]:
            plan = self.cache.plan_store(NS, self.groups, keys(numbers), PAGE, group=group, slots=range(each, each + 1))
            self.cache.finish_store(plan, copied=True)

    def lookup(self, chunks: int) -> Any:
        return self.cache.lookup(NS, keys(range(chunks)), OWNER, FOREVER)

    def leased(self) -> list[int]:
        space = self.cache.index.find_namespace(NS)
        return (
            sorted(int.from_bytes(chunk.key, "big") for chunk in space.chunks.values() if chunk.leases) if space else []
        )

    def hit(self, chunks: int) -> int:
        found: int = self.lookup(chunks).hit_chunks
        self.cache.end_lease(OWNER)
        return found


GROUPS = st.lists(
    st.builds(
        ObjectGroup,
        st.sampled_from(["full", "full", "window", "local", "state"]),
        st.just((0,)),
        st.just(1),
        tokens=st.integers(1, 4 * CHUNK),
    ),
    min_size=1,
    max_size=4,
)


@examples(300)
@given(GROUPS, st.data())
def test_a_lookup_finds_the_greatest_boundary_that_every_group_allows(groups: list[ObjectGroup], data: Any) -> None:
    total = 12
    present = [data.draw(st.sets(st.integers(0, total - 1))) for _ in groups]
    if data.draw(st.booleans()):  # mostly present: holes are rare
        present = [set(range(total)) - lacking for lacking in present]
    of = OneModel(*groups)
    for number, there in enumerate(present):
        of.store(number, sorted(there))

    def allowed(boundary: int) -> bool:
        return all(
            set(range(group.first_needed(boundary, CHUNK), boundary)) <= there
            for group, there in zip(groups, present, strict=True)
        )

    expected = max(boundary for boundary in range(total + 1) if allowed(boundary)) if any(present) else 0
    outcome = of.lookup(total)
    assert outcome.hit_chunks == expected
    assert of.cache.boundaries(NS, keys(range(expected))) == [n for n in range(1, expected + 1) if allowed(n)]
    full = [there for group, there in zip(groups, present, strict=True) if group.kind == "full"]
    if full:
        assert outcome.full_chunks == max(n for n in range(total + 1) if all(set(range(n)) <= there for there in full))
    assert of.leased() == list(range(min(group.first_needed(expected, CHUNK) for group in groups), expected))
    assert sum(count for _, count in outcome.missed) == total - expected
    of.cache.end_lease(OWNER)
    of.cache.audit()


def test_chunks_at_a_missing_window_are_missed_as_no_boundary() -> None:
    of = OneModel(FULL, WINDOW)
    of.store(0, range(6))
    of.store(1, [0, 1, 4])
    outcome = of.lookup(8)
    assert (outcome.hit_chunks, outcome.full_chunks) == (2, 6)
    assert outcome.missed == ((MissReason.NO_BOUNDARY, 4), (MissReason.NEVER_STORED, 2))
    assert outcome.missing_key == key(2)


def test_a_protection_ends_at_a_boundary_and_keeps_its_windows() -> None:
    of = OneModel(FULL, WINDOW)
    of.store(0, range(6))
    of.store(1, [0, 1, 4])
    of.cache.protections.fraction = 1.0
    protection = Protection("p", "operator", NS, of.cache.index.model(""), 1.0, 0.0)
    assert of.cache.protect(protection, keys(range(6)), lambda _: b"") == 2
    assert of.leased() == [0, 1]
    assert of.cache.drop_objects(NS, 1, keys([0, 1, 4])) == key(4)
    of.cache.expire_leases(1.0)
    repeat(of.cache.step)
    assert of.leased() == []
    of.cache.audit()


def test_an_object_is_found_when_all_its_ranks_are_there_whatever_other_groups_have() -> None:
    of = OneModel(FULL, STATE, ranks=2)
    of.store(0, range(2))
    of.store(1, [1], slot=2)
    assert of.hit(2) == 0
    of.store(1, [1], slot=3)
    assert of.hit(2) == 2


def test_a_replicated_group_beside_a_sharded_one_has_one_slot() -> None:
    of = OneModel(FULL, ObjectGroup("state", (1,), 1, replicated=True), ranks=3)
    assert of.groups.slots == [3, 1]
    of.store(0, range(2))
    of.store(1, [1], slot=3)
    assert of.hit(2) == 2
    assert of.cache.pool.used_pages == 2 * 3 + 1


def test_a_load_needs_the_object_of_its_group() -> None:
    of = OneModel(FULL, WINDOW)
    of.store(0, range(2))
    of.store(1, [1])
    of.cache.finish_load(of.cache.plan_load(NS, keys([1]), 1), copied=True)
    with pytest.raises(KVServerError, match="1 of 2 chunks are not READY"):
        of.cache.plan_load(NS, keys([0, 1]), 1)


def test_dropped_objects_free_their_pages_and_leave_those_of_other_groups() -> None:
    of = OneModel(FULL, STATE)
    of.store(0, range(3))
    of.store(1, [0, 1, 2])
    assert of.cache.drop_objects(NS, 1, keys([1, 7, 0])) == keys([1, 0])
    assert (of.cache.pool.used_pages, of.hit(2), of.hit(3)) == (4, 0, 3)
    assert of.cache.drop_objects(NS, 1, keys([1])) == b""
    assert of.cache.drop_objects(NS, 0, keys([0])) == keys([0])
    assert of.cache.index.chunk_count == 2
    of.cache.audit()


def test_a_chunk_in_use_loses_no_object() -> None:
    of = OneModel(FULL, STATE)
    of.store(0, range(2))
    of.store(1, [1])
    assert of.lookup(2).hit_chunks == 2
    assert of.cache.drop_objects(NS, 1, keys([1])) == b""
    of.cache.end_lease(OWNER)
    loading = of.cache.plan_load(NS, keys([1]), 1)
    assert of.cache.drop_objects(NS, 1, keys([1])) == b""
    of.cache.finish_load(loading, copied=True)
    assert of.cache.drop_objects(NS, 1, keys([1])) == key(1)


def test_a_prefix_is_evicted_from_its_end_and_keeps_the_states_that_it_needs() -> None:
    """A small object that ages by itself would be evicted first, and strand the long prefix."""
    of = OneModel(FULL, STATE, pages=12)
    of.store(0, range(8))
    of.store(1, [3, 7])
    assert of.hit(8) == 8
    of.store(0, range(100, 105))  # evicts: 2 pages are free
    assert of.hit(8) == 4
    of.cache.audit()


def test_objects_of_one_chunk_are_evicted_together() -> None:
    of = OneModel(FULL, STATE, pages=4)
    of.store(0, range(2))
    of.store(1, [0, 1])
    plan = of.cache.plan_store(NS, of.groups, key(9), PAGE)
    assert plan.evicted == [(NS, key(1))]
    assert of.cache.pool.used_pages == 3
    of.cache.finish_store(plan, copied=True)
    of.cache.audit()
