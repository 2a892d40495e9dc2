"""Facts about vLLM's attention backends: their KV cache, and what they write into it before any token.

Owns: their names. Refuses to know: strides, memory.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm import envs

from kvserver.adapters.common.planes import UnsupportedLayout


def attention_backends(vllm_config: Any, layer_names: list[str]) -> str:
    """The backends' names in layer order, without repetition."""
    layers = vllm_config.compilation_config.static_forward_context
    return ",".join(dict.fromkeys(_backend_name(layers.get(name)) for name in layer_names))


def _backend_name(layer: Any) -> str:
    backend = layer.get_attn_backend() if hasattr(layer, "get_attn_backend") else type(layer)
    return str(backend.get_name()) if hasattr(backend, "get_name") else str(getattr(backend, "__name__", repr(backend)))


def check_invariance(backends: str) -> None:
    """UnsupportedLayout where vLLM, in its batch-invariant mode, uses no cached prefix.

    vLLM turns its own prefix caching off when a worker builds the layers; its scheduler does not know.
    """
    unable = {"FLASHINFER", "TRITON_MLA"} & set(backends.split(","))
    if unable and envs.VLLM_BATCH_INVARIANT:
        raise UnsupportedLayout(f"VLLM_BATCH_INVARIANT: {unable.pop()} computes otherwise upon a cached prefix")


def begin_scales(vllm_config: Any) -> None:
    """Have the layers fill the scales that lie in their blocks with 1, before anything is loaded into the blocks.

    vLLM does it when a layer first reads or writes. Without CUDA graphs that is after the first load.
    """
    for layer in vllm_config.compilation_config.static_forward_context.values():
        impl: Any = getattr(layer, "impl", None)
        cache = getattr(layer, "kv_cache", None)
        if not str(getattr(impl, "kv_cache_dtype", "")).endswith("per_token_head"):
            continue
        if isinstance(cache, torch.Tensor) and not cache.numel():
            continue  # an encoder's
        if hasattr(impl, "_ensure_scale_caches"):
            impl._ensure_scale_caches(cache)
        if getattr(impl, "_k_scale_cache", True) is None:
            raise UnsupportedLayout("this vLLM would fill the scales of a KV cache per token and head over loaded ones")
