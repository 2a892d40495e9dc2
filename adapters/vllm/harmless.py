"""Fields of vLLM's configuration that may differ between engines that share KV, each group with its reason.

A field on no list counts, as do fields that a newer vLLM adds and fields that were not examined. A listed field changes, for the
same key, neither K nor V beyond what the composition of a batch does to their last bits. Nor does it change what a key or a slot
means. Read in vLLM 0.32 and 0.33; names of other versions do no harm.

The rule: a field that makes a computation lossy, or takes its inputs from elsewhere, is never here. Examples: which drafts are
accepted, where an encoder's output comes from, whether a step that failed may be computed again.

Owns: the lists. Refuses to know: how the rest is compared.
"""

from __future__ import annotations

from typing import Any

_DERIVED = "made from fields that count"
_WHOLE = "as a whole: nothing of it reaches the model's forward"

# Class -> reason -> fields. A class of None fields would be compared whole; its own fields are looked at one by one.
_FIELDS: dict[str, dict[str, str]] = {
    "VllmConfig": {
        _WHOLE: "offload_config aux_output_config watermark_config structured_outputs_config observability_config"
        " logging_config profiler_config kv_transfer_config kv_events_config ec_manager_config reasoning_config"
        " weight_transfer_config shutdown_timeout watchdog_config",
        "new in each start": "instance_id",
        "choose values for fields that count by themselves": "optimization_level performance_mode",
        f"{_DERIVED}: quantization, its arguments, hf_config and the files of the model": "quant_config",
    },
    "AttentionConfig": {
        "split work or set aside memory": "flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv"
        " tq_max_kv_splits_for_cuda_graph sparse_mla_prefill_workspace_factor flex_attn_block_m flex_attn_block_n"
        " flex_attn_q_block_size flex_attn_kv_block_size",
    },
    "CacheConfig": {
        "how much memory there is, and how full": "gpu_memory_utilization num_gpu_blocks_override num_gpu_blocks"
        " num_cpu_blocks kv_cache_size_tokens kv_cache_max_concurrency kv_cache_memory_bytes",
        "other caches than ours": "kv_offloading_size kv_offloading_backend simple_cpu_offload_num_blocks",
        "whether vLLM looks up its own blocks": "enable_prefix_caching",
        "the model states it": "is_attention_free",
        "how a value was chosen": "user_specified_block_size _block_size_resolved",
        "set late, and in some of an engine's processes only; the KV cache's geometry counts": "block_size"
        " hash_block_size effective_attention_block_size cache_hit_alignment_tokens",
    },
    "PassConfig": {
        "fusions that round alike": "eliminate_noops enable_qk_norm_rope_fusion fuse_rope_kvcache_cat_mla"
        " fuse_act_padding fuse_mla_dual_rms_norm fuse_rope_kvcache fuse_qk_norm_rope_kvcache"
        " rope_kvcache_fusion_max_token_num",
    },
    "CompilationConfig": {
        "how the graph is compiled, kept and replayed; which kernels it has is in custom_ops and pass_config": "mode"
        " debug_dump_path cache_dir compile_cache_save_format backend ir_enable_torch_wrap splitting_ops"
        " compile_mm_encoder cudagraph_mm_encoder encoder_cudagraph_token_budgets"
        " encoder_cudagraph_max_vision_items_per_batch encoder_cudagraph_max_frames_per_batch cudagraph_decoder_replay"
        " decoder_replay_cudagraph_capture_sizes decoder_replay_trim_threshold compile_sizes compile_ranges_endpoints"
        " inductor_compile_config inductor_passes cudagraph_mode cudagraph_num_of_warmups cudagraph_capture_sizes"
        " cudagraph_copy_inputs cudagraph_specialize_lora use_inductor_graph_partition max_cudagraph_capture_size"
        " dynamic_shapes_config local_cache_dir fast_moe_cold_start",
        "what compiling left behind": "enabled_custom_ops disabled_custom_ops traced_files compilation_time"
        " encoder_compilation_time static_forward_context static_all_moe_layers bs_to_padded_graph_size",
    },
    "DeviceConfig": {"an index, and the type, which counts": "device"},
    "ECTransferConfig": {
        "an address, or how much there is room for; where an encoder's output comes from counts": "engine_id ec_ip ec_port"
        " ec_buffer_size",
        "the model states it": "mm_encoder_output_widths",
    },
    "EngramConfig": {"where memory is": "cpu_offload dp_shared_memory use_thp"},
    "KernelConfig": {
        "choose among kernels of one precision, or warm them up": "enable_flashinfer_autotune"
        " enable_rocm_segmented_attn_autotune enable_cutedsl_warmup enable_jit_warmup",
    },
    "LoadConfig": {
        "how the same files are read": "download_dir safetensors_load_strategy safetensors_prefetch_num_threads"
        " safetensors_prefetch_block_size device use_tqdm_on_load pt_load_map_location",
    },
    "LoRAConfig": {
        "how many there is room for": "max_lora_rank max_loras max_cpu_loras specialize_active_lora max_lora_cls_labels",
    },
    "ModelConfig": {
        "a name or place of what counts by its content": "model tokenizer hf_config_path served_model_name",
        "keys are made of tokens, whatever made those": "tokenizer_mode tokenizer_revision skip_tokenizer_init",
        "who may load what": "trust_remote_code allowed_local_media_path allowed_media_domains hf_token"
        " allow_deprecated_quantization",
        "sampling and what is returned": "seed return_sampling_mask max_logprobs logprobs_mode use_fp64_gumbel"
        " generation_config override_generation_config logits_processors pooler_config",
        "how the front end works": "io_processor_plugin renderer_num_workers limit_mm_per_prompt mm_processor_cache_gb"
        " mm_processor_cache_type mm_shm_cache_max_object_size_mb skip_mm_profiling mm_tensor_ipc mm_ipc_gpu_memory_gb",
        "how the same computation is run": "enforce_eager enable_trace_replay enable_nccl_comm_suspend",
        "sleep keeps or reloads the same weights": "enable_sleep_mode sleep_preserve_parameter_names"
        " sleep_mode_backend sleep_mode_offload_cudagraph enable_cumem_allocator",
        "no KV cache at all, or written only": "mm_encoder_only mm_encoder_fp8_scale_save_path"
        " mm_encoder_fp8_scale_save_margin",
        "the model's own counts where a draft reads it": "spec_target_max_model_len",
        "counts by itself, as it was when the model was built, where the model reads it": "max_model_len"
        " original_max_model_len",
        f"{_DERIVED}, kept beside the declared fields": "model_arch_config runner_type convert_type _model_info"
        " _architecture _hf_config_revision is_diffusion encoder_config is_encoder_decoder hf_image_processor_config"
        " attention_chunk_size config_updated",
    },
    "MultiModalConfig": {
        "how the front end works": "limit_per_prompt mm_processor_cache_gb mm_processor_cache_type"
        " mm_shm_cache_max_object_size_mb skip_mm_profiling mm_tensor_ipc mm_ipc_gpu_memory_gb",
        "no KV cache at all, or written only": "mm_encoder_only mm_encoder_fp8_scale_save_path"
        " mm_encoder_fp8_scale_save_margin",
    },
    "EPLBConfig": {
        "where copies of experts are, not what they compute": "window_size step_interval num_redundant_experts"
        " log_balancedness log_balancedness_interval use_async policy communicator enable_migration_batching",
    },
    "ParallelConfig": {
        "which replica this is and how replicas meet": "data_parallel_size data_parallel_size_local data_parallel_rank"
        " data_parallel_rank_local data_parallel_master_ip data_parallel_rpc_port dp_sync_interval"
        " data_parallel_master_port data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb"
        " data_parallel_index _data_parallel_master_port_list _coord_store_port _api_process_count _api_process_rank"
        " disable_nccl_for_dp_synchronization enable_elastic_ep elastic_ep_max_dp_size fault_tolerance_config",
        "which rank this is; all ranks' layouts count, in order": "rank world_size node_rank nnodes",
        "how processes are started and where": "distributed_executor_backend ray_workers_use_nsight ray_runtime_env"
        " placement_group master_addr master_port numa_bind numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids"
        " max_parallel_loading_workers distributed_timeout_seconds cpu_distributed_timeout_seconds",
        "the model states it": "is_moe_model",
        "sampling": "enable_batch_sharded_sampling",
        "which experts are loaded or copied where": "enable_ep_weight_filter enable_eplb",
        "how the same sums are sent": "disable_custom_all_reduce enable_shm_tensor_arena",
        "how batches are cut": "ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold",
        "how a value was chosen": "_allow_auto_resolve_cp_interleave_size",
    },
    "SchedulerConfig": {
        "what is computed when, and together with what": "max_num_batched_tokens max_num_scheduled_tokens max_num_seqs"
        " max_num_active_seqs long_prefill_token_threshold long_prefill_token_threshold_adaptive max_num_queued_reqs"
        " max_num_queued_tokens enable_chunked_prefill max_num_encoder_input_tokens encoder_cache_size policy"
        " disable_chunked_mm_input scheduler_reserve_full_isl watermark prefill_schedule_interval async_scheduling"
        " stream_interval max_model_len",
        "the KV cache's geometry counts": "disable_hybrid_kv_cache_manager",
        "the model states it": "is_encoder_decoder runner_type is_multimodal_model",
    },
    "SpeculativeConfig": {
        "a name or place of what counts by its content": "model",
        "how drafts are made, sampled and accepted, not their KV": "enforce_eager draft_tensor_parallel_size"
        " tensor_parallel_size moe_backend use_local_argmax_reduction prompt_lookup_max prompt_lookup_min"
        " num_speculative_tokens_per_batch_size suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests"
        " suffix_decoding_max_spec_factor suffix_decoding_min_token_prob synthetic_acceptance_rates"
        " synthetic_acceptance_length enable_adaptive_verification draft_sample_method dspark_draft_topk"
        " draft_lm_head_quantization fly_window_size fly_entropy_threshold fly_entropy_top_k xpress_topc",
        "count as the engine's own": "target_model_config target_parallel_config draft_parallel_config",
    },
}

HARMLESS: dict[str, dict[str, str]] = {
    kind: {field: reason for reason, fields in groups.items() for field in fields.split()}
    for kind, groups in _FIELDS.items()
}

_VARIABLES: dict[str, str] = {
    "names, addresses and numbers of processes": "VLLM_HOST_IP VLLM_PORT VLLM_RPC_BASE_PATH VLLM_LOOPBACK_IP"
    " VLLM_PROCESS_NAME_PREFIX VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME LOCAL_RANK CUDA_VISIBLE_DEVICES VLLM_DP_RANK"
    " VLLM_DP_RANK_LOCAL VLLM_DP_SIZE VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_RANDOMIZE_DP_DUMMY_INPUTS"
    " VLLM_NIXL_SIDE_CHANNEL_HOST VLLM_NIXL_SIDE_CHANNEL_PORT VLLM_P2P_SIDE_CHANNEL_HOST VLLM_P2P_SIDE_CHANNEL_PORT"
    " VLLM_P2P_MAX_PEERS VLLM_EC_SIDE_CHANNEL_HOST VLLM_EC_SIDE_CHANNEL_PORT VLLM_MOONCAKE_BOOTSTRAP_PORT"
    " MOONCAKE_PREFERRED_SEGMENT MOONCAKE_REQUESTER_LOCAL_HOSTNAME VLLM_GPU_NIC_PCIE_MAPPING VLLM_NIC_SELECTION_VARS"
    " VLLM_RAY_PER_WORKER_GPUS VLLM_RAY_BUNDLE_INDICES VLLM_RAY_DP_PACK_STRATEGY VLLM_RAY_DP_PLACEMENT_NODE_IPS"
    " VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY VLLM_RAY_EXTRA_ENV_VARS_TO_COPY VLLM_USE_RAY_V2_EXECUTOR_BACKEND"
    " VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM VLLM_USE_RAY_WRAPPED_PP_COMM"
    " VLLM_WORKER_MULTIPROC_METHOD VLLM_ENABLE_V1_MULTIPROCESSING VLLM_ELASTIC_EP_SCALE_UP_LAUNCH"
    " VLLM_ELASTIC_EP_DRAIN_REQUESTS VLLM_KEEP_ALIVE_ON_ENGINE_DEATH",
    "where files are kept": "VLLM_CACHE_ROOT VLLM_CONFIG_ROOT VLLM_XLA_CACHE_PATH VLLM_ASSETS_CACHE"
    " VLLM_ASSETS_CACHE_MODEL_CLEAN VLLM_MEDIA_CACHE VLLM_LORA_RESOLVER_CACHE_DIR VLLM_LORA_RESOLVER_HF_REPO_LIST"
    " VLLM_MODEL_REDIRECT_PATH VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR VLLM_DEBUG_DUMP_PATH VLLM_RUST_FRONTEND_PATH"
    " CUDA_HOME LD_LIBRARY_PATH VLLM_CUDART_SO_PATH VLLM_NCCL_SO_PATH VLLM_NCCL_INCLUDE_PATH"
    " VLLM_ENABLE_CUDA_COMPATIBILITY VLLM_CUDA_COMPATIBILITY_PATH VLLM_DISABLE_COMPILE_CACHE"
    " VLLM_COMPILE_CACHE_SAVE_FORMAT VLLM_FORCE_AOT_LOAD",
    "secrets and what they open": "VLLM_API_KEY S3_ACCESS_KEY_ID S3_SECRET_ACCESS_KEY S3_ENDPOINT_URL",
    "logs, statistics, debugging": "VLLM_CONFIGURE_LOGGING VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_LEVEL"
    " VLLM_LOGGING_STREAM VLLM_LOGGING_PREFIX VLLM_LOGGING_COLOR NO_COLOR FORCE_COLOR VLLM_LOG_STATS_INTERVAL"
    " VLLM_TRACE_FUNCTION VLLM_USAGE_STATS_SERVER VLLM_NO_USAGE_STATS VLLM_DO_NOT_TRACK VLLM_USAGE_SOURCE"
    " VLLM_DEBUG_LOG_API_SERVER_RESPONSE VLLM_LOG_BATCHSIZE_INTERVAL VLLM_RINGBUFFER_WARNING_INTERVAL"
    " VLLM_PATTERN_MATCH_DEBUG VLLM_GC_DEBUG VLLM_DEBUG_WORKSPACE VLLM_DEBUG_MFU_METRICS VLLM_LOG_MODEL_INSPECTION"
    " VLLM_DISABLE_LOG_LOGO VLLM_CUSTOM_SCOPES_FOR_PROFILING VLLM_NVTX_SCOPES_FOR_PROFILING VLLM_GPU_SYNC_CHECK"
    " VLLM_COMPUTE_NANS_IN_LOGITS VLLM_RAISE_ON_LOGIT_NANS VLLM_MOONCAKE_STORE_TIER_LOG VERBOSE"
    " VLLM_XLA_CHECK_RECOMPILATION VLLM_SERVER_DEV_MODE VLLM_REQUEST_BODY_LOG_LEVEL",
    "timeouts, and limits of requests": "VLLM_ENGINE_READY_TIMEOUT_S VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT"
    " VLLM_IMAGE_FETCH_TIMEOUT VLLM_VIDEO_FETCH_TIMEOUT VLLM_AUDIO_FETCH_TIMEOUT VLLM_MEDIA_FETCH_MAX_RETRIES"
    " VLLM_HTTP_TIMEOUT_KEEP_ALIVE VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"
    " VLLM_P2P_HANDSHAKE_TIMEOUT_S VLLM_P2P_IDLE_TIMEOUT_S VLLM_MOONCAKE_CONNECTOR_TIMEOUT"
    " VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT VLLM_REGEX_COMPILATION_TIMEOUT_S VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS"
    " VLLM_MAX_N_SEQUENCES VLLM_MAX_COMPLETION_PROMPTS VLLM_MAX_STOP_STRINGS VLLM_MAX_NUM_BAD_WORDS"
    " VLLM_MAX_BAD_WORDS_TOTAL_TOKENS VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB VLLM_MEDIA_CACHE_MAX_SIZE_MB"
    " VLLM_MEDIA_CACHE_TTL_HOURS VLLM_MEDIA_URL_ALLOW_REDIRECTS VLLM_MEDIA_LOADING_THREAD_COUNT"
    " VLLM_MAX_AUDIO_CLIP_FILESIZE_MB VLLM_MAX_AUDIO_DECODE_DURATION_S VLLM_MAX_AUDIO_DECODE_BYTES"
    " VLLM_MAX_EMBED_DECODE_BYTES VLLM_MAX_AUDIO_PREPROCESS_WORKERS VLLM_HTTP_MAX_REQUEST_BODY_SIZE"
    " VLLM_CHAT_TEMPLATE_FUEL VLLM_MAX_MEDIA_REQUEST_DECODE_BYTES VLLM_MAX_MEDIA_REQUEST_DOWNLOAD_SIZE_MB",
    "how much memory or how many threads": "VLLM_CPU_KVCACHE_SPACE VLLM_CPU_OMP_THREADS_BIND"
    " VLLM_CPU_NUM_OF_RESERVED_CPU VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS VLLM_ENABLE_CUDAGRAPH_GC"
    " VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE VLLM_DEEPEP_BUFFER_SIZE_MB VLLM_MQ_MAX_CHUNK_BYTES_MB"
    " VLLM_MSGPACK_ZERO_COPY_THRESHOLD VLLM_FASTSAFETENSORS_QUEUE_SIZE VLLM_XGRAMMAR_CACHE_MB"
    " VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY VLLM_WEIGHT_OFFLOADING_DISABLE_UVA VLLM_WSL2_ENABLE_PIN_MEMORY"
    " VLLM_ENABLE_STARTUP_PLAN VLLM_TRITON_JIT_WARMUP_NUM_THREADS VLLM_DEEP_GEMM_WARMUP"
    " VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE VLLM_MOONCAKE_LOAD_RECV_THREADS VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO"
    " VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS VLLM_USE_SIMPLE_KV_OFFLOAD VLLM_USE_SPINLOOP_EXT",
    "the API, tokens and sampling": "VLLM_USE_FASTOKENS VLLM_USE_RUST_FRONTEND VLLM_USE_RUST_BENCH"
    " VLLM_V1_OUTPUT_PROC_CHUNK_SIZE VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_V1_USE_OUTLINES_CACHE"
    " VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_DISABLE_REQUEST_ID_RANDOMIZATION VLLM_ENFORCE_STRICT_TOOL_CALLING"
    " VLLM_ENABLE_RESPONSES_API_STORE VLLM_ENABLE_COHERE_API VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT"
    " VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS VLLM_SYSTEM_START_DATE"
    " VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES VLLM_USE_FLASHINFER_SAMPLER"
    " VLLM_XPU_USE_SAMPLER_KERNEL VLLM_SKIP_MODEL_NAME_VALIDATION VLLM_ALLOW_LONG_MAX_MODEL_LEN",
    "how vLLM was built, which its version states": "MAX_JOBS NVCC_THREADS CMAKE_BUILD_TYPE VLLM_USE_PRECOMPILED"
    " VLLM_USE_PRECOMPILED_RUST VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX VLLM_DOCKER_BUILD_CONTEXT VLLM_BUILD_COMMIT"
    " VLLM_BUILD_PIPELINE VLLM_BUILD_URL VLLM_IMAGE_TAG VLLM_SKIP_VERSION_SUFFIX",
}

HARMLESS_VARIABLES = frozenset(name for names in _VARIABLES.values() for name in names.split())

# Variables of others that change what is computed.
OTHER_VARIABLES = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "ONEDNN_DEFAULT_FPMATH_MODE")


def is_harmless(config: Any, field: str) -> bool:
    """True if this field of a configuration object is on the list of its class or of a base class."""
    return any(field in HARMLESS.get(kind.__name__, ()) for kind in type(config).__mro__)
