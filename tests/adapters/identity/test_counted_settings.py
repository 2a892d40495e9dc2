"""What counts: changed alone, it separates two engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from identities import Identify, different, multimodal
from made_up_model import BLOCK
from vllm.config import VllmConfig

from kvserver.adapters.common.canonical import Refused
from kvserver.adapters.vllm.canonical import canonical
from kvserver.adapters.vllm.identity import SHOWN, Identity, config_identity, with_weights

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 1024,
    "factor": 4.0,
}
COUNTED_ARGUMENTS: dict[str, Any] = {
    "additional_config": {"x": 1},
    "attention_config": {"use_prefill_query_quantization": True},
    "code_revision": "v2",
    "compilation_config": {"custom_ops": ["all"]},
    "disable_sliding_window": True,
    "dtype": "float32",
    "ec_transfer_config": {"ec_connector": "ECExampleConnector", "ec_role": "ec_consumer"},
    "enable_lora": True,
    "enable_prompt_embeds": True,
    "enforce_eager": True,  # by what vLLM makes of it: other kernels
    "hf_overrides": {"rms_norm_eps": 1e-3},
    "ignore_patterns": ["*.bin"],
    "ir_op_priority": {"rms_norm": ["vllm_c"]},
    "kv_cache_dtype": "fp8_e5m2",
    "linear_backend": "cutlass",
    "load_format": "safetensors",
    "mamba_cache_dtype": "float32",
    "model_impl": "transformers",
    "model_loader_extra_config": {"enable_multithread_load": True},
    "pipeline_parallel_size": 2,
    "prefix_cache_retention_interval": 512,
    "prefix_caching_hash_algo": "sha256_cbor",
    "revision": "v2",
    "scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler",
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3},
    "tensor_parallel_size": 2,
    "worker_extension_cls": "some.Extension",
}


@pytest.mark.parametrize("argument", COUNTED_ARGUMENTS)
def test_an_argument_that_counts_separates(identify: Identify, plain: Identity, argument: str) -> None:
    assert different(identify(**{argument: COUNTED_ARGUMENTS[argument]}), plain)


@pytest.mark.parametrize(
    ("name", "value"), [("VLLM_MLA_DISABLE", "1"), ("VLLM_BATCH_INVARIANT", "1"), ("NVIDIA_TF32_OVERRIDE", "1")]
)
def test_a_variable_that_counts_separates(identify, plain, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert different(identify(), plain) == {f"environment.{name}"}


def test_version_of_vllm_and_device_separate_engines(identify, plain, monkeypatch):
    monkeypatch.setattr("vllm.__version__", "0.32.1")
    assert different(identify(), plain) == {"vllm"}
    monkeypatch.undo()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert different(identify(), plain) == {"device"}


def test_hash_block_size_separates_engines(start, caches, identify, plain):
    config = start()
    finer = dataclasses.replace(caches, hash_block_size=BLOCK // 2)
    assert different(with_weights(config_identity(config, finer), config), plain) == {"kv_cache.hash_block_tokens"}


def test_an_unknown_field_counts(identify, plain):
    def set_one(config: VllmConfig) -> None:
        config.cache_config.of_a_later_version = 1

    def extend_a_class(config: VllmConfig) -> None:
        made = dataclasses.make_dataclass(
            "Extended", [("of_a_later_version", int, 2)], bases=(type(config.cache_config),)
        )
        config.cache_config.__class__ = made

    def a_new_configuration(config: VllmConfig) -> None:
        made = dataclasses.make_dataclass("LaterConfig", [("field", int, 3)])
        config.later_config = made()

    found = [identify(adjust=adjust) for adjust in (set_one, extend_a_class, a_new_configuration)]
    assert different(found[0], plain) == different(found[1], plain) == {"cache_config.of_a_later_version"}
    assert different(found[2], plain) == {"later_config.field"}
    assert different(found[0], found[1])


def test_values_are_shown_only_of_fields_that_are_neither_place_nor_secret(identify):
    found = identify(
        model_weights="s3://bucket/secret-name",
        load_format="runai_streamer",
        hf_token="hf_secret",
        revision="secret-branch",
        model_loader_extra_config={"s3_token": "secret"},
    )
    assert {field.name for field in found.fields() if field.value} <= SHOWN
    assert "secret" not in str(found)
    assert found.values["load_config.load_format"] == "runai_streamer"


def test_the_length_of_a_context_counts_where_the_model_computes_with_it(identify):
    long = {"hf_overrides": {"rope_parameters": LONGROPE}}
    assert different(identify(**long), identify(**long, max_model_len=1024)) == {"model_config.max_model_len"}

    def llama4(config: VllmConfig) -> None:
        config.model_config.hf_text_config.model_type = "llama4_text"

    one, other = identify(adjust=llama4), identify(adjust=llama4, max_model_len=1024)
    assert different(one, other) == {"model_config.max_model_len"}


def test_context_length_that_vllm_fitted_to_the_memory_does_not_separate_engines(identify):
    def fitted(length: int) -> Callable[[VllmConfig], None]:
        return lambda config: setattr(config.model_config, "max_model_len", length)

    long = {"hf_overrides": {"rope_parameters": LONGROPE}, "max_model_len": -1}
    assert identify(**long, adjust=fitted(1500)) == identify(**long, adjust=fitted(700))


def test_context_length_separates_engines_of_models_outside_vllm(identify):
    def foreign(config: VllmConfig) -> None:
        config.model_config.hf_config.architectures = ["SomebodysForCausalLM"]

    assert different(identify(adjust=foreign), identify(adjust=foreign, max_model_len=1024))


NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}


def test_fault_tolerance_of_failed_steps_separates_engines(identify, plain):
    def tolerant(config: VllmConfig) -> None:
        config.parallel_config.enable_fault_tolerance = True

    assert different(identify(adjust=tolerant), plain) == {"parallel_config.enable_fault_tolerance"}


def test_acceptance_method_of_drafts_separates_engines(identify):
    """Acceptance may be lossy."""
    one = identify(speculative_config=NGRAM)
    other = identify(
        speculative_config={**NGRAM, "rejection_sample_method": "synthetic", "synthetic_acceptance_length": 1.5}
    )
    assert different(one, other) == {"speculative_config.rejection_sample_method"}


def test_source_of_encoder_output_separates_engines_but_its_addresses_do_not(identify):
    def taken_from(connector: str = "ECExampleConnector", **fields: Any) -> Identity:
        return identify(ec_transfer_config={"ec_connector": connector, "ec_role": "ec_consumer", **fields})

    one = taken_from()
    assert different(one, taken_from(engine_id="x", ec_ip="10.0.0.1", ec_port=7, ec_buffer_size=5.0)) == set()
    for fields in ({"ec_role": "ec_both"}, {"ec_connector_extra_config": {"shared_storage_path": "/elsewhere"}}):
        assert different(one, taken_from(**fields)) == {f"ec_transfer_config.{name}" for name in fields}
    assert "ec_transfer_config.ec_connector" in different(one, taken_from("Another"))


def test_processor_arguments_count(identify):
    one, other = identify(adjust=multimodal()), identify(adjust=multimodal(mm_processor_kwargs={"num_crops": 4}))
    assert different(one, other) == {"model_config.multimodal_config.mm_processor_kwargs"}
    assert one.private == other.private == ""


def test_equal_values_have_one_form_whatever_their_order():
    assert canonical({"a": {1, 2, 3}, "b": (1, 2)}) == canonical({"b": [1, 2], "a": {3, 2, 1}})
    assert canonical({1: "x"}) != canonical({"1": "x"})
    assert canonical(torch.bfloat16) == "torch.bfloat16"


def test_no_form_holds_an_address():
    for value in (object(), lambda: 1, [object()], {"x": {"y": print}}, iter([])):
        with pytest.raises(Refused):
            canonical(value)
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(Refused, match="too deeply"):
        canonical(endless)
