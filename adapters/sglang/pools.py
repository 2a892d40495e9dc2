"""The tensors of SGLang's KV cache pools, and the object groups that they are.

SGLang has a pool for full attention, one for sliding windows and one for states. Each has slots of its own, which a transfer of the
pool's name carries. So each is an object group, of other tensors and another number of rows. A draft's KV lies at the slots of full
attention, and is a part of its objects.

Owns: the mapping of pools to tensors, and the reasons why a pool is not served. Refuses to know: planes, memory, keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from kvserver.adapters.common.planes import UnsupportedLayout
from kvserver.protocol import ObjectGroup

KV, SWA, MAMBA = "kv", "swa", "mamba"  # names of SGLang's transfers


@dataclass(frozen=True)
class KVPool:
    """One object group. A row is a page, or a state.

    `tensors`: by name; their first dimension counts rows, or the slots of all rows. Row 0 is no request's: SGLang lets padded tokens
    write there. `allocator` hands out the slots. `sources`: SGLang's objects that note where the tensors lie.
    """

    name: str
    kind: Literal["full", "window", "state"]
    tensors: dict[str, torch.Tensor]
    rows: int
    row_slots: int
    allocator: Any
    window: int = 0  # tokens
    replicated: bool = False  # all ranks hold the same bytes
    sources: list[Any] = field(default_factory=list)


def object_groups(pools: Sequence[KVPool], page_tokens: int) -> tuple[ObjectGroup, ...]:
    return tuple(
        ObjectGroup(pool.kind, (number,), page_tokens, pool.window, pool.replicated)
        for number, pool in enumerate(pools)
    )


def pools_of(params: Any, page_tokens: int) -> list[KVPool]:
    """The pools of an engine, that of full attention first. UnsupportedLayout names the one that is not served."""
    allocator = params.token_to_kv_pool_allocator
    kvcache = allocator.get_kvcache()
    kind = type(kvcache).__name__
    drafts = [*params.mtp_draft_device_pools, *params.sidecar_draft_device_pools]
    if params.mtp_draft_mamba_pools:
        raise UnsupportedLayout("a draft with states of its own")
    if len(drafts) > 1:
        raise UnsupportedLayout("several drafts: KV of the second depends on tokens that the keys do not cover")
    if kind == "SWAKVPool":
        if drafts:
            raise UnsupportedLayout("a draft beside a pool of sliding windows")
        pools = _full_and_window(params, allocator, kvcache, page_tokens)
    else:
        full = kvcache.full_kv_pool if kind == "HybridLinearKVPool" else kvcache
        pools = [_attention(KV, full, page_tokens, allocator, drafts)]
    if hasattr(params.req_to_token_pool, "mamba_pool"):
        pools.append(_states(params.req_to_token_pool))
    return pools


def _full_and_window(params: Any, allocator: Any, kvcache: Any, page_tokens: int) -> list[KVPool]:
    if not kvcache.full_layer_nums or not kvcache.swa_layer_nums:
        raise UnsupportedLayout("sliding windows without full attention")
    if not params.swa_retain_window or not params.swa_gates_prefix_match:
        raise UnsupportedLayout("sliding windows that SGLang keeps by request, not by prefix")
    return [
        _attention(KV, kvcache.full_kv_pool, page_tokens, allocator.full_attn_allocator),
        _attention(
            SWA, kvcache.swa_kv_pool, page_tokens, allocator.swa_attn_allocator, window=params.swa_retain_window
        ),
    ]


def _attention(
    name: str, kvcache: Any, page_tokens: int, allocator: Any, drafts: Sequence[Any] = (), window: int = 0
) -> KVPool:
    prefix = "" if name == KV else f"{name}-"
    tensors = dict(_pages_of(prefix, kvcache, page_tokens))
    for number, draft in enumerate(drafts):
        if (draft.size, draft.page_size) != (kvcache.size, kvcache.page_size):
            raise UnsupportedLayout("a draft whose KV lies at other slots than the model's")
        tensors |= dict(_pages_of(f"draft{number}-", draft, page_tokens))
    rows, rest = divmod(kvcache.size + kvcache.page_size, page_tokens)
    if rest:
        raise UnsupportedLayout(f"{kvcache.size + kvcache.page_size} tokens are no whole pages of {page_tokens}")
    sources = [kvcache, *drafts]
    return KVPool(
        name, "window" if window else "full", tensors, rows, page_tokens, allocator, window,
        replicated=all(hasattr(each, "kv_lora_rank") for each in sources), sources=sources,
    )  # fmt: skip


def _pages_of(prefix: str, kvcache: Any, page_tokens: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that have a part of each page. UnsupportedLayout if these are not known to be all."""
    kind = type(kvcache).__name__
    scaled = any(getattr(kvcache, scales, None) is not None for scales in ("k_scale_buffer", "native_k_scale_buffer"))
    if getattr(kvcache, "post_capture_active", False):
        raise UnsupportedLayout("the KV cache gets its memory after CUDA graphs were captured")
    if kind == "MHATokenToKVPool" and not scaled:
        yield from _layers(f"{prefix}k", kvcache.k_buffer)
        yield from _layers(f"{prefix}v", kvcache.v_buffer)
    elif kind == "MLATokenToKVPool" and not kvcache.use_dsa:
        yield from _layers(f"{prefix}latent", kvcache.kv_buffer)
    elif kind == "DSATokenToKVPool" and not kvcache.kpool_use_compress and kvcache.page_size == page_tokens:
        yield from _layers(f"{prefix}latent", kvcache.kv_buffer)
        # Layers that share another one's choice of tokens have an empty one.
        yield from (item for item in _layers(f"{prefix}indexer", kvcache.index_k_with_scale_buffer) if len(item[1]))
    else:
        raise UnsupportedLayout(
            f"a KV cache pool of kind {kind}; plain pools of MHA, MLA and DSA are served, without scales and compressed keys"
        )


def _states(requests: Any) -> KVPool:
    """States of Mamba or linear attention. A state's key is that of the page at whose end it was taken."""
    pool = requests.mamba_pool
    beside = {
        "checkpoints in int8": getattr(requests, "mamba_ckpt_pool", None) is not None,
        "short convolutions": requests.short_conv_pool.enabled
        or requests.ngram_pool.enabled
        or bool(pool._slot_siblings),
        "a log that is replayed": pool.enable_linear_replayssm or pool.enable_linear_replayssm_spec,
    }
    for what, present in beside.items():
        if present:
            raise UnsupportedLayout(f"a pool of states with {what}")
    if type(pool).__name__ != "MambaPool":
        raise UnsupportedLayout(f"a pool of states of kind {type(pool).__name__}")
    tensors = dict(_layers(f"{MAMBA}-temporal", pool.mamba_cache.temporal))
    for number, convolution in enumerate(pool.mamba_cache.conv):
        tensors |= dict(_layers(f"{MAMBA}-conv{number}-", convolution))
    tensors = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
    return KVPool(MAMBA, "state", tensors, pool.size + 1, 1, requests.mamba_allocator)


def _layers(name: str, tensors: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for number, tensor in enumerate(tensors):
        yield f"{name}{number}", tensor


def read_addresses_again(kvcache: Any) -> None:
    """Let the pool note where its tensors lie: on CPUs they were moved into memory that can be shared, before any step ran."""
    if (read := getattr(kvcache, "_init_data_ptrs_and_strides", None)) is not None:
        read()
    else:
        addresses = [tensor.data_ptr() for tensor in kvcache.kv_buffer]
        kvcache.data_ptrs = torch.tensor(addresses, dtype=torch.uint64, device=kvcache.data_ptrs.device)
