"""SGLang's own pools as planes, without a model: MLA does not compute on CPUs without SGLang's kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from kvserver.adapters.common.memory import share
from kvserver.adapters.common.planes import UnsupportedLayout
from kvserver.adapters.sglang.pools import pool_of, read_addresses_again

PAGE, LAYERS, TOKENS = 16, 3, 16 * 10


@pytest.fixture(autouse=True, scope="module")
def arguments(model: Path) -> None:
    set_global_server_args_for_scheduler(ServerArgs(model_path=str(model), device="cpu", page_size=PAGE))


def make(kind: str) -> Any:
    common = {
        "page_size": PAGE,
        "dtype": torch.float32,
        "layer_num": LAYERS,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    if kind == "mha":
        return MHATokenToKVPool(TOKENS, head_num=2, head_dim=8, **common)
    return MLATokenToKVPool(TOKENS, kv_lora_rank=24, qk_rope_head_dim=8, **common)


@pytest.mark.parametrize(("kind", "planes", "token_bytes"), [("mha", 2 * LAYERS, 64), ("mla", LAYERS, 128)])
def test_a_pool_is_one_plane_for_each_tensor_of_each_layer(kind: str, planes: int, token_bytes: int) -> None:
    pool = pool_of(make(kind), PAGE)
    caches = share(pool.tensors, pool.pages, block_dimension=0)
    assert pool.pages == TOKENS // PAGE + 1, "page 0 is SGLang's own"
    assert pool.replicated == (kind == "mla")
    assert [(plane.run_bytes, plane.stride_bytes) for plane in caches.planes] == [(PAGE * token_bytes,) * 2] * planes


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_a_pool_whose_memory_was_moved_notes_the_new_addresses(kind: str) -> None:
    kvcache = make(kind)
    pool = pool_of(kvcache, PAGE)
    before = kvcache.data_ptrs.tolist()
    share(pool.tensors, pool.pages, block_dimension=0)
    read_addresses_again(kvcache)
    now = [tensor.data_ptr() for tensor in pool.tensors.values()]
    assert sorted(kvcache.data_ptrs.tolist()) == sorted(now)
    assert set(now) & set(before) == set()


def test_a_pool_of_another_kind_is_refused_by_its_name() -> None:
    class QuantizedPool:
        pass

    with pytest.raises(UnsupportedLayout, match="QuantizedPool"):
        pool_of(QuantizedPool(), PAGE)
