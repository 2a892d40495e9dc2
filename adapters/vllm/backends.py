"""Facts of vLLM's attention backends about the KV cache, and what they write into it before any token.

Owns: their names, and which dimension of a layer's tensor counts blocks. Refuses to know: strides, memory.
"""

from __future__ import annotations

from typing import Any

import torch
from kvserver.adapters.common.planes import UnsupportedLayout
from vllm import envs

_SENTINEL = 1_000_003  # a number of blocks that is no other dimension's size


def attention_backends(vllm_config: Any, layer_names: list[str]) -> str:
    """The backends' names in layer order, without repetition."""
    names: list[str] = []
    for layer_name in layer_names:
        backend = _backend(vllm_config, layer_name)
        name = backend.get_name() if hasattr(backend, "get_name") else getattr(backend, "__name__", repr(backend))
        if name not in names:
            names.append(name)
    return ",".join(names)


def check_invariance(backends: str) -> None:
    """UnsupportedLayout where vLLM, in its batch-invariant mode, uses no cached prefix.

    vLLM turns its own prefix caching off when a worker builds the layers; its scheduler does not know.
    """
    unable = {"FLASHINFER", "TRITON_MLA"} & set(backends.split(","))
    if unable and getattr(envs, "VLLM_BATCH_INVARIANT", False):
        raise UnsupportedLayout(f"VLLM_BATCH_INVARIANT: {unable.pop()} computes otherwise upon a cached prefix")


def block_dimensions(
    vllm_config: Any, kv_cache_config: Any, shapes: dict[str, int], version: tuple[int, int]
) -> dict[str, int | None]:
    """The dimension that counts blocks, of each layer, given its tensor's number of dimensions. None where it is unknown.

    vLLM 0.29 and later puts blocks first. For earlier versions the backend computes the shape for a number of blocks
    that no other dimension has.
    """
    if version >= (0, 29):
        return dict.fromkeys(shapes, 0)
    specs = {name: group.kv_cache_spec for group in kv_cache_config.kv_cache_groups for name in group.layer_names}
    found: dict[str, int | None] = {}
    for name, dims in shapes.items():
        shape = _shape_of(_backend(vllm_config, name), specs.get(name))
        found[name] = shape.index(_SENTINEL) if len(shape) == dims and shape.count(_SENTINEL) == 1 else None
    return found


def _shape_of(backend: Any, spec: Any) -> tuple[int, ...]:
    """Empty if this backend cannot compute a shape."""
    try:
        shape = backend.get_kv_cache_shape(_SENTINEL, spec.block_size, spec.num_kv_heads, spec.head_size)
        return tuple(int(n) for n in shape)
    except (AttributeError, TypeError, ValueError, NotImplementedError, AssertionError):
        return ()


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


def _backend(vllm_config: Any, layer_name: str) -> Any:
    layer = vllm_config.compilation_config.static_forward_context.get(layer_name)
    return layer.get_attn_backend() if hasattr(layer, "get_attn_backend") else type(layer)
