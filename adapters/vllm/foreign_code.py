"""Code that is not vLLM's own and may compute KV, by its content: plugins, programs and repositories registered with vLLM.

The rule: every place from which vLLM can get code to compute with is searched here; otherwise two versions of that code would
share KV. The whole package of the code counts, also the parts of it that the code imports. Libraries beside the package do not
count.

Owns: the places where vLLM keeps such code, and the files of a module. Refuses to know: fields of the configuration, and what is
done with code that cannot be read.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points, packages_distributions, version
from pathlib import Path
from typing import Any

from vllm import envs, platforms
from vllm.model_executor.models import ModelRegistry

from kvserver.adapters.common.weights import NoWeights, code_digest
from kvserver.adapters.vllm.support import layer_specs

_PLUGINS = "vllm.general_plugins"
_OWN = {"vllm", "kvserver", "torch", "transformers"}  # their versions count, or change no KV
_REMOTE = "transformers_modules"
# Of a model's `auto_map`: what makes no KV, or counts by its content.
_NOT_COMPUTED_WITH = ("AutoTokenizer", "AutoConfig")


class NoCode(Exception):
    """Code that has neither readable sources nor a version."""


def plugins() -> Iterator[EntryPoint]:
    """The general plugins that vLLM loads in each of its processes, but for its own and kvserver's."""
    allowed = envs.VLLM_PLUGINS
    for entry in entry_points(group=_PLUGINS):
        if (allowed is None or entry.name in allowed) and _root(entry.module) not in _OWN:
            yield entry


def plugin_version(entry: EntryPoint) -> list[str]:
    return [entry.value, *([entry.dist.name, entry.dist.version] if entry.dist is not None else [])]


def foreign_packages(vllm_config: Any, kv_cache_config: Any) -> set[str]:
    """The packages, and modules that are in none, of which this engine may compute with something."""
    modules = {*(entry.module for entry in plugins()), *_given(vllm_config), *_registered(vllm_config)}
    modules |= {*_built(vllm_config, kv_cache_config)}
    return {root for root in map(_root, modules) if root} - _OWN - sys.stdlib_module_names


def code_of(package: str) -> str:
    """The digest of its files; of a package that has none, the versions of its distributions. NoCode, or an OSError."""
    try:
        return code_digest(_places(package))
    except NoWeights:
        versions = [f"{name} {version(name)}" for name in sorted(set(packages_distributions().get(package, ())))]
        versions += [
            " ".join(plugin_version(entry)) for entry in plugins() if _root(entry.module) == package and entry.dist
        ]
        if not versions:
            raise NoCode("neither its sources nor its version can be read") from None
        return str(versions)


# ---- what others gave vLLM --------------------------------------------------------------------


def _given(vllm_config: Any) -> Iterator[str]:
    """Modules of what is named in the configuration."""
    yield _module(platforms.current_platform)
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    for named in (parallel.worker_cls, parallel.worker_extension_cls, scheduler.scheduler_cls):
        if named:
            yield named.rpartition(".")[0] if isinstance(named, str) else _module(named)


def _built(vllm_config: Any, kv_cache_config: Any) -> Iterator[str]:
    """Modules of the layers that have KV, and of how it is kept."""
    yield from map(_module, layer_specs(kv_cache_config))
    layers = vllm_config.compilation_config.static_forward_context
    for layer in (layers.get(name) for group in kv_cache_config.kv_cache_groups for name in group.layer_names):
        backend = layer.get_attn_backend() if hasattr(layer, "get_attn_backend") else None
        yield from (_module(each) for each in (layer, backend, getattr(layer, "impl", None)) if each is not None)


def _registered(vllm_config: Any) -> Iterator[str]:
    """Modules of what was registered for the models, or for all."""
    for model in models_of(vllm_config):
        for architecture in architectures_of(model):
            if (module := registered_module(architecture)) is not None:
                yield module
        methods = _table("model_executor.layers.quantization", "_CUSTOMIZED_METHOD_TO_QUANT_CONFIG")
        if (method := methods.get(getattr(model, "quantization", None))) is not None:
            yield _module(method)
    loader = _table("model_executor.model_loader", "_LOAD_FORMAT_TO_MODEL_LOADER").get(
        vllm_config.load_config.load_format
    )
    if loader is not None:
        yield _module(loader)
    yield from map(_module, _table("config.cache", "_KV_CACHE_DTYPE_HANDLERS").values())  # 0.33 and later
    for place in ("custom_op", "hw_agnostic.custom_op"):
        yield from map(_module, _table(f"model_executor.{place}", "op_registry_oot").values())


def _table(module: str, name: str) -> dict[Any, Any]:
    """Registry of vLLM's; empty if its module is not loaded, since nothing is registered then, or if the version has none."""
    found: dict[Any, Any] = getattr(sys.modules.get(f"vllm.{module}"), name, {})
    return found


def models_of(vllm_config: Any) -> Iterator[Any]:
    """The ModelConfig, and that of a draft model of its own."""
    yield vllm_config.model_config
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    if draft is not None and draft is not vllm_config.model_config:
        yield draft


def architectures_of(model: Any) -> list[str]:
    return list(getattr(model.hf_config, "architectures", None) or [])


def registered_module(architecture: str) -> str | None:
    """The module of the class that vLLM has for a model; None if it has none."""
    registered: Any = ModelRegistry.models.get(architecture)
    if registered is None:
        return None
    module = getattr(registered, "module_name", None)
    return str(module if module is not None else registered.model_cls.__module__)


def remote_repositories(vllm_config: Any) -> set[str]:
    """Repositories other than a model's own of which its code is; code beside the weights counts with them."""
    return {repository for model in models_of(vllm_config) for repository in _elsewhere(model)}


def _elsewhere(model: Any) -> Iterator[str]:
    if not getattr(model, "trust_remote_code", False):
        return
    has_own = any(registered_module(each) is not None for each in architectures_of(model))
    uses_models = not has_own or str(getattr(model, "model_impl", "auto")) not in ("auto", "vllm")
    for key, value in (getattr(model.hf_config, "auto_map", None) or {}).items():
        used = uses_models if key.startswith("AutoModel") else getattr(model, "multimodal_config", None) is not None
        if used and key not in _NOT_COMPUTED_WITH:
            for name in value if isinstance(value, list | tuple) else [value]:
                repository, found, _ = str(name).partition("--")
                if found and (repository != model.model or getattr(model, "code_revision", None)):
                    yield repository


def remote_code_of(repository: str) -> str:
    """The digest of what transformers loaded of a repository in this process. NoCode, or an OSError."""
    beginning = ".".join([_REMOTE, *map(_as_transformers_names_it, repository.split("/"))]) + "."
    loaded = [getattr(each, "__file__", None) for name, each in sys.modules.items() if name.startswith(beginning)]
    try:
        return code_digest(Path(file) for file in loaded if file)
    except NoWeights:
        raise NoCode("a model's auto_map names it, and nothing of it is loaded here") from None


def _as_transformers_names_it(part: str) -> str:
    return re.sub(r"^(?=\d)", "_", part.replace(".", "_dot_").replace("-", "_hyphen_"))


# ---- modules ----------------------------------------------------------------------------------


def _module(thing: Any) -> str:
    return str((thing if isinstance(thing, type) else type(thing)).__module__)


def _root(module: str) -> str:
    """The module of remote code: it has a folder of its own."""
    return module if module.startswith(_REMOTE) else module.split(".")[0]


def _places(package: str) -> Iterator[Path]:
    """The folders of a package, or the file of a module."""
    loaded = sys.modules.get(package)
    if package in ("__main__", "__mp_main__") or package.startswith(_REMOTE):
        file = getattr(loaded, "__file__", None)
        yield from [Path(file)] if file else []
        return
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # it has no spec
        return
    if spec is not None:
        folders = spec.submodule_search_locations
        yield from map(Path, folders or ([spec.origin] if spec.origin and spec.has_location else []))
