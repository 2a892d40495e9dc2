"""Values of vLLM's configuration as texts: equal values have equal texts, in any process.

Owns: the canonical form. It is never a `repr`, which may contain an address; a value without such a form is Refused.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Set
from functools import cached_property
from pathlib import PurePath
from typing import Any

import torch

from kvserver.adapters.vllm.harmless import HARMLESS_OF_HF_CONFIG, is_harmless

_DEEPEST = 40


class Refused(Exception):
    """Value without a form that another process would give it too."""


def digest(value: Any) -> str:
    """Digest of a canonical form, or of any value that JSON can write."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


def canonical(value: Any, depth: int = 0) -> Any:
    """A form that JSON can write, equal for equal values. Refused names the type that has no such form."""
    if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, enum.Enum)):
        return value
    if depth > _DEEPEST:
        raise Refused("nested too deeply")

    def inner(part: Any) -> Any:
        return canonical(part, depth + 1)

    match value:
        case enum.Enum():
            return [_name(type(value)), value.name]
        case type():
            return _name(value)
        case bytes() | bytearray():
            return ["bytes", value.hex()]
        case torch.dtype() | torch.device() | PurePath():
            return str(value)
        case functools.partial():
            return ["partial", inner(value.func), inner(value.args), inner(value.keywords)]
        case Mapping():
            return ["map", sorted(([inner(k), inner(v)] for k, v in value.items()), key=_text)]
        case Set():
            return ["set", sorted(map(inner, value), key=_text)]
        case list() | tuple():
            return [inner(part) for part in value]
    if is_hf_config(value):
        return [_name(type(value)), inner(hf_content(value))]
    if dataclasses.is_dataclass(value):
        return [_name(type(value)), {name: inner(part) for name, part in counted_fields(value)}]
    if callable(getattr(value, "model_dump", None)):  # of pydantic
        return [_name(type(value)), inner(value.model_dump())]
    if callable(value) and _is_vllms(value):  # its version counts, and with it what this does
        return _name(value)
    raise Refused(f"a {_name(type(value))}")


def is_hf_config(value: Any) -> bool:
    return callable(getattr(value, "to_dict", None)) and hasattr(value, "model_type")


def hf_content(config: Any) -> dict[str, Any]:
    """A Hugging Face configuration without its place of origin, at any depth."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: clean(v) for k, v in value.items() if k not in HARMLESS_OF_HF_CONFIG}
        return [clean(part) for part in value] if isinstance(value, list | tuple) else value

    cleaned: dict[str, Any] = clean(config.to_dict())
    return cleaned


def counted_fields(config: Any) -> Iterator[tuple[str, Any]]:
    """(name, value) of all fields of a configuration object that are not harmless, declared or not.

    What a cached_property left in the object is made from the rest, and not in all of an engine's processes.
    """
    declared = {field.name for field in dataclasses.fields(config)}
    for name in sorted(declared | set(getattr(config, "__dict__", ()))):
        kept = isinstance(getattr(type(config), name, None), cached_property)
        if not is_harmless(config, name) and not kept and not name.startswith("__pydantic"):
            yield name, getattr(config, name, None)


def _name(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"


def _is_vllms(function: Any) -> bool:
    name, module = getattr(function, "__qualname__", "<locals>"), getattr(function, "__module__", None) or ""
    return "<locals>" not in name and "<lambda>" not in name and module.split(".")[0] == "vllm"


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
