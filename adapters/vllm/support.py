"""Configurations of vLLM that are served, and the differences that some of them make.

The rule: where vLLM refuses a connector by its name, its reason is examined for this connector too, in each version (the table is
in adapters/README.md). So is every result of a token that vLLM keeps beside the KV cache, for this engine has none of a token
that another engine computed.

Owns: the reasons to run without cache, read from vLLM's configuration and version. Refuses to know: what is done then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.core import kv_cache_utils

try:
    from vllm.v1.core import kv_cache_planning
except ImportError:  # before 0.33
    kv_cache_planning = kv_cache_utils

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

# 0.30 and later: failures are reported per request, which frees its blocks.
TransferResults: Any = getattr(base, "KVConnectorTransferResults", None)

# 0.32 and later: a connector may choose how the KV cache is allocated, before any address of it is known.
ALLOCATES_IN_CONTEXT = hasattr(base.KVConnectorBase_V1, "get_mem_pool_context")

# 0.32 and later: vLLM asks which groups a load restores.
LEAVES_GROUPS_OUT = hasattr(base.KVConnectorBase_V1, "get_loaded_kv_cache_group_ids")

# Kinds of specs whose KV is no function of the tokens up to it, or not kept for all of them. Block hashes exist all the same.
_NOT_BY_PREFIX = {
    "Cross": "its KV is that of an encoder's input; no option changes that",
    "Encoder": "a token's KV depends on tokens behind it; no option changes that",
    "RSWA": "vLLM itself caches no prefix of R-SWA; no option changes that",
}


# Kinds of states that a step with drafts computes for each of them. vLLM's other kinds take no `num_accepted_tokens`.
_TAKES_ACCEPTED = {"MAMBA2", "GDN_ATTN", "SHORT_CONV"}


def layer_specs(kv_cache_config: KVCacheConfig) -> list[Any]:
    """The specs of all layers, also where a group has several; the scheduler's configuration has one for each group."""
    return [layer for group in kv_cache_config.kv_cache_groups for layer in layers_of(group)]


def by_prefix(kv_cache_config: KVCacheConfig) -> dict[int, KVCacheGroupSpec]:
    """KV cache groups that are cached by the prefix, by number.

    vLLM leaves the others out of its own hits too. A ring has a request's last tokens only, and is filled anew from any boundary. A
    window that is replayed is computed again before a hit's end.
    """
    groups = enumerate(kv_cache_config.kv_cache_groups)
    return {number: group for number, group in groups if getattr(group.kv_cache_spec, "prefix_cacheable", True)}


def layers_of(group: KVCacheGroupSpec) -> list[Any]:
    spec: Any = group.kv_cache_spec
    return list(getattr(spec, "kv_cache_specs", {"": spec}).values())


def vllm_version() -> tuple[int, int]:
    major, minor = vllm.__version__.split(".")[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()) or 0)


def blocks_come_first() -> bool:
    """True if the first dimension of a layer's tensor counts blocks. Up to 0.28 the backend decides."""
    return vllm_version() >= (0, 29)


def unsupported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, outer: Any) -> str | None:
    """Reason why this engine runs without cache, or None. `outer`: the kv_transfer_config that vLLM itself reads."""
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name) > 1:
            return f"{name} > 1: ranks hold different tokens of a block"
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        return (
            "external_launcher: each rank has a scheduler of its own, which receives no reports of other ranks' copies"
        )
    second_runner = vllm_config.use_v2_model_runner
    if parallel.pipeline_parallel_size > 1 and vllm_config.speculative_config and not second_runner:
        # Its ranks but the last return before wait_for_save.
        return "pipeline parallel with speculative decoding on vLLM's model runner V1; set VLLM_USE_V2_MODEL_RUNNER=1"
    groups, cached = kv_cache_config.kv_cache_groups, by_prefix(kv_cache_config)
    for number, group in enumerate(groups):
        if reason := _of_hisparse(group):
            return (
                f"{_named(number, group)}: {reason}; leave HiSparseConnector and attention_config.hisparse_config out"
            )
    for number, group in enumerate(groups):
        if number not in cached and not cached:
            return f"{_named(number, group)}: vLLM caches no group of this model by its prefix; no option changes that"
        if number not in cached and not LEAVES_GROUPS_OUT:
            return f"{_named(number, group)}: vLLM caches it by no prefix, which needs vLLM 0.32 or later"
    for number, group in cached.items():
        if reason := next(filter(None, (_not_served(vllm_config, layer) for layer in layers_of(group))), ""):
            return f"{_named(number, group)}: {reason}"
    # Not whether prefix caching is on: an operator may turn vLLM's own off, and vLLM does on CPUs, see whole_prompts_only.
    if not vllm_config.model_config.is_prefix_caching_supported:
        return "vLLM does not cache prefixes of this model"
    if not groups:
        return "no KV cache"
    if len(groups) > 1 and TransferResults is None:
        return f"{len(groups)} KV cache groups before vLLM 0.30; set --disable-hybrid-kv-cache-manager"
    if vllm_config.model_config.enable_sleep_mode and not hasattr(base.KVConnectorBase_V1, "unregister_kv_caches"):
        return "sleep mode before vLLM 0.33, which frees the KV cache without notifying its connector"
    aux_output = getattr(
        vllm_config, "aux_output_config", None
    )  # 0.31 and later; before, vLLM itself refuses connectors
    if getattr(aux_output, "enable_return_routed_experts", False) and not takes_hits_without_experts_back():
        return "enable_return_routed_experts before vLLM 0.33, which keeps the experts of cached tokens in the process that computed them"
    if {vllm_config.kv_transfer_config.kv_role, outer.kv_role} == {"kv_producer", "kv_consumer"}:
        return "kv_role kv_producer and kv_consumer, one inside the other: vLLM lets a producer load nothing"
    return None


def loads(own: Any, outer: Any) -> bool:
    """True if the engine may load. `own`: the connector's kv_transfer_config; `outer`: the one that vLLM reads.

    Under an outer kv_producer vLLM gives blocks away while a load may still write into them (`defer_block_free`).
    """
    return "kv_producer" not in (own.kv_role, outer.kv_role)


def takes_hits_without_experts_back() -> bool:
    """True if vLLM loads nothing of tokens whose routed experts it does not have (0.33 and later)."""
    try:
        from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
    except ImportError:  # before 0.31
        return False
    return hasattr(AuxOutputSchedulerConnector, "cap_external_hit")


def _named(number: int, group: KVCacheGroupSpec) -> str:
    """The group as an operator finds it: its number, kinds and layers."""
    kinds = sorted({type(layer).__name__ for layer in layers_of(group)})
    names = group.layer_names
    layers = f", {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "") if names else ""
    return f"KV cache group {number} ({' and '.join(kinds)}{layers})"


def _of_hisparse(group: KVCacheGroupSpec) -> str:
    """Reason why a group is HiSparse's (0.30 and later), or ""."""
    if getattr(group, "host_resident", False):
        return "HiSparse keeps it in the host's memory, in a pool of its own"
    if not getattr(group, "enable_kv_transfer", True):
        return "HiSparse's copy on the GPU of a part of the host's KV, which vLLM hands to no connector"
    return ""


def _not_served(vllm_config: VllmConfig, layer: Any) -> str:
    """Reason why a layer's KV is not served, and the cure, or ""."""
    kind = type(layer).__name__
    if reason := next((reason for word, reason in _NOT_BY_PREFIX.items() if word in kind), ""):
        return reason
    if getattr(layer, "non_causal", False):
        return "layers that attend non-causally: a token's KV depends on tokens behind it; no option changes that"
    if ("SlidingWindow" in kind or "ChunkedLocal" in kind) and TransferResults is None:
        return "vLLM before 0.30 would compute on null blocks after a failed load; needs vLLM 0.30 or later"
    return _states_not_served(vllm_config, layer) if "Mamba" in kind else ""


def _states_not_served(vllm_config: VllmConfig, spec: Any) -> str:
    if spec.mamba_cache_mode != "align":
        return f"mamba_cache_mode {spec.mamba_cache_mode!r} keeps no states at the ends of blocks; set --enable-prefix-caching"
    if TransferResults is None:
        return "vLLM before 0.30 would compute on a wrong state after a failed load; needs vLLM 0.30 or later"
    if vllm_config.speculative_config and vllm_version() < (0, 32):
        # Model runners V1 and V2 of 0.30 and 0.31 run a decode without drafts as a plain one, which ignores `num_accepted_tokens`.
        return (
            "with speculative decoding vLLM before 0.32 may compute a step without drafts on the state in front of accepted ones; "
            "needs vLLM 0.32 or later, or no speculative_config"
        )
    if vllm_config.speculative_config and (kind := spec.mamba_type.name) not in _TAKES_ACCEPTED:
        return f"with speculative decoding vLLM's {kind} layers ignore how many drafts were accepted; leave speculative_config out"
    if vllm_config.speculative_config and vllm_config.parallel_config.pipeline_parallel_size > 1:
        # Model runner V2 copies a step's accepted state on all ranks but the last only as that rank begins a later step.
        return "with speculative decoding and pipeline parallelism a state may be copied after its store; leave one of them out"
    if vllm_config.cache_config.use_replayssm:
        return "with ReplaySSM a block may lack the last tokens of its state; leave --use-replayssm out"
    return ""


def hash_block_tokens(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Number of tokens that each hash of a request covers more than its predecessor. With several groups it may be less than a block."""
    said: int | None = getattr(kv_cache_config, "hash_block_size", None)  # 0.32 and later
    groups = kv_cache_config.kv_cache_groups
    if said is None and len(groups) == 1:  # vLLM looks at its cache_config, which workers have as of the start
        return int(groups[0].kv_cache_spec.block_size)
    return said or int(kv_cache_utils.resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])


def drops_last_block(speculation: Any) -> bool:
    """True if vLLM leaves the last block out of its own hits, as with EAGLE and MTP.

    Up to 0.29 all such methods do so, and no option changes that.
    """
    if speculation is None:
        return False
    drops = getattr(speculation, "use_eagle_block_drop", speculation.use_eagle)
    return bool(drops())


def whole_prompts_only(vllm_config: VllmConfig) -> bool:
    """True if a hit is right only when it leaves one token to compute.

    vLLM's MLA for CPUs without AMX prefills as if no token preceded, and only decodes upon cached KV. It turns chunked prefill
    and prefix caching off by itself, but queries connectors all the same.
    """
    return bool(
        vllm_config.device_config.device_type == "cpu"
        and vllm_config.model_config.use_mla
        and not vllm_config.scheduler_config.enable_chunked_prefill
        and not vllm_config.cache_config.enable_prefix_caching
    )


def rehashes_sessions() -> bool:
    """True if a streaming session that drops tokens as it goes on drops their hashes too (0.32 and later).

    Otherwise the session's further hashes, and its blocks in vLLM's own cache, are other tokens'.
    """
    return vllm_version() >= (0, 32)


def replicated(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, group: KVCacheGroupSpec) -> bool:
    """True if all ranks have the same KV of a group: MLA's latent has no heads that tensor parallelism could split."""
    parallel = vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size
    if ranks == 1 or parallel.world_size != ranks:
        return False
    if getattr(kv_cache_config, "kv_tp_replicas", 1) == ranks:  # 0.31 and later: vLLM states it of all groups together
        return True
    replicas = getattr(kv_cache_planning, "kv_cache_groups_tp_replicas", None)  # 0.31 and later
    if replicas is not None:
        return bool(replicas([group], ranks) == ranks)
    return all(type(layer).__name__ == "MLAAttentionSpec" for layer in layers_of(group))
