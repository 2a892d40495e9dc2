"""Configurations of SGLang that are served without cache, each with the flag that is the reason.

Owns: the reasons, read from SGLang's resolved arguments. Refuses to know: what is done then.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.configs.model_config import is_multimodal_model

from kvserver.adapters.sglang.identity import model_config

SMALLEST_PAGE = 16  # tokens: a key of 32 bytes and an object for each page would cost more than they save

_REFUSED = {  # argument -> reason, where it is set
    "enable_memory_saver": "SGLang frees the KV cache without notifying a linker",
    "enable_unified_memory": "pages of one pool become pages of another",
    "enable_hierarchical_cache": "SGLang's own host tier would hold the same bytes",
    "enable_hisparse": "a part of the KV cache lies in the host's memory",
    "enable_multi_layer_eagle": "KV of a second draft layer depends on tokens that the keys do not cover",
    "enable_multimodal": "keys have 30 bits of the digest of an image",
    "enable_pdmux": "prefill and decoding run on streams of their own",
    "enable_dp_attention": "groups of ranks serve different requests",
    "dllm_algorithm": "KV of a block is written again while it is computed",
    "enable_mis": "the KV of a token depends on more than the tokens before it",
    "prefill_only_disable_kv_cache": "there is no KV cache",
    "enable_encoder_swa_bounded_replay": "tokens before the end of a hit are computed again",
    "enable_decoder_swa_bounded_replay": "tokens before the end of a hit are computed again",
    "enable_return_routed_experts": "SGLang keeps the experts of cached tokens in the process that computed them",
    "enable_return_indexer_topk": "SGLang keeps results of cached tokens in the process that computed them",
}
# SGLang hashes each token with the next one for these, so the keys cover what a draft's KV depends on. Beside states it does not: there
# the last token of a page may have another prompt's KV in the draft. That costs a draft and changes no answer.
_DRAFTS_IN_KEYS = ("EAGLE", "EAGLE3", "NEXTN")
_COMPONENTS = ("FULL", "SWA", "MAMBA")  # parts of SGLang's tree
_MODALITIES = ("vision_config", "audio_config", "vision_tower", "thinker_config")  # in a model's configuration
_ONE = {  # argument -> reason, where it is more than 1
    "pp_size": "stages are not served yet",
    "attn_dp_size": "groups of ranks serve different requests",
    "attn_cp_size": "ranks hold different tokens of a page",
    "dcp_size": "ranks hold different tokens of a page",
    "nnodes": "ranks on several machines have several daemons",
}


def unsupported(server_args: Any, page_tokens: int, components: Any) -> str | None:
    """Find a reason to run without cache."""
    args = resolved_view(server_args)
    for name, reason in _REFUSED.items():
        if getattr(args, name, None):
            return f"{_flag(name)}: {reason}"
    for name, reason in _ONE.items():
        if (getattr(args, name, 1) or 1) > 1:
            return f"{_flag(name)} {getattr(args, name)}: {reason}"
    algorithm = str(getattr(args, "speculative_algorithm", None) or "")
    if algorithm and algorithm.upper() not in _DRAFTS_IN_KEYS:
        return f"--speculative-algorithm {algorithm}: keys cover the drafts of {' and '.join(_DRAFTS_IN_KEYS[:2])} only"
    config = model_config(args)
    parts = [name for name in _MODALITIES if name in config]
    if not parts and is_multimodal_model(config.get("architectures") or []):
        parts = config["architectures"]
    if not args.language_model_only and parts:
        return f"a model with {parts[0]}, without --language-model-only: {_REFUSED['enable_multimodal']}"
    if (mode := getattr(args, "disaggregation_mode", "null")) not in (None, "null"):
        return f"--disaggregation-mode {mode}: not served yet"
    if page_tokens < SMALLEST_PAGE:
        return f"--page-size {page_tokens}: pages of {SMALLEST_PAGE} tokens and more are served; 64 suits most models"
    if others := sorted(component.name for component in components if component.name not in _COMPONENTS):
        return f"a cache with {' and '.join(others)}; {', '.join(_COMPONENTS)} are served"
    return None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
