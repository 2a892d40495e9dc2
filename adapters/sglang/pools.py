"""The tensors of SGLang's KV cache pools, and the object groups that they are.

Owns: the mapping of pools to tensors. Refuses to know: planes, memory, keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvserver.adapters.common.planes import UnsupportedLayout
from kvserver.protocol import ObjectGroup


@dataclass(frozen=True)
class KVPool:
    """`tensors`: by name, one or two for each layer; their first dimension counts pages, or the tokens of all pages.

    Page 0 is no request's: SGLang lets padded tokens write there.
    """

    kvcache: Any
    tensors: dict[str, torch.Tensor]
    pages: int
    page_tokens: int
    replicated: bool  # all ranks hold the same bytes

    @property
    def groups(self) -> tuple[ObjectGroup, ...]:
        return (ObjectGroup("full", (0,), self.page_tokens, replicated=self.replicated),)


def pool_of(kvcache: Any, page_tokens: int) -> KVPool:
    """UnsupportedLayout for pools that are neither MHA's nor MLA's in their plain form."""
    kind = type(kvcache).__name__
    if kind == "MHATokenToKVPool" and getattr(kvcache, "k_scale_buffer", None) is None:
        tensors = _layers("k", kvcache.k_buffer) | _layers("v", kvcache.v_buffer)
    elif kind == "MLATokenToKVPool" and not kvcache.use_dsa:
        tensors = _layers("latent", kvcache.kv_buffer)
    else:
        raise UnsupportedLayout(
            f"a KV cache pool of kind {kind}; plain pools of MHA and MLA are served, without scales and indexers"
        )
    if getattr(kvcache, "post_capture_active", False):
        raise UnsupportedLayout("the KV cache gets its memory after CUDA graphs were captured")
    pages, rest = divmod(kvcache.size + kvcache.page_size, page_tokens)
    if rest:
        raise UnsupportedLayout(f"{kvcache.size + kvcache.page_size} tokens are no whole pages of {page_tokens}")
    return KVPool(kvcache, tensors, pages, page_tokens, kind == "MLATokenToKVPool")


def _layers(name: str, tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{name}{number}": tensor for number, tensor in enumerate(tensors)}


def read_addresses_again(kvcache: Any) -> None:
    """Let the pool note where its tensors lie: on CPUs they were moved into memory that can be shared, before any step ran."""
    if (read := getattr(kvcache, "_init_data_ptrs_and_strides", None)) is not None:
        read()
    else:
        addresses = [tensor.data_ptr() for tensor in kvcache.kv_buffer]
        kvcache.data_ptrs = torch.tensor(addresses, dtype=torch.uint64, device=kvcache.data_ptrs.device)
