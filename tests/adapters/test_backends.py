"""The names of the backends that the layers have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvserver.adapters.vllm.backends import attention_backends


def backend(name: str) -> Any:
    return SimpleNamespace(get_name=lambda: name)


def config(**backends: Any) -> Any:
    layers = {name: SimpleNamespace(get_attn_backend=lambda b=b: b) for name, b in backends.items()}
    return SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))


def test_backends_are_named_once_in_layer_order():
    found = config(a=backend("B"), b=backend("A"), c=backend("B"))
    assert attention_backends(found, ["a", "b", "c"]) == "B,A"
