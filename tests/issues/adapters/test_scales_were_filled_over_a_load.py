"""vLLM's Triton backend fills the scales of a `*_per_token_head` KV cache, which lie inside its blocks, as a layer first writes.
In eager mode that is behind the first load, so that a restarted engine computed on loaded KV with all scales 1.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from made_up_model import LAYERS, prompt
from modelless import Engine
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

from kvserver.adapters.vllm import KVServerConnector

CHUNK = 64
TOKENS = prompt(1, 4 * CHUNK + 10)


class Layer:
    """A layer as the runner knows it, around vLLM's own code for scales; its KV cache is bound before it is registered."""

    def __init__(self, kv_cache_dtype: str) -> None:
        self.impl = TritonAttentionImpl.__new__(TritonAttentionImpl)
        self.impl.kv_cache_dtype = kv_cache_dtype
        self.impl._k_scale_cache = self.impl._v_scale_cache = None
        self.kv_cache = torch.tensor([])

    def get_attn_backend(self) -> SimpleNamespace:
        return SimpleNamespace(get_name=lambda: "TRITON_ATTN")

    def first_write(self) -> None:
        """What do_kv_cache_update() begins with."""
        self.impl._ensure_scale_caches(self.kv_cache)


@pytest.fixture
def make_quantised(make_engine, make_daemon, monkeypatch):
    """Engines of one daemon whose layers begin their scales when something is first computed."""
    daemon = make_daemon(chunk_tokens=CHUNK)

    def make(kv_cache_dtype: str, writes: bool = True) -> Engine:
        layers = {f"layers.{i}": Layer(kv_cache_dtype) for i in range(LAYERS)}

        def bind(config, caches) -> None:
            config.compilation_config.static_forward_context.update(layers)

        def binding(register):
            def register_kv_caches(self, kv_caches):
                for name, cache in kv_caches.items():
                    layers[name].kv_cache = cache.view(torch.int8)
                register(self, kv_caches)

            return register_kv_caches

        with monkeypatch.context() as patch:
            patch.setattr(KVServerConnector, "register_kv_caches", binding(KVServerConnector.register_kv_caches))
            engine = make_engine(daemon, adjust=bind)
        forward = engine.batch.forward

        def first_writes_then_forward(output, weights):
            if output.total_num_scheduled_tokens and writes:
                for layer in layers.values():
                    layer.first_write()
            return forward(output, weights)

        engine.batch.forward = first_writes_then_forward
        return engine

    return make


@pytest.mark.parametrize("kv_cache_dtype", ["int8_per_token_head", "fp8_per_token_head"])
def test_what_was_loaded_before_anything_was_computed_stays(make_quantised, kv_cache_dtype):
    make_quantised(kv_cache_dtype).generate("cold", TOKENS)
    answer = make_quantised(kv_cache_dtype).generate("warm", TOKENS)
    assert answer.external == 4 * CHUNK


def test_a_kv_cache_without_such_scales_is_left_alone(make_quantised):
    engine = make_quantised("auto", writes=False)
    engine.generate("cold", TOKENS)
    layers = engine.config.compilation_config.static_forward_context
    assert all(layers[f"layers.{i}"].impl._k_scale_cache is None for i in range(LAYERS))
