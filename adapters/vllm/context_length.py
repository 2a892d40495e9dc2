"""`max_model_len` where a model computes with it: LongRoPE chooses its factors by it, Llama 4 the temperature of its attention.

The rule: all sources that may compute with it are read. A source that cannot be read is assumed to compute with it. A model that
only sizes its buffers by it counts too; the price is that engines of different lengths do not share its KV.

Owns: whether a model's sources name it. Refuses to know: what else counts.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm.model_executor.models import ModelRegistry

from kvserver.adapters.vllm.foreign_code import architectures_of, registered_module

ROTARY = "vllm.model_executor.layers.rotary_embedding"
_LONGROPE = "phi3_long_rope_scaled_rope.py"  # which a model's configuration chooses by name
_FITTED = "as the model configuration has it"
_WORD = "max_model_len"
_IMPORTS = re.compile(r"^\s*from\s+(\.?[\w.]+)\s+import", re.MULTILINE)


def is_model(config: Any) -> bool:
    return hasattr(config, "max_model_len") and hasattr(config, "hf_config")


def counted_length(model: Any) -> int | str | None:
    """Length when the model was built; None where the model does not read it.

    If vLLM fits it to the memory (-1), the fit comes later: the model was built with the value of its configuration.
    """
    if not _reads_it(model):
        return None
    fitted = model.original_max_model_len == -1
    return _FITTED if fitted else int(model.max_model_len)


def _reads_it(model: Any) -> bool:
    for config in (model.hf_config, getattr(model, "hf_text_config", None)):
        rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
        if "longrope" in str(rope) or "llama4" in str(getattr(config, "model_type", "")):
            return True
    modules = [registered_module(each) for each in architectures_of(model)] or [None]
    return _rotary_names_it(ROTARY) or any(names_it(module) for module in modules)


@functools.cache
def names_it(module: str | None) -> bool:
    """True if a file of the model's module or package, or of a model that it imports from, contains the word."""
    known = {registered_module(each) for each in ModelRegistry.models}
    todo, seen = [module], set()
    while todo:
        if (here := todo.pop()) in seen:
            continue
        seen.add(here)
        files = list(_files(here)) if here is not None and here.startswith("vllm.") else []
        if not files:
            return True
        for file in files:
            source = file.read_text(errors="replace")
            if _WORD in source:
                return True
            todo += [each for each in _imported(str(here), source) if each in known]
    return False


@functools.cache
def _rotary_names_it(package: str) -> bool:
    files = [file for file in _files(package) if file.name != _LONGROPE]
    return not files or any(_WORD in file.read_text(errors="replace") for file in files)


def _imported(module: str, source: str) -> Iterator[str]:
    """The modules and packages that it may import from, of those beside it."""
    for name in _IMPORTS.findall(source):
        parts = (module.rpartition(".")[0] + name if name.startswith(".") else name).split(".")
        yield from (".".join(parts[:count]) for count in range(2, len(parts) + 1))


def _files(module: str) -> Iterator[Path]:
    """All files of a package, or the module's one."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return
    if spec is None or not spec.origin:
        return
    origin = Path(spec.origin)
    yield from origin.parent.rglob("*.py") if spec.submodule_search_locations is not None else [origin]
