"""Which configurations of vLLM are served, and how some of them change what is done.

Owns: the reasons to run without cache, read from vLLM's configuration and version. Refuses to know: what is done then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.core import kv_cache_utils

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

# 0.30 and later: failures are reported per request, which frees its blocks.
TransferResults: Any = getattr(base, "KVConnectorTransferResults", None)

# Kinds of specs whose KV is no function of the tokens up to it, or not kept for all of them. Block hashes exist all the same.
_NOT_BY_PREFIX = ("Mamba", "Cross", "Encoder", "RSWA")


def layer_specs(kv_cache_config: KVCacheConfig) -> list[Any]:
    """The specs of all layers, also where a group has several; the scheduler's configuration has one for each group."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return [layer for spec in specs for layer in getattr(spec, "kv_cache_specs", {"": spec}).values()]


def vllm_version() -> tuple[int, int]:
    major, minor = vllm.__version__.split(".")[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()) or 0)


def blocks_come_first() -> bool:
    """Whether the first dimension of a layer's tensor counts blocks. Before 0.29 the backend decides."""
    return vllm_version() >= (0, 29)


def unsupported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, outer: Any) -> str | None:
    """Why this engine runs without cache, or None. `outer`: the kv_transfer_config that vLLM itself reads."""
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            return f"{name} > 1: ranks hold different tokens of a block"
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        return (
            "external_launcher: each rank has a scheduler of its own, which receives no reports of other ranks' copies"
        )
    second_runner = getattr(vllm_config, "use_v2_model_runner", False)
    if parallel.pipeline_parallel_size > 1 and getattr(vllm_config, "speculative_config", None) and not second_runner:
        # Its ranks but the last return before wait_for_save.
        return "pipeline parallel with speculative decoding on vLLM's model runner V1; set VLLM_USE_V2_MODEL_RUNNER=1"
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    kinds = [type(spec).__name__ for spec in specs]
    for layer in layer_specs(kv_cache_config):
        kind = type(layer).__name__
        if any(word in kind for word in _NOT_BY_PREFIX) or not getattr(layer, "prefix_cacheable", True):
            return f"KV cache of kind {kind}"
        if getattr(layer, "non_causal", False):
            return "layers that attend non-causally: the KV of a token depends on tokens behind it"
        if ("SlidingWindow" in kind or "ChunkedLocal" in kind) and TransferResults is None:
            return f"KV cache of kind {kind} before vLLM 0.30, which would compute on null blocks after a failed load"
    # Not whether prefix caching is on: an operator may turn vLLM's own off, and vLLM does on CPUs, see whole_prompts_only.
    if not getattr(vllm_config.model_config, "is_prefix_caching_supported", True):
        return "vLLM does not cache prefixes of this model"
    if not specs:
        return "no KV cache"
    if len(specs) > 1 and TransferResults is None:
        return f"{len(specs)} KV cache groups before vLLM 0.30; disable the hybrid KV cache manager"
    if len({spec.block_size for spec in specs}) > 1:
        return f"KV cache groups {kinds} with blocks of different sizes; disable the hybrid KV cache manager"
    if second_runner and written_early(vllm_config, kv_cache_config):
        return "vLLM writes new blocks before stores that read them can be ended; set VLLM_USE_V2_MODEL_RUNNER=0"
    if vllm_config.model_config.enable_sleep_mode and not hasattr(base.KVConnectorBase_V1, "unregister_kv_caches"):
        return "sleep mode before vLLM 0.33, which frees the KV cache without notifying its connector"
    if {vllm_config.kv_transfer_config.kv_role, outer.kv_role} != {"kv_both"}:
        return "kv_role must be kv_both"
    return None


def written_early(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> bool:
    """Whether vLLM zeroes new blocks, or copies into them what was partly hit, as the first thing of a step.

    Its model runner V2 does that before it calls handle_preemptions.
    """
    block_tokens = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
    finer = hash_block_tokens(vllm_config, kv_cache_config) < block_tokens
    return bool(getattr(kv_cache_config, "needs_kv_cache_zeroing", False) or finer)


def hash_block_tokens(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """How many tokens each hash of a request covers more than the one before; with several groups perhaps less than a block."""
    said: int | None = getattr(kv_cache_config, "hash_block_size", None)  # 0.32 and later
    groups = kv_cache_config.kv_cache_groups
    if said is None and len(groups) == 1:  # vLLM looks at its cache_config, which workers have as of the start
        return int(groups[0].kv_cache_spec.block_size)
    return said or int(kv_cache_utils.resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])


def whole_prompts_only(vllm_config: VllmConfig) -> bool:
    """Whether a hit is right only if it leaves one token to compute.

    vLLM's MLA for CPUs without AMX prefills as if no token preceded, and only decodes upon cached KV. It
    therefore turns chunked prefill and prefix caching off by itself, but queries connectors all the same.
    """
    return bool(
        vllm_config.device_config.device_type == "cpu"
        and vllm_config.model_config.use_mla
        and not vllm_config.scheduler_config.enable_chunked_prefill
        and not vllm_config.cache_config.enable_prefix_caching
    )


def rehashes_sessions() -> bool:
    """Whether a streaming session that drops tokens as it goes on drops their hashes too.

    Before 0.32 vLLM does not: from there on the session's hashes, and its blocks in vLLM's own cache, are other tokens'.
    """
    return vllm_version() >= (0, 32)


def replicated(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> bool:
    """Whether all ranks hold the same KV: MLA's latent has no heads that tensor parallelism could split."""
    parallel = vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size
    if ranks == 1 or parallel.world_size != ranks:
        return False
    replicas = getattr(kv_cache_config, "kv_tp_replicas", None)  # 0.32 and later: vLLM states it
    if replicas is not None:
        return bool(replicas == ranks)
    return all(type(layer).__name__ == "MLAAttentionSpec" for layer in layer_specs(kv_cache_config))
