"""SGLang's own pools as object groups and planes, without a model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trees
from trees import PAGE, TOKENS, WINDOW, WINDOW_TOKENS

from kvserver.adapters.common.memory import share
from kvserver.adapters.common.planes import UnsupportedLayout
from kvserver.adapters.sglang.pools import object_groups, pools_of, read_addresses_again
from kvserver.protocol import ObjectGroup

FULL = ObjectGroup("full", (0,), PAGE)
REPLICATED = ObjectGroup("full", (0,), PAGE, replicated=True)
WINDOWS = ObjectGroup("window", (1,), PAGE, tokens=WINDOW)
STATES = ObjectGroup("state", (1,), PAGE)
LATENT, INDEX = PAGE * 576 * 4, PAGE * (128 + 4)  # bytes of a page


@pytest.fixture(autouse=True, scope="module")
def arguments(model: Path) -> None:
    trees.prepare(model)


@pytest.mark.parametrize(
    ("kind", "groups", "rows", "runs"),
    [
        ("mha", [FULL], [41], [[PAGE * 64] * 6]),
        ("eagle", [FULL], [41], [[PAGE * 64] * 8]),
        ("mla", [REPLICATED], [41], [[LATENT] * 3]),
        ("dsa", [REPLICATED], [41], [[LATENT] * 3 + [INDEX] * 2]),
        ("windows", [FULL, WINDOWS], [41, 25], [[PAGE * 64] * 4, [PAGE * 64] * 6]),
        ("states", [FULL, STATES], [41, 13], [[PAGE * 64] * 4, [2 * 4 * 8 * 4] * 2 + [48 * 3 * 2] * 2]),
        ("mla-states", [REPLICATED, STATES], [41, 13], [[LATENT] * 2, [2 * 4 * 8 * 4] * 2 + [48 * 3 * 2] * 2]),
    ],
)
def test_each_pool_is_an_object_group_of_all_its_tensors(
    kind: str, groups: list[ObjectGroup], rows: list[int], runs: list[list[int]]
) -> None:
    pools = pools_of(trees.params_of(kind), PAGE)
    assert TOKENS // PAGE + 1 == 41, "page 0 is SGLang's own"
    assert WINDOW_TOKENS // PAGE + 1 == 25
    assert object_groups(pools, PAGE) == tuple(groups)
    assert [pool.rows for pool in pools] == rows
    tensors = {name: tensor for pool in pools for name, tensor in pool.tensors.items()}
    caches = share(tensors, rows[0], 0, [list(pool.tensors) for pool in pools], group_blocks=rows)
    found = [[plane.run_bytes for plane in caches.planes if plane.group == n] for n in range(len(pools))]
    assert found == runs
    assert all(plane.stride_bytes == plane.run_bytes for plane in caches.planes)


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_a_pool_whose_memory_was_moved_notes_the_new_addresses(kind: str) -> None:
    (pool,) = pools_of(trees.params_of(kind), PAGE)
    (kvcache,) = pool.sources
    before = kvcache.data_ptrs.tolist()
    share(pool.tensors, pool.rows, block_dimension=0)
    read_addresses_again(kvcache)
    now = [tensor.data_ptr() for tensor in pool.tensors.values()]
    assert sorted(kvcache.data_ptrs.tolist()) == sorted(now)
    assert set(now) & set(before) == set()


def _with(params: Any, where: str, value: Any) -> Any:
    *path, name = where.split(".")
    target = params
    for part in path:
        target = getattr(target, part)
    setattr(target, name, value)
    return params


@pytest.mark.parametrize(
    ("kind", "where", "value", "reason"),
    [
        ("mha", "token_to_kv_pool_allocator._kvcache.k_scale_buffer", [torch.zeros(1)], "kind MHATokenToKVPool"),
        ("mha", "token_to_kv_pool_allocator._kvcache.post_capture_active", True, "after CUDA graphs"),
        ("dsa", "token_to_kv_pool_allocator._kvcache.kpool_use_compress", True, "kind DSATokenToKVPool"),
        ("windows", "swa_gates_prefix_match", False, "keeps by request"),
        ("windows", "token_to_kv_pool_allocator._kvcache.full_layer_nums", 0, "windows without full attention"),
        ("states", "req_to_token_pool.mamba_ckpt_pool", object(), "states with checkpoints in int8"),
        (
            "states",
            "req_to_token_pool.short_conv_pool",
            SimpleNamespace(enabled=True),
            "states with short convolutions",
        ),
        ("states", "req_to_token_pool.mamba_pool.enable_linear_replayssm", True, "states with a log"),
        ("states", "mtp_draft_mamba_pools", (object(),), "a draft with states of its own"),
        ("windows", "sidecar_draft_device_pools", (object(),), "a draft beside a pool of sliding windows"),
    ],
)
def test_a_pool_that_cannot_be_served_is_refused_by_its_name(kind: str, where: str, value: Any, reason: str) -> None:
    with pytest.raises(UnsupportedLayout, match=reason):
        pools_of(_with(trees.params_of(kind), where, value), PAGE)


def test_a_pool_of_an_unknown_kind_is_refused_by_its_name() -> None:
    class QuantizedPool:
        pass

    with pytest.raises(UnsupportedLayout, match="QuantizedPool"):
        pools_of(_with(trees.params_of("mha"), "token_to_kv_pool_allocator._kvcache", QuantizedPool()), PAGE)
