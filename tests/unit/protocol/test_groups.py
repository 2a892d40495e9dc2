"""What a hit needs of each object group, against the rule written out token by token."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.properties import examples

from kvserver.protocol import ObjectGroup, chunk_tokens_for

BLOCKS = st.sampled_from([1, 2, 3, 4, 8])
KINDS: st.SearchStrategy[Any] = st.sampled_from(["full", "window", "local", "state"])


def needed_tokens(group: ObjectGroup, boundary: int) -> range:
    """The tokens whose KV a hit that ends before token `boundary` needs of the group."""
    first = {
        "full": 0,
        "window": max(0, boundary - group.tokens),
        "local": boundary // max(1, group.tokens) * group.tokens,
        "state": boundary - 1,
    }[group.kind]
    return range(first, boundary)


@examples(300)
@given(KINDS, BLOCKS, st.integers(1, 100), st.integers(1, 12), st.integers(1, 20))
def test_the_objects_needed_cover_the_tokens_needed_and_none_is_needed_in_vain(
    kind: Any, block_tokens: int, tokens: int, blocks: int, boundary: int
) -> None:
    group = ObjectGroup(kind, (0,), block_tokens, tokens=tokens)
    chunk = blocks * block_tokens
    held = group.object_blocks(chunk) * block_tokens  # the last tokens of each chunk
    covered = {
        token
        for number in range(group.first_needed(boundary, chunk), boundary)
        for token in range((number + 1) * chunk - held, (number + 1) * chunk)
    }
    needed = set(needed_tokens(group, boundary * chunk))
    assert needed <= covered
    first = group.first_needed(boundary, chunk)
    assert 0 <= first <= boundary
    assert first == boundary or needed & set(range(first * chunk, (first + 1) * chunk))
    assert held - chunk < block_tokens  # never more than the chunk
    assert group.first_needed(boundary, chunk) <= group.first_needed(boundary + 1, chunk)


@pytest.mark.parametrize(
    ("group", "chunk_tokens", "blocks", "chunks"),
    [
        (ObjectGroup("full", (0,), 16), 256, 16, 40),
        (ObjectGroup("window", (0,), 16, tokens=127), 256, 8, 1),  # gpt-oss
        (ObjectGroup("window", (0,), 16, tokens=1023), 256, 16, 4),  # Gemma
        (ObjectGroup("window", (0,), 16, tokens=1024 + 15), 256, 16, 5),  # a window and a block for drafts
        (ObjectGroup("local", (0,), 16, tokens=8192), 256, 16, 8),  # the hit is 40 chunks, the local part begins at 32
        (ObjectGroup("state", (0,), 640), 1280, 1, 1),
    ],
)
def test_groups_of_todays_models_have_the_stated_blocks_and_needed_chunks(
    group: ObjectGroup, chunk_tokens: int, blocks: int, chunks: int
) -> None:
    assert group.object_blocks(chunk_tokens) == blocks
    assert 40 - group.first_needed(40, chunk_tokens) == chunks


@examples(50)
@given(st.lists(BLOCKS, min_size=1, max_size=4), st.integers(1, 64))
def test_a_chunk_is_whole_blocks_of_every_group_and_near_what_is_wanted(sizes: list[int], wanted: int) -> None:
    tokens = chunk_tokens_for(wanted, [ObjectGroup("full", (0,), size) for size in sizes])
    assert all(tokens % size == 0 for size in sizes)
    assert wanted - math.lcm(*sizes) < tokens <= max(wanted, math.lcm(*sizes))
