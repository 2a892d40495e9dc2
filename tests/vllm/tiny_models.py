"""Tiny models with seeded weights of ordinary scale, whose output depends on every byte of the KV cache.

vLLM's `load_format="dummy"` would not do: its weights are near zero, so wrong KV changes nothing.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

VOCAB = 1024


def prompt(seed: int, length: int) -> list[int]:
    """Random token ids."""
    source = random.Random(seed)
    return [source.randrange(3, VOCAB) for _ in range(length)]


def llama(
    folder: Path, *, seed: int = 0, hidden: int = 256, layers: int = 4, dtype: str = "bfloat16", **changes: Any
) -> Path:
    """A Llama: 8 heads, 4 KV heads of 32, as `config.json` and safetensors in `folder`. `changes` go to the config."""
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
        **_COMMON,
        "torch_dtype": dtype,
        **changes,
    }
    weights = Weights(seed, getattr(torch, dtype))
    tensors = weights.ends(hidden)
    for i in range(layers):
        prefix = f"model.layers.{i}."
        tensors |= {
            prefix + "self_attn.q_proj.weight": weights.matrix(heads * head, hidden, 2.5),
            prefix + "self_attn.k_proj.weight": weights.matrix(kv_heads * head, hidden, 2.5),
            prefix + "self_attn.v_proj.weight": weights.matrix(kv_heads * head, hidden, 1.5),
            prefix + "self_attn.o_proj.weight": weights.matrix(hidden, heads * head, 1.5),
            **weights.rest(prefix, hidden),
        }
    return _write(folder, config, tensors)


def eagle(folder: Path, *, seed: int = 5, hidden: int = 256) -> Path:
    """An EAGLE head for `llama`: one layer over the target's hidden states. It has neither embedding nor output of its own."""
    llama(folder, seed=seed, hidden=hidden, layers=1)
    tensors = load_file(folder / "model.safetensors")
    layer = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if ".layers.0." in name}
    del layer["layers.0.input_layernorm.weight"]
    layer["fc.weight"] = Weights(seed + 1, torch.bfloat16).matrix(hidden, 2 * hidden, 1.0)
    save_file(layer, folder / "model.safetensors")
    return folder


def lora(folder: Path, *, seed: int = 6, hidden: int = 256, layers: int = 4, rank: int = 8) -> Path:
    """A LoRA of `llama`'s queries, keys and values, strong enough to change tokens."""
    weights, tensors = Weights(seed, torch.bfloat16), {}
    for i in range(layers):
        for part, rows in (("q_proj", hidden), ("k_proj", hidden // 2), ("v_proj", hidden // 2)):
            prefix = f"base_model.model.model.layers.{i}.self_attn.{part}."
            tensors[prefix + "lora_A.weight"] = weights.matrix(rank, hidden, 1.0)
            tensors[prefix + "lora_B.weight"] = weights.matrix(rows, rank, 2.0)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj", "k_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def sliding(folder: Path, *, window: int, full_every: int = 0, layers: int = 4, **options: Any) -> Path:
    """A Llama whose layers look back `window` tokens; with `full_every` n every n-th layer looks back to the start."""
    types = [
        "full_attention" if full_every and (i + 1) % full_every == 0 else "sliding_attention" for i in range(layers)
    ]
    return llama(folder, layers=layers, sliding_window=window, layer_types=types, **options)


def deepseek(folder: Path, *, seed: int = 0, hidden: int = 256, layers: int = 3, dtype: str = "bfloat16") -> Path:
    """A DeepSeek V2 without experts: MLA of 4 heads over one latent of 512 + 64 per token, sizes that vLLM insists on."""
    heads, nope, rope, value, latent = 4, 32, 64, 32, 512
    config = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": hidden,
        "intermediate_size": hidden * 2,
        "moe_intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "kv_lora_rank": latent,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "first_k_dense_replace": layers,
        "moe_layer_freq": 1,
        **_COMMON,
        "torch_dtype": dtype,
    }
    weights = Weights(seed, getattr(torch, dtype))
    tensors = weights.ends(hidden)
    for i in range(layers):
        prefix = f"model.layers.{i}."
        tensors |= {
            prefix + "self_attn.q_proj.weight": weights.matrix(heads * (nope + rope), hidden, 2.5),
            prefix + "self_attn.kv_a_proj_with_mqa.weight": weights.matrix(latent + rope, hidden, 2.5),
            prefix + "self_attn.kv_a_layernorm.weight": weights.ones(latent),
            prefix + "self_attn.kv_b_proj.weight": weights.matrix(heads * (nope + value), latent, 1.5),
            prefix + "self_attn.o_proj.weight": weights.matrix(hidden, heads * value, 1.5),
            **weights.rest(prefix, hidden),
        }
    return _write(folder, config, tensors)


def gpt_oss(folder: Path, *, window: int = 128, **options: Any) -> Path:
    """A gpt-oss: every second layer looks back `window` tokens, the others to the start; blocks of equal size."""
    sizes = {"num_hidden_layers": 4, "intermediate_size": 256, "num_local_experts": 4, "num_experts_per_tok": 2}
    return _drawn(folder, "gpt_oss", sliding_window=window, **{**_SMALL, **sizes, **options})


def gemma4(folder: Path, *, window: int = 256, **options: Any) -> Path:
    """A Gemma 4: five layers look back `window` tokens, one to the start; a token has other bytes there, so its blocks are smaller."""
    sizes = {"num_hidden_layers": 6, "intermediate_size": 512, "hidden_size_per_layer_input": 0}
    heads = {"num_global_key_value_heads": 1, "global_head_dim": 128}
    return _drawn(folder, "gemma4_text", sliding_window=window, **{**_SMALL, **_UNTIED, **sizes, **heads, **options})


def mellum(folder: Path, *, window: int = 128, **options: Any) -> Path:
    """A Mellum without experts: three layers look back `window` tokens, one to the start; SGLang has a pool of its own for each kind."""
    types = ["sliding_attention"] * 3 + ["full_attention"]
    rope = {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in set(types)}
    sizes = {"num_hidden_layers": 4, "intermediate_size": 512, "mlp_layer_types": ["dense"] * 4}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 64}
    layers = {"layer_types": types, "rope_parameters": rope, "sliding_window": window}
    return _drawn(folder, "mellum", **{**_SMALL, **sizes, **experts, **layers, **options})


def qwen3_next(folder: Path, **options: Any) -> Path:
    """A Qwen3-Next: three layers of gated delta nets, whose state remembers for hundreds of tokens, one of full attention."""
    sizes = {"num_hidden_layers": 4, "intermediate_size": 512, "moe_intermediate_size": 256}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 256}
    heads = {f"linear_{part}_head_dim": 128 for part in ("key", "value")}
    heads |= {f"linear_num_{part}_heads": 2 for part in ("key", "value")}
    return _drawn(folder, "qwen3_next", dtype="bfloat16", **{**_SMALL, **sizes, **experts, **heads, **options})


def qwen3_next_with_mtp(folder: Path) -> Path:
    """The same with a layer that predicts tokens, of full attention, as vLLM's method `mtp` drafts with."""
    qwen3_next(folder)
    tensors = load_file(folder / "model.safetensors")
    last = "model.layers.3."
    tensors |= {name.replace(last, "mtp.layers.0."): one for name, one in tensors.items() if name.startswith(last)}
    tensors |= {f"mtp.{name}.weight": tensors["model.norm.weight"] for name in _MTP_NORMS}
    hidden = _SMALL["hidden_size"]
    tensors["mtp.fc.weight"] = Weights(7, torch.bfloat16).matrix(hidden, 2 * hidden, 1.0)
    save_file({name: one.clone() for name, one in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


def llama4(folder: Path, *, chunk: int = 512, **options: Any) -> Path:
    """A Llama 4: three layers look back to the start of their chunk of tokens, one to the start of all."""
    sizes = {"num_hidden_layers": 4, "intermediate_size": 256, "intermediate_size_mlp": 512, "num_local_experts": 4}
    return _drawn(folder, "llama4_text", attention_chunk_size=chunk, **{**_SMALL, **sizes, **options})


_MTP_NORMS = ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
_SMALL = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
# A Gemma multiplies its embeddings by 16. One that also predicts with them repeats its last token, whatever its KV.
_UNTIED = {"tie_word_embeddings": False, "embedding": 1 / 16}


def _drawn(
    folder: Path, model_type: str, *, seed: int = 0, dtype: str = "float32", embedding: float = 1, **config: Any
) -> Path:
    """A model of transformers, its weights drawn again: its own initial ones are as small as vLLM's dummy weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = AutoConfig.for_model(model_type, vocab_size=VOCAB, max_position_embeddings=4096, **config)
    model = AutoModelForCausalLM.from_config(settings)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.named_parameters():
        tensor.data = _weight(name, tensor.data, generator)
    model.get_input_embeddings().weight.data *= embedding
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def _weight(name: str, like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    part = name.split(".")[-1] if name.endswith(("_proj", "A_log")) else name.split(".")[-2]
    if part == "A_log":
        return torch.full_like(like, -6.0)  # a state that forgets by itself would hide that it was not loaded
    if like.ndim < 2:
        return like
    if part == "embed_tokens":
        return torch.randn(like.shape, generator=generator)
    columns = like.shape[1 if like.ndim == 3 else -1]
    gain = {"q_proj": 2.5, "k_proj": 2.5, "v_proj": 1.5, "o_proj": 1.5, "lm_head": 3.0}.get(part, 1.0)
    return torch.randn(like.shape, generator=generator) * gain / math.sqrt(columns)


_COMMON = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class Weights:
    """One seed's numbers, in the order of the calls."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._dtype = dtype

    def matrix(self, rows: int, columns: int, gain: float) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=self._generator) * gain / math.sqrt(columns)).to(self._dtype)

    def ones(self, size: int) -> torch.Tensor:
        return torch.ones(size, dtype=self._dtype)

    def ends(self, hidden: int) -> dict[str, torch.Tensor]:
        """What is before and after the layers."""
        return {
            "model.embed_tokens.weight": torch.randn(VOCAB, hidden, generator=self._generator).to(self._dtype),
            "model.norm.weight": self.ones(hidden),
            "lm_head.weight": self.matrix(VOCAB, hidden, 3.0),
        }

    def rest(self, prefix: str, hidden: int) -> dict[str, torch.Tensor]:
        """A layer but for its attention."""
        return {
            prefix + "mlp.gate_proj.weight": self.matrix(hidden * 2, hidden, 1.0),
            prefix + "mlp.up_proj.weight": self.matrix(hidden * 2, hidden, 1.0),
            prefix + "mlp.down_proj.weight": self.matrix(hidden, hidden * 2, 1.0),
            prefix + "input_layernorm.weight": self.ones(hidden),
            prefix + "post_attention_layernorm.weight": self.ones(hidden),
        }


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder
