"""vLLM's groups as object groups, and where their objects lie in block tables."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drawn_groups import GROUPS
from hypothesis import given
from hypothesis import strategies as st
from support.properties import examples
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvserver.adapters.vllm.chunks import Chunks, Uncovered
from kvserver.adapters.vllm.groups import object_groups
from kvserver.protocol import KEY_BYTES, ObjectGroup

SHAPE: dict[str, Any] = {"num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
WINDOW = SlidingWindowSpec(block_size=16, sliding_window=1024, **SHAPE)
SMALL = SlidingWindowSpec(block_size=32, sliding_window=1024, **SHAPE)
FULL = FullAttentionSpec(block_size=16, **SHAPE)
LOCAL = ChunkedLocalAttentionSpec(block_size=16, attention_chunk_size=8192, **SHAPE)
MLA = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16, max_tp_shards=1)

STATE = MambaSpec(block_size=16, shapes=((3, 64), (2, 8, 8)), dtypes=(torch.bfloat16,) * 2, mamba_cache_mode="align")


def config(*specs: Any) -> Any:
    return SimpleNamespace(kv_cache_groups=[KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)])


def vllm_config(ranks: int) -> Any:
    return SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=ranks, world_size=ranks))


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        ([FULL], [("full", (0,), 16, 0)]),
        ([WINDOW, FULL], [("full", (1,), 16, 0), ("window", (0,), 16, 1023)]),  # gpt-oss: vLLM's first is the window
        ([*[SMALL] * 5, FULL], [("full", (5,), 16, 0), ("window", (0, 1, 2, 3, 4), 32, 1023)]),  # Gemma 4
        ([FULL, LOCAL, LOCAL], [("full", (0,), 16, 0), ("local", (1, 2), 16, 8192)]),  # Llama 4
        ([MLA], [("full", (0,), 64, 0)]),
        (
            [UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": FULL, "b": FULL}), WINDOW],
            [("full", (0,), 16, 0), ("window", (1,), 16, 1023)],
        ),
        ([STATE, STATE, FULL, STATE], [("full", (2,), 16, 0), ("state", (0, 1, 3), 16, 0)]),  # Qwen3-Next
        ([WINDOW, SMALL], [("window", (0,), 16, 1023), ("window", (1,), 32, 1023)]),
    ],
)
def test_groups_of_equal_kind_and_size_are_one_object_group(specs: Any, expected: Any) -> None:
    found = object_groups(vllm_config(ranks=1), config(*specs))
    assert [(group.kind, group.members, group.block_tokens, group.tokens) for group in found] == expected


def test_of_a_hybrid_only_the_group_of_the_latent_is_the_same_on_all_ranks() -> None:
    """Kimi Linear: MLA beside states, which are split by heads."""
    found = object_groups(vllm_config(ranks=2), config(WINDOW, MLA))
    assert [(group.kind, group.replicated) for group in found] == [("full", True), ("window", False)]


def test_of_states_only_what_the_engine_offers_is_stored() -> None:
    chunks = Chunks([ObjectGroup("full", (1,), 4), ObjectGroup("state", (0, 2), 4)], 4)
    chunks.resize(8)
    tables = [[5, 6, 7, 8], [1, 2, 3, 4], [15, 16, 17, 18]]
    offered = chunks.offered(tables, [(0, 9, 16), (2, 19, 16), (0, 10, 8), (2, 20, 9)])
    assert chunks.whole(0, offered, 0)
    assert not chunks.whole(1, offered, 0), "group 2's is of another boundary"
    assert chunks.whole(1, offered, 1)
    assert chunks.blocks_of(1, offered, [1]) == [9, 19]


@examples(200)
@given(GROUPS, st.integers(0, 5), st.integers(1, 6), st.booleans())
def test_a_load_is_what_lies_between_the_local_hit_and_the_boundary_as_far_as_the_window_sees(
    group: ObjectGroup, local: int, further: int, cut: bool
) -> None:
    """The table is as vLLM makes it: null below what the window still needs."""
    chunks = Chunks([group], 2)
    chunks.resize(8)
    boundary = local + further
    tokens = boundary * 8 - (cut and group.kind == "full")  # full attention may be cut to leave one token to compute
    skipped = {
        "full": 0,
        "window": max(0, boundary * 8 - group.tokens),
        "local": boundary * 8 // group.tokens * group.tokens,
        "state": boundary * 8 - 1,
    }[group.kind]
    size = group.block_tokens
    table = [0 if (at + 1) * size <= skipped else 100 + at for at in range(math.ceil(tokens / size))]
    found, skip, blocks = chunks.to_load(0, [table], local * 8, tokens)
    needed = [id for at, id in enumerate(table) if id and at >= local * 8 // size]
    assert blocks == needed
    if blocks:
        assert found.stop == boundary
        held = group.object_blocks(8)
        positions = [(number + 1) * 8 // size - held + at for number in found for at in range(held)]
        assert [100 + at for at in positions[skip:]][: len(blocks)] == blocks


def test_a_block_that_no_object_covers_is_not_loaded() -> None:
    chunks = Chunks([ObjectGroup("window", (0,), 2, tokens=3)], 2)
    chunks.resize(8)  # an object is the last 2 of 4 blocks
    assert chunks.to_load(0, [[0, 0, 7, 8]], 0, 8) == (range(1), 0, [7, 8])
    with pytest.raises(Uncovered):
        chunks.to_load(0, [[0, 6, 7, 8]], 0, 8)
    with pytest.raises(Uncovered):
        chunks.to_load(0, [[0, 0, 7, 8, 9, 10, 11, 12]], 0, 16)


def test_an_object_that_the_window_left_a_block_of_is_not_whole() -> None:
    chunks = Chunks([ObjectGroup("window", (0, 1), 2, tokens=3)], 2)
    chunks.resize(8)
    tables = [[0, 0, 7, 8, 0, 0, 9, 10], [0, 0, 17, 18, 0, 0, 0, 20]]
    assert [chunks.whole(0, tables, number) for number in (0, 1)] == [True, False]
    assert chunks.blocks_of(0, tables, [0]) == [7, 17, 8, 18]


@pytest.mark.parametrize("hash_bytes", [16, 32])
def test_keys_are_the_hashes_of_the_last_blocks(hash_bytes: int) -> None:
    hashes = [bytes([number]) * hash_bytes for number in range(1, 12)]
    request: Any = SimpleNamespace(block_hashes=hashes)
    chunks = Chunks([ObjectGroup("full", (0,), 4)], 4)
    chunks.resize(3 * 4)
    last = [name.ljust(KEY_BYTES, b"\0") for name in hashes[2::3]]
    for named in (range(3), range(1, 3), range(2, 2), range(0, 3, 2), [2, 0], []):
        assert chunks.keys(request, named) == b"".join([last[chunk] for chunk in named])
    for unhashed in (range(4), range(3, 4), [0, 3]):
        with pytest.raises(IndexError):
            chunks.keys(request, unhashed)
