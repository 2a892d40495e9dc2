"""The states of gated delta nets in float32: vLLM's op for CPUs is for bfloat16 only.

In bfloat16 what a step computes depends on what else is in it, and what was decoded is rounded differently when it is prefilled
again: without any connector the tokens of preempted requests differ from those of others. Here each token of a request is
computed alone, by the rule itself, so that prefill and decode agree to the last bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.utils.torch_utils import LayerNameType


def install() -> None:
    """Replace vLLM's op. REQUIRES: no model was built before."""
    gdn_attention.cpu_gdn_attention_core = _core


def _core(
    mixed_qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    core_attn_out: torch.Tensor,
    layer_name: LayerNameType,
) -> None:
    """As vLLM's op of this name, without speculative decoding."""
    context = gdn_attention.get_forward_context()
    layer: Any = context.no_compile_layers[gdn_attention._resolve_layer_name(layer_name)]
    if context.attn_metadata is None:  # vLLM measures its memory
        return
    for tokens, slot, fresh in _requests(context.attn_metadata[layer.prefix]):
        convolution, state = (cache[slot] for cache in layer.kv_cache)
        if not gdn_attention.is_conv_state_dim_first():
            convolution = convolution.t()
        if fresh:
            convolution.zero_()
            state.zero_()
        mixed = _convolved(layer, mixed_qkv[tokens], convolution)
        decay = torch.exp(-layer.A_log.exp() * F.softplus(a[tokens] + layer.dt_bias))
        core_attn_out[tokens] = _delta_rule(layer, mixed, decay, torch.sigmoid(b[tokens]), state)


def _requests(metadata: Any) -> Iterator[tuple[slice, int, bool]]:
    """Of a step: (its tokens, the block of its state, whether it begins without one). Those that decode are first."""
    starts, slots = metadata.non_spec_query_start_loc.tolist(), metadata.non_spec_state_indices_tensor.tolist()
    resumed = metadata.has_initial_state
    for number in range(metadata.num_decodes + metadata.num_prefills):
        fresh = number >= metadata.num_decodes and not resumed[number]
        yield slice(starts[number], starts[number + 1]), slots[number], fresh


def _convolved(layer: Any, tokens: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """`before`, [channels, width - 1], becomes the last tokens of these."""
    weight = layer.conv1d.weight
    channels = torch.cat([before, tokens.t()], dim=1)
    before.copy_(channels[:, -before.size(1) :])
    return F.silu(F.conv1d(channels, weight.view(weight.size(0), 1, -1), layer.conv1d.bias, groups=weight.size(0))).t()


def _delta_rule(
    layer: Any, mixed: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, kept: torch.Tensor
) -> torch.Tensor:
    """`kept`, of each head a square matrix, becomes the state behind the last token."""
    query, key, value = (part.flatten(0, -3) for part in layer.rearrange_mixed_qkv(mixed.contiguous()))
    query, key = F.normalize(query, dim=-1) * query.size(-1) ** -0.5, F.normalize(key, dim=-1)
    state, found = kept.clone(), []
    for token in range(len(mixed)):
        state *= decay[token, :, None, None]
        change = (value[token] - torch.bmm(key[token, :, None], state)[:, 0]) * beta[token, :, None]
        state.baddbmm_(key[token, :, :, None], change[:, None])
        found.append(torch.bmm(query[token, :, None], state)[:, 0])
    kept.copy_(state)
    return torch.stack(found)
