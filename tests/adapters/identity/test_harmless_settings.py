"""What is harmless: changed alone, it leaves two engines one identity."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from identities import CONNECTOR, Identify, different, multimodal
from model_folder import write_model
from vllm import config as vllm_config
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from kvserver.adapters.vllm.harmless import HARMLESS, is_harmless
from kvserver.adapters.vllm.identity import Identity, config_identity, with_weights


def test_two_starts_with_the_same_arguments_have_one_identity(identify: Identify, plain: Identity) -> None:
    again = identify()
    assert (again, again.private) == (plain, "")
    assert len(plain.counted) > 200


HARMLESS_ARGUMENTS: dict[str, Any] = {
    "aggregate_engine_logging": True,
    "allow_deprecated_quantization": True,
    "allowed_local_media_path": "/",
    "allowed_media_domains": ["example.org"],
    "async_scheduling": False,
    "aux_output_config": {"max_bytes": 1 << 20},
    "block_size": 64,
    "cpu_distributed_timeout_seconds": 100,
    "cpu_offload_gb": 1.0,
    "cudagraph_metrics": True,
    "data_parallel_rpc_port": 12345,
    "data_parallel_size": 2,
    "dbo_decode_token_threshold": 64,
    "dbo_prefill_token_threshold": 64,
    "disable_chunked_mm_input": True,
    "disable_hybrid_kv_cache_manager": True,
    "disable_log_stats": True,
    "distributed_timeout_seconds": 100,
    "download_dir": "/tmp",
    "dp_sync_interval": 4,
    "enable_chunked_prefill": False,
    "enable_flashinfer_autotune": False,
    "enable_layerwise_nvtx_tracing": True,
    "enable_logging_iteration_details": True,
    "enable_mfu_metrics": True,
    "enable_nccl_comm_suspend": True,
    "enable_prefix_caching": False,
    "enable_shm_tensor_arena": True,
    "eplb_config": {"window_size": 10},
    "generation_config": "vllm",
    "gpu_memory_utilization": 0.5,
    "hf_token": "secret",
    "jit_monitor_mode": "error",
    "kv_cache_metrics": True,
    "kv_cache_metrics_sample": 0.5,
    "kv_events_config": {"enable_kv_cache_events": True, "publisher": "zmq"},
    "kv_transfer_config": {**CONNECTOR, "kv_role": "kv_both", "engine_id": "x", "kv_load_failure_policy": "recompute"},
    "log_level": "WARNING",
    "logprobs_mode": "raw_logits",
    "long_prefill_token_threshold": 100,
    "master_addr": "127.0.0.2",
    "master_port": 12346,
    "max_cudagraph_capture_size": 8,
    "max_logprobs": 5,
    "max_model_len": 1024,
    "max_num_active_seqs": 7,
    "max_num_batched_tokens": 4096,
    "max_num_queued_reqs": 100,
    "max_num_queued_tokens": 100_000,
    "max_num_scheduled_tokens": 1024,
    "max_num_seqs": 7,
    "max_parallel_loading_workers": 2,
    "num_gpu_blocks_override": 100,
    "override_generation_config": {"temperature": 0.5},
    "performance_mode": "throughput",
    "prefill_schedule_interval": 2,
    "profiler_config": {"profiler": "torch", "torch_profiler_dir": "/tmp/profile"},
    "pt_load_map_location": "cpu:0",
    "renderer_num_workers": 2,
    "safetensors_load_strategy": "eager",
    "safetensors_prefetch_block_size": 1 << 20,
    "safetensors_prefetch_num_threads": 1,
    "scheduler_reserve_full_isl": False,
    "scheduling_policy": "priority",
    "seed": 7,
    "served_model_name": "another-name",
    "show_hidden_metrics_for_version": "0.31",
    "shutdown_timeout": 5,
    "sleep_preserve_parameter_names": ["x"],
    "stream_interval": 4,
    "structured_outputs_config": {"backend": "xgrammar"},
    "tokenizer_mode": "mistral",
    "tokenizer_revision": "v2",
    "trust_remote_code": True,
    "use_fp64_gumbel": True,
    "use_tqdm_on_load": False,
    "watermark": 0.1,
    "weight_transfer_config": {"backend": "nccl"},
}
if "watchdog_config" in EngineArgs.__dataclass_fields__:  # 0.33 and later
    HARMLESS_ARGUMENTS["watchdog_config"] = {"timeout": 100.0}


def leaves(config: Any, prefix: str = "") -> dict[str, Any]:
    """Every declared field, harmless or not."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name, None)
        inside = dataclasses.is_dataclass(value) and "hf_" not in field.name
        found |= leaves(value, f"{prefix}{field.name}.") if inside else {prefix + field.name: value}
    return found


@pytest.mark.parametrize("argument", HARMLESS_ARGUMENTS)
def test_a_harmless_argument_changed_alone_still_shares(
    start: Callable[..., VllmConfig], identify: Identify, plain: Identity, argument: str
) -> None:
    options = {argument: HARMLESS_ARGUMENTS[argument]}
    mine, other = leaves(start()), leaves(start(**options))
    changed = {name for name in mine.keys() | other.keys() if mine.get(name) != other.get(name)}
    assert changed - {"instance_id", "kv_transfer_config.engine_id"} or argument in NOT_KEPT, "this tests nothing"
    found = identify(**options)
    assert (different(found, plain), found.private) == (set(), "")


# Arguments that vLLM does not keep in its configuration, or only for models that read them.
NOT_KEPT = {"aggregate_engine_logging", "disable_log_stats"}


def configurations(config: Any) -> Iterator[Any]:
    yield config
    for field in dataclasses.fields(config):
        value = getattr(config, field.name, None)
        if dataclasses.is_dataclass(value) and "hf_" not in field.name and not is_harmless(config, field.name):
            yield from configurations(value)


def test_every_field_that_is_listed_as_harmless_may_have_any_value(start, caches, plain):
    """Also those that no argument reaches; but for those that are read for what counts."""
    read = ("model", "max_model_len", "enable_prefix_caching", "static_forward_context")
    config, changed = start(), 0
    for part in configurations(config):
        for kind in type(part).__mro__:
            for name in HARMLESS.get(kind.__name__, {}):
                if hasattr(part, name) and name not in read:
                    object.__setattr__(part, name, "something else")
                    changed += 1
    assert changed > 200
    assert different(with_weights(config_identity(config, caches), config), plain) == set()


OF_033 = {
    "draft_lm_head_quantization": "fp8", "xpress_topc": 3, "fly_window_size": 4, "fly_entropy_threshold": 0.5,
    "fly_entropy_top_k": 5,
}  # fmt: skip


@pytest.mark.parametrize("name", OF_033)
def test_draft_settings_of_vllm_0_33_do_not_separate_engines(identify, name):
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}

    def adjust(config: VllmConfig) -> None:
        object.__setattr__(config.speculative_config, name, OF_033[name])

    found = identify(speculative_config=drafts, adjust=adjust)
    assert different(found, identify(speculative_config=drafts)) == set()


HARMLESS_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_DP_RANK": "3",
    "VLLM_PORT": "12345",
    "VLLM_HOST_IP": "127.0.0.2",
    "VLLM_LOGGING_LEVEL": "DEBUG",
    "VLLM_API_KEY": "secret",
    "VLLM_CACHE_ROOT": "/tmp/somewhere",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "10",
    "CUDA_VISIBLE_DEVICES": "1",
    "VLLM_CHAT_TEMPLATE_FUEL": "1000",
    "VLLM_HTTP_MAX_REQUEST_BODY_SIZE": "1000",
    "VLLM_MAX_MEDIA_REQUEST_DECODE_BYTES": "1000",
    "VLLM_MAX_MEDIA_REQUEST_DOWNLOAD_SIZE_MB": "10",
    "VLLM_REQUEST_BODY_LOG_LEVEL": "INFO",
    "OMP_NUM_THREADS": "3",
}


@pytest.mark.parametrize("name", HARMLESS_ENVIRONMENT)
def test_a_harmless_variable_still_shares(identify, plain, monkeypatch, name):
    monkeypatch.setenv(name, HARMLESS_ENVIRONMENT[name])
    assert different(identify(), plain) == set()


def test_a_copy_of_the_folder_elsewhere_and_later_still_shares(identify, plain, tmp_path):
    copy = write_model(tmp_path / "another-mount")
    os.utime(copy / "model.safetensors")
    found = identify(model=str(copy), served_model_name="x", tokenizer=str(copy))
    assert (different(found, plain), found.private) == (set(), "")


def test_all_ranks_of_an_engine_have_one_identity(start, caches):
    """Each has its own copy of the configuration, its own rank, and what its process left in it."""
    config = start(tensor_parallel_size=2, distributed_executor_backend="mp")
    found = []
    for rank in (0, 1):
        mine = copy.deepcopy(config)
        mine.parallel_config.rank = rank
        mine.parallel_config.assigned_physical_gpu_ids = [rank]
        mine.compilation_config.static_forward_context = {"layers.0": object()}
        mine.compilation_config.compilation_time = rank * 1.5
        if rank:
            _ = mine.model_config.is_multimodal_raw_input_only_model  # a cached property, if vLLM has it so
            mine.cache_config.num_gpu_blocks = 1000
        found.append(with_weights(config_identity(mine, caches), mine))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "options",
    [
        {"mm_processor_cache_gb": 2},
        {"limit_per_prompt": {"image": 3}},
        {"mm_processor_cache_type": "shm"},
        {"skip_mm_profiling": True},
        {"mm_processor_cache_type": "shm", "mm_shm_cache_max_object_size_mb": 64},
    ],
    ids=lambda options: list(options)[-1],
)
def test_image_settings_of_the_front_end_do_not_separate_engines(identify, options):
    assert identify(adjust=multimodal(**options)) == identify(adjust=multimodal())


def test_every_list_is_of_a_class_that_vllm_has(start):
    known = {kind.__name__ for kind in vars(vllm_config).values() if isinstance(kind, type)}
    nested = {"PassConfig", "EngramConfig", "MultiModalConfig", "EPLBConfig"}
    assert set(HARMLESS) <= known | nested


def test_instance_id_does_not_separate_engines():
    assert is_harmless(VllmConfig(), "instance_id")
    assert not is_harmless(VllmConfig(), "model_config")
