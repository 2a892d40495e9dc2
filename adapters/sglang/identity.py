"""Facts that must agree before KV may be shared, read from SGLang's resolved arguments.

Every argument counts unless `harmless` lists it; so do SGLang's version, the device, variables of SGLang's, the model's configuration
and the content of its files. What has no form that another process would give it too makes the engine private.

Owns: what counts beside the arguments, and the reasons to be private. Refuses to know: how the server hashes all this.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

import sglang
import torch
from sglang.srt.arg_groups.arg_utils import namespace_of
from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.server_args import ServerArgs

from kvserver.adapters.common.canonical import HARMLESS_OF_HF_CONFIG, Forms, digest
from kvserver.adapters.common.identity import LEARN_NAME, EngineIdentity, files_of
from kvserver.adapters.common.weights import NoWeights
from kvserver.adapters.sglang.harmless import HARMLESS, HARMLESS_VARIABLES
from kvserver.adapters.sglang.settings import SGLangSettings

# Formats that take the weights from the files of the model's folder.
_FROM_FILES = frozenset(
    {"auto", "safetensors", "fastsafetensors", "pt", "npcache", "sharded_state", "gguf", "bitsandbytes", "mistral"}
)
# Arguments and variables that name content which is not compared.
_NAMES_CONTENT = ("quantization_param_path", "custom_weight_loader", "forward_hooks", "decrypted_config_file")
_CONFIG, _LORA_CONFIG = "config.json", "adapter_config.json"
_NAMES_CODE = "SGLANG_EXTERNAL_MODEL_PACKAGE"
_PLUGINS = ("sglang.srt.plugins", "sglang.srt.platforms")  # groups of entry points, whose code may replace SGLang's
_PREFIXES = ("SGLANG_", "SGL_", "FLASHINFER_", "TRITON_", "NVIDIA_TF32", "TORCH_ALLOW_TF32", "ONEDNN_")


def _fields(config: Any) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(config):
        yield field.name, getattr(config, field.name)


class SGLangIdentity(EngineIdentity):
    forms = Forms("sglang", _fields)
    shown = frozenset({
        "sglang", "torch", "transformers", "device", "dtype", "kv_cache_dtype", "quantization", "page_size", "tp_size", "load_format",
        "attention_backend", "prefill_attention_backend", "decode_attention_backend",
    })  # fmt: skip


def arguments_identity(server_args: Any, device: torch.device) -> SGLangIdentity:
    """The identity without the weights. Reads no model file."""
    found = SGLangIdentity()
    resolved = resolved_view(server_args)
    for name in namespace_of(ServerArgs):
        if name not in HARMLESS and name != "lora_paths":
            found.add(name, getattr(resolved, name, None))
    found.add("lora_paths", [[lora.lora_id, lora.lora_name, lora.lora_path] for lora in resolved.lora_paths or []])
    for name in _NAMES_CONTENT:
        if getattr(resolved, name, None):
            found.refuse(f"--{name.replace('_', '-')}: its content is not compared")
    if os.environ.get(_NAMES_CODE):
        found.refuse(f"{_NAMES_CODE}: its code is not compared")
    for group in _PLUGINS:
        for plugin in entry_points(group=group):
            found.refuse(f"the plugin {plugin.name} of SGLang: its code is not compared")
    found.add("sglang", sglang.__version__)
    found.add("torch", torch.__version__)
    found.add("transformers", version("transformers"))
    found.add("device", _device(device))
    for name in sorted(os.environ):
        if name.startswith(_PREFIXES) and name not in HARMLESS_VARIABLES:
            found.add(f"environment.{name}", os.environ[name])
    return found


def with_model(found: SGLangIdentity, server_args: Any, settings: SGLangSettings) -> SGLangIdentity:
    """The identity with the model's configuration and weights. Reads samples of their files, or all of them."""
    whole = dataclasses.replace(found, counted=dict(found.counted))
    resolved = resolved_view(server_args)
    named, all_bytes = settings.model_version, settings.weights_digest == "whole"
    weights = ""
    try:
        folder, commit = _folder(str(resolved.model_path), resolved.revision)
        _add_config(whole, _CONFIG, folder, resolved)
        if str(resolved.load_format) not in _FROM_FILES:
            raise NoWeights(f"load_format {resolved.load_format} does not take them from the model's files")
        weights = _files(str(resolved.model_path), commit, resolved, all_bytes)
    except (NoWeights, OSError, ValueError) as reason:
        if not named:
            whole.refuse(f"weights: {reason}; kvserver.model_version may name them")
    whole.counted["weights"] = digest([named, weights])
    if not (named or all_bytes or weights.startswith("commit:")):
        whole.machine_only = f"weights: samples of the files name them; {LEARN_NAME}"
    _add_others(whole, resolved, all_bytes)
    return whole


def _add_others(whole: SGLangIdentity, resolved: Any, all_bytes: bool) -> None:
    """The content of a draft, and of LoRAs that SGLang loads as it starts: the keys have their names and paths.

    A LoRA that is loaded later has a name in the keys that is drawn anew each time.
    """
    others = {f"LoRA {lora.lora_name}": (str(lora.lora_path), None, _LORA_CONFIG) for lora in resolved.lora_paths or []}
    if draft := resolved.speculative_draft_model_path:
        others["draft"] = str(draft), resolved.speculative_draft_model_revision, _CONFIG
    for name, (path, revision, config) in others.items():
        try:
            folder, commit = _folder(path, revision, config)
            if config == _CONFIG:  # that of a LoRA is among its files
                _add_config(whole, f"{name} {_CONFIG}", folder, resolved)
            whole.counted[name] = digest(_files(path, commit, resolved, all_bytes))
            if not (all_bytes or commit):  # kvserver.model_version names the model's weights only
                why = f"{name}: samples of the files name it; kvserver.weights_digest=whole would name it for other machines"
                whole.machine_only = whole.machine_only or why
        except (NoWeights, OSError, ValueError) as reason:
            whole.refuse(f"{name}: {reason}")


def _add_config(whole: SGLangIdentity, name: str, folder: Path, resolved: Any) -> None:
    whole.add(name, config := _config(folder))
    if resolved.trust_remote_code and "auto_map" in config:
        whole.refuse(f"--trust-remote-code: the code that {name} names is not compared")


def _files(path: str, commit: str | None, resolved: Any, all_bytes: bool) -> str:
    if commit and resolved.download_dir:
        raise NoWeights("--download-dir: its snapshot may be another one")
    return files_of(path, commit, all_bytes)


def _folder(model: str, revision: str | None, config: str = _CONFIG) -> tuple[Path, str | None]:
    """The folder of the model's files, and the commit where it is a snapshot of a repository, which has the file `config`."""
    if Path(model).is_dir():
        return Path(model), None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, config, revision=revision)
    if not isinstance(found, str):
        raise NoWeights("the model is neither a folder nor in the cache of Hugging Face")
    return Path(found).parent, Path(found).parent.name


def _config(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / _CONFIG).read_text())
    return {name: value for name, value in config.items() if name not in HARMLESS_OF_HF_CONFIG}


def model_config(resolved: Any) -> dict[str, Any]:
    """The content of the model's config.json; empty where it cannot be read."""
    try:
        return _config(_folder(str(resolved.model_path), resolved.revision)[0])
    except (NoWeights, OSError, ValueError):
        return {}


def _device(device: torch.device) -> list[str]:
    """The device type and the properties by which kernels are chosen."""
    if device.type == "cpu":
        amx = getattr(torch.cpu, "_is_amx_tile_supported", None)
        return ["cpu", torch.backends.cpu.get_cpu_capability(), str(bool(amx is not None and amx()))]
    return [device.type, str(torch.cuda.get_device_capability(device)), torch.cuda.get_device_name(device)]
