"""Models whose prefix caching vLLM turns off because a token's KV is no function of the tokens before it were served all
the same: their requests have block hashes once a connector is configured.
"""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace

import pytest
import torch
from made_up_model import BLOCK, prompt
from vllm.config import ModelConfig, PoolerConfig
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    RSWASpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

CHUNK = 64
TOKENS = prompt(1, 3 * CHUNK + 10)
SHAPE = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 1, "dtype": torch.int64}


def group_of(caches, *specs):
    """One group; of several layers' specs as block-outermost layouts have it."""
    spec = specs[0]
    if len(specs) > 1:
        spec = UniformTypeKVCacheSpecs(
            block_size=BLOCK, kv_cache_specs={f"layers.{i}": each for i, each in enumerate(specs)}
        )
    caches.kv_cache_groups[:] = [KVCacheGroupSpec([f"layers.{i}" for i in range(2)], spec)]


def non_causal(config, caches):
    group_of(caches, FullAttentionSpec(**SHAPE, non_causal=True))


def one_non_causal_layer(config, caches):
    group_of(caches, FullAttentionSpec(**SHAPE), FullAttentionSpec(**SHAPE, non_causal=True))


def reference_window(config, caches):
    group_of(caches, RSWASpec(**SHAPE, rswa_window=40))


def reference_window_inside(config, caches):
    group_of(caches, FullAttentionSpec(**SHAPE), RSWASpec(**SHAPE, rswa_window=40))


def ring(config, caches):
    group_of(caches, FullAttentionSpec(**SHAPE), CircularBufferSpec(**SHAPE))


def replayed_window(config, caches):
    group_of(caches, SlidingWindowMLASpec(**SHAPE, sliding_window=40, bounded_replay=True))


def state_inside(config, caches):
    state = MambaSpec(block_size=BLOCK, shapes=((2, 2),), dtypes=(torch.float32,))
    group_of(caches, FullAttentionSpec(**SHAPE), state)


def of_hisparse(**facts):
    def adjust(config, caches):
        caches.kv_cache_groups[:] = [dataclasses.replace(group, **facts) for group in caches.kv_cache_groups]

    return adjust


def mean_pooling(config, caches):
    config.model_config = pooling(config, "MEAN")


def pooling(config, kind):
    return ModelConfig(
        model=config.model_config.model,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=2048,
        runner="pooling",
        convert="embed",
        pooler_config=PoolerConfig(seq_pooling_type=kind),
    )


@pytest.mark.parametrize(
    ("adjust", "reason"),
    [
        (non_causal, "non-causally"),
        (one_non_causal_layer, "non-causally"),
        (reference_window, "no prefix of R-SWA"),
        (reference_window_inside, "no prefix of R-SWA"),
        (ring, "vLLM caches no group"),
        (replayed_window, "vLLM caches no group"),
        (state_inside, "mamba_cache_mode 'none'"),
        (of_hisparse(host_resident=True), "HiSparse keeps it"),
        (of_hisparse(enable_kv_transfer=False), "HiSparse's copy"),
        (mean_pooling, "vLLM does not cache prefixes of this model"),
    ],
)
def test_models_whose_prefixes_must_not_be_cached_are_refused_by_both_halves(
    make_daemon, make_halves, caplog, adjust, reason
):
    caplog.set_level(logging.WARNING, "vllm.kvserver")
    daemon = make_daemon()
    scheduler, worker = make_halves(daemon, adjust)
    lines = [record.getMessage() for record in caplog.records if "runs without cache" in record.getMessage()]
    assert len(lines) == 2, "one a half"
    assert all(reason in each for each in lines)
    worker.register_kv_caches({"layers.0": torch.zeros(3)})
    assert scheduler.scheduler is None
    assert scheduler.errors == worker.errors == {}
    assert daemon.status()["instances"] == []


def wide_and_narrow(config, caches):
    group_of(caches, FullAttentionSpec(**SHAPE), FullAttentionSpec(**{**SHAPE, "dtype": torch.int32}))


def windows_of_two_widths(config, caches):
    window = SlidingWindowSpec(**SHAPE, sliding_window=40)
    group_of(caches, window, dataclasses.replace(window, head_size=2))


def last_token_pooling(config, caches):
    config.model_config = pooling(config, "LAST")


@pytest.mark.parametrize("adjust", [wide_and_narrow, windows_of_two_widths, last_token_pooling])
def test_similar_models_whose_prefixes_may_be_cached_are_served(make_daemon, make_halves, caplog, adjust):
    caplog.set_level(logging.WARNING, "vllm.kvserver")
    scheduler, worker = make_halves(make_daemon(), adjust)
    assert "runs without cache" not in caplog.text
    assert scheduler.scheduler is not None
    scheduler.shutdown()
    worker.shutdown()


def test_engine_with_vllms_prefix_caching_off_still_loads_from_the_daemon(make_daemon, make_engine):
    def own_off(config, caches):
        config.cache_config.enable_prefix_caching = False

    daemon = make_daemon()
    make_engine(daemon, adjust=own_off).generate("cold", TOKENS)
    assert make_engine(daemon, adjust=own_off).generate("warm", TOKENS).external == 3 * CHUNK


@pytest.mark.parametrize(
    ("backend", "invariant", "served"),
    [("FLASHINFER", "1", False), ("TRITON_MLA", "1", False), ("FLASHINFER", "0", True), ("FLASH_ATTN", "1", True)],
)
def test_a_backend_that_is_not_invariant_upon_cached_prefixes_is_refused_where_results_must_be(
    make_daemon, make_engine, monkeypatch, backend, invariant, served
):
    """vLLM turns prefix caching off in its workers then; the scheduler's configuration does not state it."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", invariant)
    layer = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend))

    def built_with(config, caches):
        config.compilation_config.static_forward_context.update({f"layers.{i}": layer for i in range(2)})

    daemon = make_daemon(chunk_tokens=CHUNK)
    for name, tokens in (("cold", 0), ("warm", 3 * CHUNK)):
        answer = make_engine(daemon, adjust=built_with).generate(name, TOKENS)
        assert answer.external == (tokens if served else 0)
    assert bool(daemon.status()["l1"]["chunks"]) == served
