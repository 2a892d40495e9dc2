"""What must agree before KV is shared: each thing, changed alone, separates two engines; what is harmless does not."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from kvserver.adapters.vllm.canonical import Refused, canonical
from kvserver.adapters.vllm.harmless import HARMLESS, is_harmless
from kvserver.adapters.vllm.identity import SHOWN, Identity, config_identity, with_weights
from made_up_model import BLOCK, prompt
from model_folder import write_model
from modelless import configure
from vllm import config as vllm_config
from vllm.config import MultiModalConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core import kv_cache_utils

from kvserver.cli.status import table
from kvserver.protocol.status import DaemonStatus

CHUNK = 64
TOKENS = prompt(1, 2 * CHUNK + 10)
CONNECTOR = {"kv_connector": "KVServerConnector", "kv_connector_module_path": "kvserver.adapters.vllm"}

Identify = Callable[..., Identity]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("identity"))


@pytest.fixture(scope="module")
def caches(folder: Path) -> Any:
    return configure(folder, "ipc:///nowhere")[1]


@pytest.fixture(scope="module")
def start(folder: Path) -> Callable[..., VllmConfig]:
    """The effective configuration that vLLM makes of these arguments."""

    def make(**arguments: Any) -> VllmConfig:
        common = {"model": str(folder), "skip_tokenizer_init": True, "dtype": "bfloat16", "max_model_len": 2048}
        transfer = {**CONNECTOR, "kv_role": "kv_both"}
        return EngineArgs(**{**common, "kv_transfer_config": transfer, **arguments}).create_engine_config()

    return make


@pytest.fixture(scope="module")
def identify(start: Callable[..., VllmConfig], caches: Any) -> Identify:
    """The identity of an engine that was started with these arguments."""

    def make(model_version: str = "", adjust: Callable[[VllmConfig], None] = lambda config: None, **arguments: Any):
        config = start(**arguments)
        adjust(config)
        return with_weights(config_identity(config, caches), config, model_version)

    return make


@pytest.fixture(scope="module")
def plain(identify: Identify) -> Identity:
    return identify()


def different(one: Identity, other: Identity) -> set[str]:
    """Names of the fields that keep them from sharing."""
    names = {*one.counted, *other.counted}
    return {name for name in names if one.counted.get(name) != other.counted.get(name)}


# ---- what is harmless -------------------------------------------------------------------------


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
    """Also those that no argument reaches; but for the two that are read for what counts."""
    config, changed = start(), 0
    for part in configurations(config):
        for kind in type(part).__mro__:
            for name in HARMLESS.get(kind.__name__, {}):
                if hasattr(part, name) and name not in ("model", "max_model_len", "enable_prefix_caching"):
                    object.__setattr__(part, name, "something else")
                    changed += 1
    assert changed > 200
    assert different(with_weights(config_identity(config, caches), config), plain) == set()


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


# ---- what counts ------------------------------------------------------------------------------

ROPE = {"rope_type": "default", "rope_theta": 5e5}
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


def test_versions_and_the_device_count(identify, plain, monkeypatch):
    monkeypatch.setattr("vllm.__version__", "0.32.1")
    assert different(identify(), plain) == {"vllm"}
    monkeypatch.undo()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert different(identify(), plain) == {"device"}


def test_hash_granularity_and_group_geometry_count(start, caches, identify, plain):
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


# ---- max_model_len ----------------------------------------------------------------------------


def test_the_length_of_a_context_counts_where_the_model_computes_with_it(identify):
    long = {"hf_overrides": {"rope_parameters": LONGROPE}}
    assert different(identify(**long), identify(**long, max_model_len=1024)) == {"model_config.max_model_len"}

    def llama4(config: VllmConfig) -> None:
        config.model_config.hf_text_config.model_type = "llama4_text"

    one, other = identify(adjust=llama4), identify(adjust=llama4, max_model_len=1024)
    assert different(one, other) == {"model_config.max_model_len"}


def test_a_length_that_vllm_fitted_to_the_memory_is_not_what_the_model_was_built_with(identify):
    def fitted(length: int) -> Callable[[VllmConfig], None]:
        return lambda config: setattr(config.model_config, "max_model_len", length)

    long = {"hf_overrides": {"rope_parameters": LONGROPE}, "max_model_len": -1}
    assert identify(**long, adjust=fitted(1500)) == identify(**long, adjust=fitted(700))


def test_a_model_that_is_not_vllms_own_may_read_the_length(identify):
    def foreign(config: VllmConfig) -> None:
        config.model_config.hf_config.architectures = ["SomebodysForCausalLM"]

    assert different(identify(adjust=foreign), identify(adjust=foreign, max_model_len=1024))


# ---- what makes an engine private ----------------------------------------------------------------


def a_function(config: Any) -> Any:
    return config


def multimodal(**options: Any) -> Callable[[VllmConfig], None]:
    return lambda config: setattr(config.model_config, "multimodal_config", MultiModalConfig(**options))


def test_processor_arguments_count(identify):
    one, other = identify(adjust=multimodal()), identify(adjust=multimodal(mm_processor_kwargs={"num_crops": 4}))
    assert different(one, other) == {"model_config.multimodal_config.mm_processor_kwargs"}
    assert one.private == other.private == ""


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
def test_what_the_front_end_does_with_images_still_shares(identify, options):
    assert identify(adjust=multimodal(**options)) == identify(adjust=multimodal())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"hf_overrides": a_function}, "model_config.hf_overrides cannot be compared: a builtins.function"),
        ({"load_format": "dummy"}, "weights: load_format dummy"),
        ({"load_format": "tensorizer"}, "weights: load_format tensorizer"),
        ({"model_weights": "s3://bucket/model"}, "weights: they are not in the model's folder"),
        ({"additional_config": {"hook": object()}}, "additional_config cannot be compared: a builtins.object"),
        (
            {"adjust": multimodal(mm_processor_cache_gb=0), "enable_prefix_caching": False},
            "multimodal items are named by a counter",
        ),
        ({"adjust": lambda config: setattr(config.cache_config, "calculate_kv_scales", True)}, "calculate_kv_scales"),
    ],
    ids=["a function overrides", "dummy", "tensorizer", "s3", "an object", "counted images", "KV scales of the run"],
)
def test_what_cannot_be_reproduced_makes_the_engine_private_and_is_named(identify, arguments, reason):
    assert identify(**arguments).private.startswith(reason)


@pytest.mark.parametrize("where", [{"load_format": "dummy"}, {"model_weights": "s3://bucket/model"}])
def test_weights_without_files_may_have_a_name(identify, where):
    named, again, other = (identify(model_version=version, **where) for version in ("v1", "v1", "v2"))
    assert named == again
    assert named.private == other.private == ""
    assert different(named, other) == {"weights"}


def test_the_uri_of_weights_counts_though_they_have_a_name(identify):
    one, other = (identify("v1", model_weights=f"s3://bucket/{name}") for name in "ab")
    assert different(one, other) == {"model_config.model_weights"}


def test_a_name_does_not_stand_for_files_that_are_there(identify, tmp_path):
    one, other = (identify("v1", model=str(write_model(tmp_path / str(seed), seed=seed))) for seed in (1, 2))
    assert different(one, other) == {"weights"}


def test_a_folder_without_weights_is_private(identify, tmp_path):
    folder = write_model(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    assert "no weight files" in identify(model=str(folder)).private


def hub(name: str = "org/name", commit: str | None = "abc") -> Callable[[VllmConfig], None]:
    def adjust(config: VllmConfig) -> None:
        config.model_config.model = name
        config.model_config.hf_config._commit_hash = commit

    return adjust


def test_a_hub_model_is_its_resolved_commit(identify):
    one, again, moved, other = (
        identify(adjust=hub(*names)) for names in ((), (), ("org/name", "def"), ("org/other", "abc"))
    )
    assert (one, one.private) == (again, "")
    assert different(one, moved) == different(one, other) == {"weights"}
    assert "commit of the model is not known" in identify(adjust=hub(commit=None)).private


def test_a_draft_model_of_its_own_counts_by_its_weights(identify, tmp_path):
    def drafted(seed: int) -> Identity:
        folder = write_model(tmp_path / str(seed), seed=seed, num_hidden_layers=1)
        return identify(speculative_config={"method": "draft_model", "model": str(folder), "num_speculative_tokens": 2})

    assert different(drafted(1), drafted(2)) == {"draft weights"}
    assert drafted(1).private == ""


# ---- the canonical form -----------------------------------------------------------------------


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


# ---- the lists --------------------------------------------------------------------------------


def test_every_list_is_of_a_class_that_vllm_has(start):
    known = {kind.__name__ for kind in vars(vllm_config).values() if isinstance(kind, type)}
    nested = {"PassConfig", "EngramConfig", "MultiModalConfig", "EPLBConfig"}
    assert set(HARMLESS) <= known | nested


def test_what_identical_starts_make_anew_is_harmless():
    assert is_harmless(VllmConfig(), "instance_id")
    assert not is_harmless(VllmConfig(), "model_config")


# ---- through the daemon -----------------------------------------------------------------------


def adjusted(part: str, name: str, value: Any) -> dict[str, Any]:
    return {"adjust": lambda config, caches: setattr(getattr(config, part), name, value)}


@pytest.mark.parametrize(
    "options",
    [
        adjusted("cache_config", "cache_dtype", "fp8"),
        adjusted("model_config", "quantization", "awq"),
        {"hf_overrides": {"rms_norm_eps": 1e-3}},
        {"drafts": 2},
    ],
    ids=["KV dtype", "quantization", "overrides", "speculation"],
)
def test_engines_that_disagree_find_nothing_of_each_other(make_daemon, make_engine, options):
    daemon = make_daemon()
    make_engine(daemon).generate("cold", TOKENS)
    assert make_engine(daemon, **options).generate("warm", TOKENS).external == 0
    namespaces = {instance["namespace"] for instance in daemon.status()["instances"]}
    assert len(namespaces) == 2
    assert {instance["private"] for instance in daemon.status()["instances"]} == {""}


def test_a_private_engine_finds_its_own_and_reports_why_it_shares_nothing(make_daemon, make_engine):
    daemon = make_daemon()
    dummy = adjusted("load_config", "load_format", "dummy")
    one = make_engine(daemon, extra={"kvserver.on_prefix_reset": "keep"}, **dummy)
    one.generate("cold", TOKENS)
    assert make_engine(daemon, **dummy).generate("another", TOKENS).external == 0
    assert one.scheduler.reset_prefix_cache()
    assert one.generate("again", TOKENS).external == 2 * CHUNK
    reasons = {instance["private"] for instance in daemon.status()["instances"]}
    assert reasons == {
        "weights: load_format dummy does not take them from the model's files; kvserver.model_version may name them"
    }
    assert "shares KV with no other engine: weights: load_format dummy" in table(
        msgspec.convert(daemon.status(), DaemonStatus)
    )


def test_weights_that_have_a_name_are_shared(make_daemon, make_engine):
    daemon = make_daemon()
    dummy = adjusted("load_config", "load_format", "dummy")
    for version, expected in (("v1", 0), ("v1", 2 * CHUNK), ("v2", 0)):
        engine = make_engine(daemon, extra={"kvserver.model_version": version}, **dummy)
        assert engine.generate(version, TOKENS).external == expected


def test_engines_whose_hashes_start_elsewhere_find_nothing_of_each_other(make_daemon, make_engine, monkeypatch):
    daemon = make_daemon()
    make_engine(daemon).generate("cold", TOKENS)
    other = make_engine(daemon)
    monkeypatch.setattr(kv_cache_utils, "NONE_HASH", b"\7" * 32)
    assert other.generate("warm", TOKENS).external == 0


def test_a_cache_salt_separates_requests(make_daemon, make_engine):
    daemon = make_daemon()
    cold, warm = make_engine(daemon), make_engine(daemon)
    for engine, salt, expected in [(cold, "a", 0), (warm, "b", 0), (warm, "a", 2 * CHUNK), (warm, None, 0)]:
        answer = engine.add(f"{salt}", TOKENS, cache_salt=salt)
        engine.run()
        assert answer.right
        assert answer.external == expected


def test_the_daemon_decides_how_long_chunks_are(make_daemon, make_engine):
    daemon = make_daemon(chunk_tokens=BLOCK)
    make_engine(daemon).generate("cold", TOKENS)
    assert daemon.status()["instances"][0]["chunk_tokens"] == BLOCK
    assert make_engine(daemon).generate("warm", TOKENS).external == 8 * BLOCK
