"""Fields that must agree before KV may be shared, read from vLLM's effective configuration.

Every field counts unless `harmless` lists it. So do vLLM's version, the device, vLLM's environment, code that is not vLLM's own
(`foreign_code`) and the content of the weights. A value makes the engine private if its content cannot be read, or if it has no
form that another process would give it too.

Owns: what counts beside the fields, the reasons to be private, LoRA fingerprints and the start of the hash chain. Refuses to
know: how the server hashes all this into a namespace.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm import envs
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name

from kvserver.adapters.common.canonical import digest, hf_content, is_hf_config
from kvserver.adapters.common.identity import LEARN_NAME, EngineIdentity, files_of
from kvserver.adapters.common.weights import NoWeights, folder_digest
from kvserver.adapters.vllm import foreign_code
from kvserver.adapters.vllm.canonical import FORMS, counted_fields
from kvserver.adapters.vllm.context_length import counted_length, is_model
from kvserver.adapters.vllm.harmless import HARMLESS_VARIABLES, OTHER_VARIABLES
from kvserver.adapters.vllm.support import hash_block_tokens, vllm_version
from kvserver.protocol import Durability

# Fields whose values may be sent to the daemon, to name what differs: never an address, a path or a secret.
SHOWN = frozenset({
    "vllm", "torch", "transformers", "device", "model_config.dtype", "model_config.quantization",
    "model_config.max_model_len", "model_config.model_impl", "cache_config.cache_dtype",
    "cache_config.prefix_caching_hash_algo", "cache_config.mamba_cache_mode", "kv_cache.hash_block_tokens",
    "kv_cache.groups", "parallel_config.tensor_parallel_size", "parallel_config.pipeline_parallel_size",
    "load_config.load_format", "attention_config.backend", "speculative_config.method",
    "speculative_config.num_speculative_tokens",
})  # fmt: skip
_LEAVES_OTHERS_WITHOUT_LORA = (0, 33)  # vLLM on CPUs

# Formats that take the weights from the files of the model's folder.
_FROM_FILES = frozenset({
    "auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "pt", "npcache", "mistral", "bitsandbytes", "gguf",
    "sharded_state", "runai_streamer", "runai_streamer_sharded",
})  # fmt: skip


class Identity(EngineIdentity):
    forms = FORMS
    shown = SHOWN


def config_identity(vllm_config: Any, kv_cache_config: Any) -> Identity:
    """The identity without the weights, as it is now. Reads no model file."""
    found = Identity()
    for name, value in (*_config(vllm_config, ""), *_facts(vllm_config, kv_cache_config), *_environment()):
        found.add(name, value)
    _add_code(found, vllm_config, kv_cache_config)
    cache, multimodal = vllm_config.cache_config, vllm_config.model_config.multimodal_config
    if multimodal is not None and not multimodal.mm_processor_cache_gb and not cache.enable_prefix_caching:
        found.refuse(
            "multimodal items are named by a counter of the process (no prefix caching, mm_processor_cache_gb 0)"
        )
    if getattr(cache, "calculate_kv_scales", False):  # before 0.28
        found.refuse("calculate_kv_scales: KV scales are made from the first request")
    on_cpu = vllm_config.device_config.device_type == "cpu"
    if on_cpu and vllm_config.lora_config is not None and vllm_version() < _LEAVES_OTHERS_WITHOUT_LORA:
        found.refuse("LoRA on CPUs before vLLM 0.33, where requests without a LoRA have that of others in their step")
    return found


def with_weights(found: Identity, vllm_config: Any, model_version: str = "", whole_digests: bool = False) -> Identity:
    """The identity with the weights. Reads samples of their files, which may take seconds, or all of them."""
    whole = dataclasses.replace(found, counted=dict(found.counted))
    for name, model, load in _models(vllm_config):
        try:
            weights = weights_of(model, load, model_version, whole_digests)
            whole.counted[name] = digest([model_version, weights])
            if not (model_version or whole_digests or weights.startswith("commit:")):
                whole.machine_only = f"{name}: samples of the files name them; {LEARN_NAME}"
        except (NoWeights, OSError) as reason:
            unreadable = f"the model's files cannot be read, {type(reason).__name__}"
            why = reason if isinstance(reason, NoWeights) else unreadable
            whole.refuse(f"{name}: {why}; kvserver.model_version may name them")
    return whole


def weights_of(model: Any, load: Any, model_version: str = "", whole_digests: bool = False) -> str:
    """A text that is the same for the same weights of a ModelConfig, or, where there are no files, "" if they have a name.

    NoWeights or OSError if there is neither.
    """
    load_format = str(load.load_format)
    try:
        if load_format not in _FROM_FILES:
            raise NoWeights(f"load_format {load_format} does not take them from the model's files")
        if model.model_weights:
            raise NoWeights("they are not in the model's folder")
        commit = None if model.hf_config_path else getattr(model.hf_config, "_commit_hash", None)
        return files_of(str(model.model), commit, whole_digests)
    except NoWeights:
        if model_version:
            return ""
        raise


# ---- what counts ------------------------------------------------------------------------------


def _config(config: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """(path, value) of every field that counts, down to values that are no configuration themselves."""
    if is_model(config):
        yield f"{prefix}max_model_len", counted_length(config)
    for name, value in counted_fields(config):
        path = prefix + name
        if is_hf_config(value):
            for key, part in hf_content(value).items():
                yield f"{path}.{key}", part
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from _config(value, path + ".")
        else:
            yield path, value


def _facts(vllm_config: Any, kv_cache_config: Any) -> Iterator[tuple[str, Any]]:
    yield "vllm", vllm.__version__
    yield "torch", torch.__version__
    yield "transformers", version("transformers")
    yield "device", _device(str(vllm_config.device_config.device_type))
    groups = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    yield "kv_cache.groups", [f"{type(spec).__name__} of {spec.block_size}" for spec in groups]
    yield "kv_cache.hash_block_tokens", hash_block_tokens(vllm_config, kv_cache_config)


def _environment() -> Iterator[tuple[str, Any]]:
    """The values that vLLM reads from its variables, and variables of other libraries."""
    for name, read in envs.environment_variables.items():
        if name not in HARMLESS_VARIABLES:
            try:
                yield f"environment.{name}", read()
            except Exception as error:  # a value that vLLM itself would refuse, or a library that is not there
                yield f"environment.{name}", type(error)
    for name in OTHER_VARIABLES:
        yield f"environment.{name}", os.environ.get(name)


def _add_code(found: Identity, vllm_config: Any, kv_cache_config: Any) -> None:
    """Code that is not vLLM's own: vLLM's version does not state it."""
    for entry in foreign_code.plugins():
        found.add(f"plugin {entry.name}", foreign_code.plugin_version(entry))
    named = [
        *((name, foreign_code.code_of) for name in foreign_code.foreign_packages(vllm_config, kv_cache_config)),
        *((name, foreign_code.remote_code_of) for name in foreign_code.remote_repositories(vllm_config)),
    ]
    for name, read in sorted(named, key=lambda item: item[0]):
        try:
            found.add(f"code of {name}", read(name))
        except (foreign_code.NoCode, OSError) as reason:
            found.refuse(
                f"code of {name}: {reason if isinstance(reason, foreign_code.NoCode) else type(reason).__name__}"
            )


def _models(vllm_config: Any) -> Iterator[tuple[str, Any, Any]]:
    """(name, ModelConfig, LoadConfig) of the model and of a draft model of its own."""
    model, load = vllm_config.model_config, vllm_config.load_config
    yield "weights", model, load
    speculative = vllm_config.speculative_config
    draft = speculative.draft_model_config if speculative is not None else None
    if draft is not None and draft is not model:
        yield "draft weights", draft, speculative.draft_load_config or load


def _device(device_type: str) -> list[str]:
    """The device type and the properties by which vLLM chooses kernels."""
    if device_type != "cpu":
        capability = current_platform.get_device_capability()
        return [device_type, str(capability) if capability is not None else str(current_platform.get_device_name())]
    architecture = str(getattr(current_platform.get_cpu_architecture(), "name", ""))
    found = [device_type, architecture, torch.backends.cpu.get_cpu_capability()]
    for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        supported = getattr(torch.cpu, name, None)
        found.append(str(bool(supported is not None and supported())))
    return found


# ---- keys and LoRAs ---------------------------------------------------------------------------


def chain_start(incarnation: str) -> str:
    """Start of the engine's chain of block hashes. Engines with different starts share nothing.

    REQUIRES: called in the scheduler's process after the engine core was built, where vLLM sets it.
    """
    from vllm.v1.core import kv_cache_utils  # the value is a module global that is set late

    start = getattr(kv_cache_utils, "NONE_HASH", None)
    return start.hex() if isinstance(start, bytes) else f"unknown-{incarnation}"


def chain_durability(algorithm: str) -> Durability:
    """Durability of the engine's keys: whether another start of the engine has the same chain of block hashes.

    Up to vLLM 0.28 the chain starts from a random value unless PYTHONHASHSEED is set. With xxhash, a client that knows the start
    can make prompts that collide. Such keys end with the process, also where PYTHONHASHSEED is set. REQUIRES: as chain_start().
    """
    if not algorithm.startswith("sha256"):
        return Durability.PROCESS
    from vllm.v1.core import kv_cache_utils

    seeds = os.environ.get("PYTHONHASHSEED"), getattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED", None)
    start, hash_of = getattr(kv_cache_utils, "NONE_HASH", None), get_hash_fn_by_name(algorithm)
    return Durability.ANYWHERE if start in [hash_of(seed) for seed in seeds if seed is not None] else Durability.PROCESS


def lora_fingerprint(lora: Any, whole: bool = False) -> str | None:
    """Name and content of a LoRA: block hashes cover its name only, and files behind a name may differ.

    None where its weights are not files in a folder: vLLM downloads whatever the hub has then, or (up to 0.30) reads tensorizer's.
    """
    folder = Path(lora.lora_path).expanduser()
    if not folder.is_dir() or getattr(lora, "tensorizer_config_dict", None):
        return None
    return digest([lora.lora_name, bool(lora.is_3d_lora_weight), folder_digest(folder, deep=False, whole=whole)])
