"""The chunks in L1, by namespace and key."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.properties import Dice, examples, walks
from support.slots import pages_of, slot_of

from kvserver.cache import Index, one_group

ONE, TWO = b"1" * 32, b"2" * 32  # namespaces
A, B = b"a" * 32, b"b" * 32  # keys


def test_a_namespace_is_kept_only_while_it_holds_chunks() -> None:
    index = Index()
    namespace = index.find_or_make_namespace(ONE, one_group(1))
    assert index.find_namespace(ONE) is None, "a search must not leave a namespace behind"
    chunk = index.add_chunk(namespace, A)
    assert index.find_namespace(ONE) is namespace
    index.detach_chunk(chunk)
    assert chunk.detached
    assert index.find_namespace(ONE) is None
    assert index.namespace_ids() == []


def test_a_namespace_of_a_tenants_chunks_alone_is_found_while_it_holds_chunks() -> None:
    index = Index()
    namespace, tenant = index.find_or_make_namespace(ONE, one_group(1)), index.owner_of_share("tenant:t")
    chunk = index.add_chunk(namespace, A, namespace.part(tenant))
    assert index.find_namespace(ONE) is namespace
    assert index.find_chunks(ONE, A) == [chunk]
    assert (tenant.chunks, index.model("").chunks, index.chunk_count) == (1, 0, 1)
    index.detach_chunk(chunk)
    assert chunk.detached
    assert chunk.namespace.owner is tenant, "its pages are the tenant's until they are freed"
    assert index.namespace_ids() == []
    assert (tenant.chunks, index.chunk_count) == (0, 0)


def test_a_chunk_can_be_added_after_its_namespace_was_emptied() -> None:
    index = Index()
    namespace = index.find_or_make_namespace(ONE, one_group(1))
    index.detach_chunk(index.add_chunk(namespace, A))
    again = index.add_chunk(namespace, B)
    assert index.find_namespace(ONE) is namespace
    assert list(index) == [again]
    assert not again.detached


def test_equal_keys_of_two_models_are_two_chunks() -> None:
    index = Index()
    first = index.add_chunk(index.find_or_make_namespace(ONE, one_group(1)), A)
    second = index.add_chunk(index.find_or_make_namespace(TWO, one_group(2)), A)
    assert set(index) == {first, second}
    assert index.chunk_count == 2
    index.detach_chunk(first)
    assert list(index) == [second]


def test_clear_detaches_every_chunk_at_once() -> None:
    index = Index()
    namespace = index.find_or_make_namespace(ONE, one_group(1))
    chunks = [index.add_chunk(namespace, bytes([i]) * 32) for i in range(5)]
    other = index.add_chunk(index.find_or_make_namespace(TWO, one_group(1)), A)
    assert index.detach_namespace(ONE) is namespace
    assert all(chunk.detached for chunk in chunks)
    assert not other.detached
    assert index.find_namespace(ONE) is None
    assert index.chunk_count == 1


def test_a_cleared_namespace_is_followed_by_a_fresh_one() -> None:
    index = Index()
    old = index.add_chunk(index.find_or_make_namespace(ONE, one_group(1)), A)
    index.detach_namespace(ONE)
    new = index.add_chunk(index.find_or_make_namespace(ONE, one_group(1)), A)
    assert old.detached
    assert not new.detached
    assert index.chunk_count == 1


def test_clearing_what_is_not_there_changes_nothing() -> None:
    index = Index()
    assert index.detach_namespace(ONE) is None
    assert index.chunk_count == 0


def test_a_chunk_counts_the_pages_of_all_its_ranks() -> None:
    index = Index()
    chunk = index.add_chunk(index.find_or_make_namespace(ONE, one_group(3)), A)
    assert chunk.page_count == 0
    chunk.set_slot(0, slot_of([1, 2]))
    chunk.set_slot(2, slot_of([3]))
    assert chunk.page_count == 3


@given(ranks=st.sampled_from([1, 2, 8, 64]), steps=walks(50))
@examples(30)
def test_a_chunk_keeps_the_slots_of_its_ranks_apart_in_any_order_of_changes(ranks: int, steps: list[Dice]) -> None:
    chunk = Index().add_chunk(Index().find_or_make_namespace(ONE, one_group(ranks)), A)
    expected: dict[int, list[int]] = {}
    for rng in steps:
        rank = rng.randrange(ranks)
        pages = rng.sample(range(1 << 20), rng.randint(0, 5))
        chunk.set_slot(rank, slot_of(pages))
        expected[rank] = pages
        look = rng.randrange(ranks)
        assert pages_of(chunk.slot(look)) == expected.get(look, [])
        assert chunk.page_count == sum(map(len, expected.values()))
    joined = [page for rank in sorted(expected) for page in expected[rank]]
    assert pages_of(chunk.remove_slots()) == joined
    assert chunk.page_count == 0
    assert chunk.slot(0) == b""


def test_one_fingerprint_has_one_world_size() -> None:
    index = Index()
    index.add_chunk(index.find_or_make_namespace(ONE, one_group(1)), A)
    with pytest.raises(AssertionError):
        index.find_or_make_namespace(ONE, one_group(2))
