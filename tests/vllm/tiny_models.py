"""Tiny models with seeded weights of ordinary scale, whose output depends on every byte of the KV cache.

vLLM's `load_format="dummy"` would not do: its weights are near zero, so wrong KV changes nothing.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCAB = 1024


def llama(folder: Path, *, seed: int = 0, hidden: int = 256, layers: int = 4, dtype: str = "bfloat16") -> Path:
    """A Llama: 8 heads, 4 KV heads of 32, as `config.json` and safetensors in `folder`."""
    heads, kv_heads, head = hidden // 32, hidden // 64, 32
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": hidden * 2,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    generator = torch.Generator().manual_seed(seed)

    def weight(rows: int, columns: int, gain: float) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * gain / math.sqrt(columns)).to(getattr(torch, dtype))

    ones = torch.ones(hidden, dtype=getattr(torch, dtype))
    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCAB, hidden, generator=generator).to(getattr(torch, dtype)),
        "model.norm.weight": ones.clone(),
        "lm_head.weight": weight(VOCAB, hidden, 3.0),
    }
    for i in range(layers):
        prefix = f"model.layers.{i}."
        tensors |= {
            prefix + "self_attn.q_proj.weight": weight(heads * head, hidden, 2.5),
            prefix + "self_attn.k_proj.weight": weight(kv_heads * head, hidden, 2.5),
            prefix + "self_attn.v_proj.weight": weight(kv_heads * head, hidden, 1.5),
            prefix + "self_attn.o_proj.weight": weight(hidden, heads * head, 1.5),
            prefix + "mlp.gate_proj.weight": weight(hidden * 2, hidden, 1.0),
            prefix + "mlp.up_proj.weight": weight(hidden * 2, hidden, 1.0),
            prefix + "mlp.down_proj.weight": weight(hidden, hidden * 2, 1.0),
            prefix + "input_layernorm.weight": ones.clone(),
            prefix + "post_attention_layernorm.weight": ones.clone(),
        }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder
