"""SGLang's real tree, allocators and pools over the linker, without a model: a test is what computes.

Each row of each pool has bytes that its key determines, so wrong KV is seen wherever it comes from.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import modelless
import torch
from modelless import Scheduler
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    HybridReqToTokenPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.server_args import ServerArgs

from kvserver.adapters.sglang import KVServerLinker
from kvserver.adapters.sglang.pools import MAMBA, SWA, KVPool, pools_of

PAGE = 64  # the indexer of DSA insists on it
TOKENS, WINDOW_TOKENS, STATES = 40 * PAGE, 24 * PAGE, 12
WINDOW = 3 * PAGE - 10
EXTRA = {"kvserver.load_wait_ms": 10_000.0}
_COMMON = {"page_size": PAGE, "dtype": torch.float32, "device": "cpu", "enable_memory_saver": False}
_MHA: dict[str, Any] = {**_COMMON, "head_num": 2, "head_dim": 8}
_MLA: dict[str, Any] = {**_COMMON, "kv_lora_rank": 512, "qk_rope_head_dim": 64}


def prepare(model: Path) -> ServerArgs:
    return modelless.prepare(str(model), PAGE)


def params_of(kind: str, **changes: Any) -> CacheInitParams:
    """Pools of an engine: "mha", "mla", "dsa", "windows", "states" beside MHA, "mla-states", or "eagle", with a draft's."""
    parts, requests = [ComponentType.FULL], ReqToTokenPool(8, TOKENS, "cpu", False)
    stated: dict[str, Any] = {}
    if kind == "windows":
        kvcache: Any = SWAKVPool(
            TOKENS, WINDOW_TOKENS, swa_attention_layer_ids=[0, 2, 3], full_attention_layer_ids=[1, 4], **_MHA
        )
        allocator: Any = SWATokenToKVPoolAllocator(
            TOKENS, WINDOW_TOKENS, page_size=PAGE, dtype=torch.float32, device="cpu", kvcache=kvcache, need_sort=False
        )
        parts.append(ComponentType.SWA)
        stated["sliding_window_size"] = WINDOW
    else:
        if kind.endswith("states"):
            requests = _with_states()
            parts.append(ComponentType.MAMBA)
            stated["enable_mamba_extra_buffer"] = True  # else a page has one token
            kvcache = HybridLinearKVPool(
                TOKENS, full_attention_layer_ids=[1, 3], mamba_pool=requests.mamba_pool, use_mla=kind == "mla-states",
                **({**_MLA, "head_num": 1, "head_dim": 1} if kind == "mla-states" else _MHA),
            )  # fmt: skip
        elif kind in ("mha", "eagle"):
            kvcache = MHATokenToKVPool(TOKENS, layer_num=3, **_MHA)
        elif kind == "mla":
            kvcache = MLATokenToKVPool(TOKENS, layer_num=3, **_MLA)
        else:
            kvcache = DSATokenToKVPool(
                TOKENS, layer_num=3, index_head_dim=128, kv_cache_dim=576, skip_topk_layers=[False, True, False], **_MLA
            )
        allocator = PagedTokenToKVPoolAllocator(
            TOKENS, page_size=PAGE, dtype=torch.float32, device="cpu", kvcache=kvcache, need_sort=False
        )
    if kind == "eagle":
        stated |= {"is_eagle": True, "sidecar_draft_device_pools": (MHATokenToKVPool(TOKENS, layer_num=1, **_MHA),)}
    stated |= {"tree_components": tuple(parts), **changes}
    return CacheInitParams(
        disable=False, req_to_token_pool=requests, token_to_kv_pool_allocator=allocator, page_size=PAGE, **stated
    )


def _with_states() -> HybridReqToTokenPool:
    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=32, n_groups=1, num_heads=2, head_dim=4, state_size=8, conv_kernel=4
    )
    cache_params = Mamba2CacheParams(
        shape=shape, dtype=Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32), layers=[0, 2]
    )
    return HybridReqToTokenPool(
        size=8, mamba_size=STATES, mamba_spec_state_size=8, max_context_len=TOKENS, device="cpu",
        enable_memory_saver=False, cache_params=cache_params, mamba_layer_ids=[0, 2], enable_mamba_extra_buffer=True,
    )  # fmt: skip


def hashes(tokens: Sequence[int], extra: str | None = None, *, drafts: bool = False) -> list[str]:
    """The keys of the prompt's whole pages. `drafts`: each token is hashed with the next one."""
    pages = RadixKey(array("q", tokens), extra, is_bigram=drafts).page_aligned(PAGE)
    return list(get_storage_hash_str(pages, None, page_size=PAGE))


class Tree(Scheduler):
    """A scheduler with pools of one kind."""

    def __init__(
        self, kind: str, endpoint: str, arguments: ServerArgs, linker: type = KVServerLinker, **options: Any
    ) -> None:
        params = params_of(kind)
        self.pools = {pool.name: pool for pool in pools_of(params, PAGE)}
        super().__init__(arguments, params, endpoint, linker=linker, extra=EXTRA, **options)

    # ---- bytes --------------------------------------------------------------------------------

    def write(self, pool: KVPool, rows: Sequence[int], keys: Sequence[str]) -> None:
        for row, key in zip(rows, keys, strict=True):
            for name, bytes_of_row in self._row(pool, row).items():
                content = hashlib.shake_128(f"{name} {key}".encode()).digest(bytes_of_row.numel())
                bytes_of_row.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8).view_as(bytes_of_row))

    def wrong(self, pool: KVPool, rows: Sequence[int], keys: Sequence[str]) -> list[tuple[str, int]]:
        """(tensor, place) of the rows whose bytes are not those of their key."""
        found = []
        for place, (row, key) in enumerate(zip(rows, keys, strict=True)):
            for name, bytes_of_row in self._row(pool, row).items():
                content = hashlib.shake_128(f"{name} {key}".encode()).digest(bytes_of_row.numel())
                if bytes(bytes_of_row.flatten().tolist()) != content:
                    found.append((name, place))
        return found

    def _row(self, pool: KVPool, row: int) -> dict[str, torch.Tensor]:
        rows = {}
        for name, tensor in pool.tensors.items():
            each = tensor.shape[0] // pool.rows
            rows[name] = tensor[row * each : (row + 1) * each].view(torch.uint8)
        return rows

    # ---- requests -----------------------------------------------------------------------------

    def keys(self, tokens: Sequence[int], extra: str | None = None) -> list[str]:
        return hashes(tokens, extra, drafts=self.tree.tree_core.is_eagle)

    def compute(self, tokens: Sequence[int], *, passed: int = 0, extra: str | None = None, seconds: float = 20) -> None:
        """Insert a computed prompt, and wait for its store. The window has passed its first `passed` pages."""
        allocator, keys = self.allocator, self.keys(tokens, extra)
        found = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens), extra)))
        own, first, length = found.device_prefix_len, found.device_prefix_len // PAGE, len(keys) * PAGE
        if own == length:
            return
        insert = InsertParams(key=RadixKey(array("q", tokens), extra), prev_prefix_len=own)
        if SWA in self.pools:
            passed = max(passed, first)
            new = allocator.full_attn_allocator.alloc(length - own)
            windows = allocator.swa_attn_allocator.alloc(length - passed * PAGE)
            allocator.set_full_to_swa_mapping(new[passed * PAGE - own :], windows)
            self.write(self.pools[SWA], rows_of(windows), keys[passed:])
            insert.set_evicted_seqlen(ComponentType.SWA, passed * PAGE)
        else:
            new = allocator.alloc(length - own)
        self.write(self.pools["kv"], rows_of(new), keys[first:])
        insert.value = torch.cat([self.tree.path_device_indices(found.last_device_node)[:own], new])
        if MAMBA in self.pools:
            insert.mamba_value = self.params.req_to_token_pool.mamba_allocator.alloc(1)
            self.write(self.pools[MAMBA], insert.mamba_value.tolist(), keys[-1:])
        self.tree.insert(insert)
        self.wait_for_stores(seconds)

    def load_all(self, tokens: Sequence[int], extra: str | None = None) -> tuple[int, list[tuple[str, int]]]:
        """(tokens loaded, what is wrong of them) of a request that loads all that it can."""
        request = self.request(tokens, extra=extra)
        self.next_pass()  # each pass of a scheduler begins so
        found = self.match(request)
        slots = self.load(request)
        loaded = len(slots)
        if not loaded:
            return 0, []
        first, keys = found.device_prefix_len // PAGE, self.keys(tokens, extra)
        end = first + loaded // PAGE
        wrong = self.wrong(self.pools["kv"], rows_of(slots), keys[first:end])
        if SWA in self.pools:
            needed = slots[-(-(-WINDOW // PAGE) * PAGE) :]
            windows = self.allocator.full_to_swa_index_mapping[needed]
            wrong += self.wrong(self.pools[SWA], rows_of(windows), keys[end - len(needed) // PAGE : end])
        if MAMBA in self.pools:
            wrong += self.wrong(self.pools[MAMBA], [int(request.kv.mamba_pool_idx)], keys[end - 1 : end])
        self.tree.linker.finish_loads()
        self.allocator.free(slots)
        if MAMBA in self.pools:
            self.params.req_to_token_pool.mamba_allocator.free(request.kv.mamba_pool_idx.reshape(1))
        return loaded, wrong


def rows_of(slots: torch.Tensor) -> list[int]:
    return [slot // PAGE for slot in slots[::PAGE].tolist()]
