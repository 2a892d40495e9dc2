"""What must agree before KV may be shared, read from vLLM's configuration.

Owns: the texts of ModelIdentity, LoRA fingerprints and the start of the hash chain. Refuses to know:
how the server hashes them into a namespace.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from kvserver.protocol import ModelIdentity

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
_ROPE_KEYS = ("rope_scaling", "rope_theta", "rope_parameters", "partial_rotary_factor", "max_position_embeddings")


def folder_fingerprint(folder: Path, config_name: str) -> str:
    """The configuration's content, and names, sizes and mtimes of the weight files."""
    digest = hashlib.sha256()
    config = folder / config_name
    if config.is_file():
        digest.update(config.read_bytes())
    for path in sorted(folder.iterdir()):
        if path.name.endswith(_WEIGHT_SUFFIXES):
            stat = path.stat()
            digest.update(f"\n{path.name} {stat.st_size} {stat.st_mtime_ns}".encode())
    return digest.hexdigest()


def served_name(model: Any) -> str:
    """What users call the model of this ModelConfig."""
    served = model.served_model_name
    return str(served[0] if isinstance(served, list) else served or model.model)


def model_fingerprint(model: str, hf_config: Any, incarnation: str) -> str:
    """A local folder's fingerprint, a hub model's resolved commit, or else a text that nobody shares."""
    path = Path(model)
    if path.is_dir():
        return "path:" + folder_fingerprint(path, "config.json")
    if path.is_file():
        stat = path.stat()
        return f"file:{path.name} {stat.st_size} {stat.st_mtime_ns}"
    commit = getattr(hf_config, "_commit_hash", None)
    return f"commit:{model}@{commit}" if commit else f"unknown:{incarnation}"


def model_identity(vllm_config: Any, incarnation: str) -> ModelIdentity:
    """From VllmConfig. Anything that cannot be reproduced makes the identity private to this life of the engine."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    rope = {key: getattr(model.hf_text_config, key, None) for key in _ROPE_KEYS}
    overrides = model.hf_overrides
    private = ""
    if callable(overrides) or getattr(cache, "calculate_kv_scales", False) or _random_weights(vllm_config):
        private = incarnation
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = ""
    if speculative is not None:
        draft_model = getattr(speculative, "draft_model_config", None)
        draft = f"{getattr(speculative, 'method', '')}:" + (
            model_fingerprint(draft_model.model, draft_model.hf_config, incarnation) if draft_model is not None else ""
        )
    return ModelIdentity(
        model=model_fingerprint(model.model, model.hf_config, incarnation),
        overrides=_text({"hf": {} if callable(overrides) else overrides, "rope": rope, "draft": draft}),
        dtype=str(model.dtype),
        kv_dtype=str(cache.cache_dtype),
        quantization=str(model.quantization),
        parallel=f"tp={parallel.tensor_parallel_size} pp={parallel.pipeline_parallel_size}",
        hash_algorithm=str(cache.prefix_caching_hash_algo),
        private=private,
    )


def _random_weights(vllm_config: Any) -> bool:
    load = getattr(vllm_config, "load_config", None)
    return str(getattr(load, "load_format", "")).endswith("dummy")


def _text(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=repr)
    return text if len(text) < 4000 else hashlib.sha256(text.encode()).hexdigest()


def chain_start(incarnation: str) -> str:
    """What the engine's chain of block hashes starts from. Engines with different ones share nothing.

    REQUIRES: called in the scheduler's process after the engine core was built, where vLLM sets it.
    """
    from vllm.v1.core import kv_cache_utils  # the value is a module global that is set late

    start = getattr(kv_cache_utils, "NONE_HASH", None)
    return start.hex() if isinstance(start, bytes) else f"unknown-{incarnation}"


def lora_fingerprint(lora: Any) -> str:
    """Name and content of a LoRA: block hashes cover its name only, and files behind a name may differ."""
    digest = hashlib.sha256(f"{lora.lora_name}\n".encode())
    folder = Path(lora.lora_path)
    if folder.is_dir():
        digest.update(folder_fingerprint(folder, "adapter_config.json").encode())
    else:
        digest.update(os.fsencode(lora.lora_path))
    return digest.hexdigest()[:32]
