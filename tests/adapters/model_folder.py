"""A model's folder without a model."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_model(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """What fingerprints look at: a configuration and weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    write_weights(folder / "model.safetensors", {"model.embed_tokens.weight": 5000, "model.norm.weight": 64}, seed)
    return folder


def write_lora(folder: Path, *, seed: int = 0, config: str = "{}") -> Path:
    write_weights(folder / "adapter_model.safetensors", {"a": 3000, "b": 3000}, seed)
    (folder / "adapter_config.json").write_text(config)
    return folder


def write_weights(path: Path, tensors: dict[str, int], seed: int = 0, dtype: str = "U8") -> Path:
    """Safetensors of so many bytes each, as the seed has them. All its files have one mtime."""
    header: dict[str, Any] = {}
    begin = 0
    for name, size in tensors.items():
        header[name] = {"dtype": dtype, "shape": [size], "data_offsets": [begin, begin + size]}
        begin += size
    text = json.dumps(header).encode()
    content = random.Random(seed).randbytes(begin)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + content)
    os.utime(path, ns=(10**18, 10**18))
    return path
