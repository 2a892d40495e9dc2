"""Which dimension of a layer counts blocks, as vLLM before 0.29 states it: by its backends' shapes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from kvserver.adapters.vllm.backends import attention_backends, block_dimensions

SPEC = SimpleNamespace(block_size=16, num_kv_heads=2, head_size=8)
OLD, NEW = (0, 24), (0, 29)


def backend(shape: Any, name: str = "FLASH_ATTN") -> Any:
    """`shape` makes one of (blocks, block size, heads, head size)."""
    return SimpleNamespace(get_name=lambda: name, get_kv_cache_shape=shape)


def config(**backends: Any) -> Any:
    layers = {name: SimpleNamespace(get_attn_backend=lambda b=b: b) for name, b in backends.items()}
    return SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))


def caches(*layers: str) -> Any:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=SPEC, layer_names=list(layers))])


@pytest.mark.parametrize(
    ("shape", "dims", "expected"),
    [
        (lambda b, n, h, c: (2, b, n, h, c), 5, 1),
        (lambda b, n, h, c: (b, 2, n, h, c), 5, 0),
        (lambda b, n, h, c: (b, h, n, 2 * c), 4, 0),
        (lambda b, n, h, c: (b, n, c), 3, 0),
        (lambda b, n, h, c: (2, b, n, h, c), 4, None),  # the tensor is another one than the backend's
        (lambda b, n, h, c: (b * n, h, c), 3, None),
        (lambda b, n: (b, n), 2, None),  # asked otherwise
    ],
)
def test_a_backend_is_queried_for_a_shape_that_cannot_be_mistaken(shape, dims, expected):
    assert block_dimensions(config(a=backend(shape)), caches("a"), {"a": dims}, OLD) == {"a": expected}


def test_a_layer_that_cannot_be_asked_is_left_to_its_shape():
    assert block_dimensions(config(), caches("a"), {"a": 4, "b": 4}, OLD) == {"a": None, "b": None}


def test_since_vllm_0_29_blocks_come_first():
    other = backend(lambda b, n, h, c: (2, b, n, h, c))
    assert block_dimensions(config(a=other), caches("a"), {"a": 5}, NEW) == {"a": 0}


def test_backends_are_named_once_in_layer_order():
    found = config(a=backend(None, "B"), b=backend(None, "A"), c=backend(None, "B"))
    assert attention_backends(found, ["a", "b", "c"]) == "B,A"
