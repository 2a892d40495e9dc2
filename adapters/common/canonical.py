"""Values of an engine's configuration as texts that are equal where the values are, in any process.

Owns: the canonical form. Never a `repr`, which may hold an address: what has no such form is Refused.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import PurePath
from typing import Any

import torch

# Of a Hugging Face configuration: where it came from and who wrote it.
HARMLESS_OF_HF_CONFIG = frozenset({"_name_or_path", "transformers_version", "_commit_hash"})
_DEEPEST = 40


class Refused(Exception):
    """This value has no form that another process would give it too."""


def digest(value: Any) -> str:
    """Digest of a canonical form, or of any value that JSON can write."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


@dataclasses.dataclass(frozen=True)
class Forms:
    """The forms of values of one engine: `counted_fields` are those of its configuration objects that count, by name; its own functions,
    of `package`, are known by name, since its version counts.
    """

    package: str
    counted_fields: Callable[[Any], Iterator[tuple[str, Any]]]

    def of(self, value: Any, depth: int = 0) -> Any:
        """A form that JSON can write, equal for equal values. Refused names the type that has no such form."""
        if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, enum.Enum)):
            return value
        if depth > _DEEPEST:
            raise Refused("nested too deeply")

        def inner(part: Any) -> Any:
            return self.of(part, depth + 1)

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
            return [_name(type(value)), {name: inner(part) for name, part in self.counted_fields(value)}]
        if callable(getattr(value, "model_dump", None)):  # of pydantic
            return [_name(type(value)), inner(value.model_dump())]
        if callable(value) and self._is_own(value):  # its version counts, and with it what this does
            return _name(value)
        raise Refused(f"a {_name(type(value))}")

    def _is_own(self, function: Any) -> bool:
        name, module = getattr(function, "__qualname__", "<locals>"), getattr(function, "__module__", None) or ""
        return "<locals>" not in name and "<lambda>" not in name and module.split(".")[0] == self.package


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


def _name(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
