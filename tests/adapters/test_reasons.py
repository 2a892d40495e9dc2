"""Texts of what runs without cache: which KV cache group, why, and what the operator can change."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from modelless import configure
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    RSWASpec,
    SlidingWindowSpec,
)

from kvserver.adapters.vllm import support

SHAPE: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 1, "dtype": torch.int64}
FULL = FullAttentionSpec(**SHAPE)
WINDOW = SlidingWindowSpec(**SHAPE, sliding_window=40)
RING = CircularBufferSpec(**SHAPE)
STATE = MambaSpec(block_size=16, shapes=((2, 2),), dtypes=(torch.float32,), mamba_cache_mode="align")
DRAFTS = SimpleNamespace(method="mtp")
HISPARSE = "; leave HiSparseConnector and attention_config.hisparse_config out"
NO_OPTION = "; no option changes that"
NEEDS = "; needs vLLM 0.{} or later"


def refused(
    folder: Any,
    spec: KVCacheSpec,
    *,
    alone: bool = False,
    drafts: Any = None,
    replays: bool = False,
    stages: int = 1,
    **of_group: Any,
) -> str | None:
    """The reason for a model with this spec, behind a group of full attention unless it is `alone`."""

    def adjust(config: Any, caches: Any) -> None:
        group = dataclasses.replace(KVCacheGroupSpec(["layers.2", "layers.5"], spec), **of_group)
        caches.kv_cache_groups[:] = [group] if alone else [KVCacheGroupSpec(["layers.0"], FULL), group]
        config.speculative_config, config.cache_config.use_replayssm = drafts, replays
        config.parallel_config.pipeline_parallel_size = stages

    config, caches = configure(folder, "ipc:///no-daemon", adjust=adjust)
    return support.unsupported(config, caches, config.kv_transfer_config)


@pytest.mark.parametrize(
    ("spec", "options", "reason"),
    [
        (FULL, {"host_resident": True}, "HiSparse keeps it in the host's memory, in a pool of its own" + HISPARSE),
        (
            RING,
            {"enable_kv_transfer": False},
            "HiSparse's copy on the GPU of a part of the host's KV, which vLLM hands to no connector" + HISPARSE,
        ),
        (RING, {"alone": True}, "vLLM caches no group of this model by its prefix" + NO_OPTION),
        (CrossAttentionSpec(**SHAPE), {}, "its KV is that of an encoder's input" + NO_OPTION),
        (EncoderOnlyAttentionSpec(**SHAPE), {}, "a token's KV depends on tokens behind it" + NO_OPTION),
        (RSWASpec(**SHAPE, rswa_window=40), {}, "vLLM itself caches no prefix of R-SWA" + NO_OPTION),
        (
            FullAttentionSpec(**SHAPE, non_causal=True),
            {},
            "layers that attend non-causally: a token's KV depends on tokens behind it" + NO_OPTION,
        ),
        (
            dataclasses.replace(STATE, mamba_cache_mode="none"),
            {},
            "mamba_cache_mode 'none' keeps no states at the ends of blocks; set --enable-prefix-caching",
        ),
        (
            STATE,
            {"replays": True},
            "with ReplaySSM a block may lack the last tokens of its state; leave --use-replayssm out",
        ),
    ],
)  # fmt: skip
def test_reason_names_the_group_why_it_is_not_served_and_the_cure(model_folder, spec, options, reason):
    named = f"KV cache group {int('alone' not in options)} ({type(spec).__name__}, layers.2 and 1 more): "
    assert refused(model_folder, spec, **options) == named + reason


def test_states_with_drafts_are_served_and_need_vllm_0_32(model_folder, monkeypatch):
    for version, needs in (((0, 33), False), ((0, 32), False), ((0, 31), True), ((0, 30), True)):
        monkeypatch.setattr(support, "vllm_version", lambda version=version: version)
        reason = refused(model_folder, STATE, drafts=DRAFTS) or ""
        assert reason.endswith("; needs vLLM 0.32 or later, or no speculative_config") == needs
        assert refused(model_folder, STATE) is None, "without drafts"


def test_groups_of_an_older_vllm_name_the_version_that_serves_them(model_folder, monkeypatch):
    monkeypatch.setattr(support, "LEAVES_GROUPS_OUT", False)
    assert (refused(model_folder, RING) or "").endswith(", which needs vLLM 0.32 or later")
    monkeypatch.setattr(support, "TransferResults", None)
    for spec in (WINDOW, STATE):
        assert (refused(model_folder, spec) or "").endswith(NEEDS.format(30))
    assert (refused(model_folder, FULL) or "").endswith("; set --disable-hybrid-kv-cache-manager")


@pytest.mark.skipif(support.vllm_version() < (0, 32), reason="states with drafts run without cache before vLLM 0.32")
def test_states_with_drafts_are_served_only_where_vllm_keeps_those_of_accepted_tokens(model_folder, monkeypatch):
    with_stages = property(lambda config: config.parallel_config.pipeline_parallel_size > 1)
    monkeypatch.setattr(VllmConfig, "use_v2_model_runner", with_stages)  # V1 serves no drafts with stages
    kinds = type(STATE.mamba_type)
    for kind in ("MAMBA1", "LINEAR"):
        state = dataclasses.replace(STATE, mamba_type=kinds[kind])
        reason = refused(model_folder, state, drafts=DRAFTS) or ""
        assert f"{kind} layers ignore how many drafts were accepted; leave speculative_config out" in reason
        assert refused(model_folder, state) is None
    reason = refused(model_folder, STATE, drafts=DRAFTS, stages=2) or ""
    assert "a state may be copied after its store; leave one of them out" in reason
    assert refused(model_folder, STATE, stages=2) is None
    assert refused(model_folder, FULL, drafts=DRAFTS, stages=2) is None
