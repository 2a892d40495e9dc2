"""Arguments of SGLang that may differ between engines that share KV, each group with its reason.

An argument on no list counts, as do those that a newer SGLang adds. An argument is here only if, for the same key, it changes neither
K nor V beyond what the composition of a batch does to their last bits, nor what a key or a page means. Read in SGLang 0.5.23.

Owns: the lists. Refuses to know: how the rest is compared.
"""

from __future__ import annotations

_BY_REASON: dict[str, str] = {
    "the content of the model's files counts, not where they lie or how they are read": "model_path download_dir revision"
    " weight_loader_disable_mmap weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads"
    " weight_loader_drop_cache_after_load model_checksum engine_info_bootstrap_port trust_remote_code",
    "tokens are in the keys, however they were made": "tokenizer_path tokenizer_mode tokenizer_backend tokenizer_worker_num"
    " detokenizer_worker_num skip_tokenizer_init chat_template trust_request_chat_template hf_chat_template_name"
    " completion_template default_chat_template_kwargs enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_batch_size"
    " dynamic_batch_tokenizer_batch_timeout enable_tokenizer_batch_encode disable_tokenizer_batch_decode allow_auto_truncate",
    "how requests arrive and answers leave": "host port fastapi_root_path smg_grpc_mode grpc_mode grpc_port grpc_worker_threads sidecar"
    " sidecar_args skip_server_warmup warmups enable_http2 http2_max_concurrent_streams http2_initial_connection_window_size"
    " ssl_keyfile ssl_certfile ssl_ca_certs ssl_keyfile_password enable_ssl_refresh api_key admin_api_key served_model_name"
    " file_storage_path enable_cache_report return_input_ids return_output_ids reasoning_parser tool_call_parser tool_server"
    " sampling_defaults preferred_sampling_params stream_interval batch_notify_size stream_response_default_include_usage"
    " incremental_streaming_output enable_response_store grpc_response_timeout_secs enable_http_worker_reuseport"
    " asr_max_buffer_seconds asr_max_concurrent_sessions",
    "which token is chosen, and in what form": "sampling_backend grammar_backend constrained_json_whitespace_pattern"
    " constrained_json_disable_any_whitespace constrained_json_max_whitespace_cnt disable_outlines_disk_cache"
    " enable_custom_logit_processor sampling_mask_max_tokens random_seed mlx_enable_sampling",
    "which requests run together, and when": "max_running_requests max_queued_requests chunked_prefill_size prefill_decode_interval"
    " prefill_decode_interval_min_bs enable_dynamic_chunking max_prefill_tokens prefill_max_requests schedule_policy"
    " enable_priority_scheduling disable_priority_preemption default_priority_value abort_on_priority_when_disabled"
    " schedule_low_priority_values_first priority_scheduling_preemption_threshold retraction_policy schedule_conservativeness"
    " disable_overlap_schedule num_continuous_decode_steps scheduler_recv_interval enable_mixed_chunk enable_prefill_delayer"
    " prefill_delayer_max_delay_passes prefill_delayer_token_usage_low_watermark prefill_delayer_forward_passes_buckets"
    " prefill_delayer_wait_seconds_buckets prefill_delayer_queue_min_ratio prefill_delayer_max_delay_ms min_free_slots_delay",
    "how much memory there is, and what is evicted": "mem_fraction_static max_total_tokens swa_full_tokens_ratio"
    " max_mamba_cache_size mamba_full_memory_ratio radix_eviction_policy"
    " radix_eviction_policy_config _radix_eviction_policy_explicitly_set _swa_full_tokens_ratio_explicitly_set",
    "this linker, and tiers that SGLang refuses beside it": "enable_unified_cache_external_linker"
    " unified_cache_external_linker_backend unified_cache_external_linker_config hicache_host_memory_mode hicache_ratio hicache_size"
    " hicache_write_policy hicache_io_backend hicache_mem_layout hicache_storage_prefetch_policy"
    " hicache_storage_prefetch_retry_poll_interval hicache_storage_prefetch_retry_max_attempts hicache_host_memory_fraction"
    " lmcache_config_file flexkv_config_file",
    "where processes run and how they meet": "nccl_port dist_timeout dist_init_addr gated_launch_port dp_size load_balance_method"
    " base_gpu_id gpu_id_step watchdog_timeout soft_watchdog_timeout sleep_on_idle use_ray custom_sigquit_handler numa_node"
    " gc_threshold pp_max_micro_batch_size pp_async_batch_depth",
    "how steps are captured and replayed": "cuda_graph_config cuda_graph_backend_decode cuda_graph_backend_prefill"
    " cuda_graph_max_bs_decode cuda_graph_max_bs_prefill cuda_graph_bs_decode cuda_graph_bs_prefill cuda_graph_prefill_max_context"
    " cuda_graph_max_seq_len_prefill disable_prefill_cuda_graph disable_decode_cuda_graph disable_cuda_graph"
    " disable_cuda_graph_padding enable_profile_cuda_graph enable_cudagraph_gc debug_cuda_graph",
    "logs, metrics and traces": "log_level log_level_http log_requests log_requests_level log_requests_format log_requests_target"
    " uvicorn_access_log_exclude_prefixes crash_dump_folder show_time_cost enable_metrics smg_http_sidecar_port enable_mfu_metrics"
    " enable_metrics_for_all_schedulers load_snapshot_publish_interval tokenizer_metrics_custom_labels_header"
    " tokenizer_metrics_allowed_custom_labels extra_metric_labels bucket_time_to_first_token bucket_inter_token_latency"
    " bucket_e2e_request_latency prompt_tokens_buckets generation_tokens_buckets gc_warning_threshold_secs decode_log_interval"
    " enable_request_time_stats_logging kv_events_config load_publish_endpoint enable_forward_pass_metrics"
    " forward_pass_metrics_worker_id forward_pass_metrics_ipc_name enable_trace trace_modules otlp_traces_endpoint"
    " otlp_service_name export_metrics_to_file export_metrics_to_file_dir stat_loggers enable_layerwise_nvtx_marker",
}

HARMLESS = {name: reason for reason, names in _BY_REASON.items() for name in names.split()}

# Variables of SGLang that are set in one engine and not in another, by the same rule.
HARMLESS_VARIABLES = frozenset({
    "SGLANG_HOST_IP", "SGLANG_PORT", "SGLANG_DP_RANK", "SGLANG_CPU_OMP_THREADS_BIND", "SGLANG_LOG_MS", "SGLANG_CACHE_DIR",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE", "SGLANG_RUN_ID", "SGLANG_BLOCK_NONZERO_RANK_CHILDREN",
})  # fmt: skip
