"""vLLM's KV cache groups as object groups.

Owns: the reading of vLLM's specs. Refuses to know: block ids, messages, the daemon.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvserver.adapters.vllm.support import by_prefix, replicated
from kvserver.protocol import ObjectGroup

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def object_groups(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> tuple[ObjectGroup, ...]:
    """Groups of equal kind, size and window are one object group; those of full attention come first.

    Groups that are not cached by the prefix are in none.
    """
    members: dict[tuple[str, int, int, bool], list[int]] = {}
    for number, group in by_prefix(kv_cache_config).items():
        members.setdefault((*_kind(group.kv_cache_spec), replicated(vllm_config, kv_cache_config, group)), []).append(
            number
        )
    found = [
        ObjectGroup(kind, tuple(numbers), block_tokens, tokens, on_all_ranks)  # type: ignore[arg-type]
        for (kind, block_tokens, tokens, on_all_ranks), numbers in members.items()
    ]
    return tuple(sorted(found, key=lambda group: group.kind != "full"))


def _kind(spec: Any) -> tuple[str, int, int]:
    """(kind, tokens of a block, tokens as ObjectGroup has them). REQUIRES: the spec is served (`support`)."""
    block_tokens = int(spec.block_size)
    layer = next(
        iter(getattr(spec, "kv_cache_specs", {"": spec}).values())
    )  # a group's layers have one kind and window
    name = type(layer).__name__
    if "SlidingWindow" in name:
        return "window", block_tokens, max(1, layer.sliding_window - 1 + getattr(layer, "extra_retained_tokens", 0))
    if "ChunkedLocal" in name:
        return "local", block_tokens, int(layer.attention_chunk_size)
    return "state" if "Mamba" in name else "full", block_tokens, 0
