"""Mutants of `adapters/vllm`: the connector, and what must agree."""

from __future__ import annotations

from support.mutation import Mutant

SOURCES = "adapters/vllm/sources.py"
SUPPORT = "adapters/vllm/support.py"
BACKENDS = "adapters/vllm/backends.py"
CONNECTOR = "adapters/vllm/connector.py"
CHUNKS = "adapters/vllm/chunks.py"
VARIANTS = "adapters/vllm/variants.py"
LORAS = "adapters/vllm/loras.py"
LOOKED_AT = "issues/adapters/test_each_chunk_of_a_lora_looked_at_its_files.py"
TURNS = "issues/adapters/test_a_session_kept_what_its_first_turn_was.py"
DURABILITY = "adapters/test_durability.py"
STATE_TESTS = ("adapters/test_groups.py", "adapters/test_states.py")
IDENTITY = "adapters/vllm/identity.py"
CONTEXT_LENGTH = "adapters/vllm/context_length.py"
FOREIGN_CODE = "adapters/vllm/foreign_code.py"
CANONICAL = "adapters/vllm/canonical.py"
SESSIONS = "issues/adapters/test_a_sessions_chunks_had_other_tokens_keys.py"
OUT_OF_SYNC = "issues/adapters/test_an_idle_restarted_engine_stayed_out_of_sync.py"
IDENTITY_TESTS = tuple(
    f"adapters/identity/test_{subject}.py"
    for subject in ("harmless_settings", "counted_settings", "private_engines", "identity_at_daemon")
)
EMBEDDINGS = "issues/adapters/test_embeddings_of_another_dtype_were_shared.py"
LENGTHS = "issues/adapters/test_the_length_of_a_context_counted_for_no_package.py"
CODE = "issues/adapters/test_code_that_is_not_vllms_was_in_no_identity.py"
EXPERTS = "issues/adapters/test_a_hit_without_routed_experts_ended_the_engine.py"
UNLISTED = "issues/adapters/test_what_the_identity_did_not_list_was_shared.py"

MUTANTS = (
    # ---- backends.py --------------------------------------------------------------------------------
    Mutant(
        "scales are filled over what was loaded",
        BACKENDS, "begin_scales", '.endswith("per_token_head")', '.endswith("none")',
        ("issues/adapters/test_scales_were_filled_over_a_load.py",),
    ),
    # ---- canonical.py -------------------------------------------------------------------------------
    Mutant(
        "a field that no class declares does not count",
        CANONICAL, "counted_fields", 'declared | set(getattr(config, "__dict__", ()))', "declared", IDENTITY_TESTS,
    ),
    # ---- chunks.py ----------------------------------------------------------------------------------
    Mutant(
        "states are read from the block table, whose blocks hold other states",
        CHUNKS, "Chunks.offered", "[NULL_BLOCK] * len(table) if member in self.states else table", "[*table]",
        STATE_TESTS,
    ),
    Mutant(
        "a state within a block is stored as the one at its end",
        CHUNKS, "Chunks.offered", "if not rest", "if True", STATE_TESTS,
    ),
    Mutant(
        "chunks with a null block are stored",
        CHUNKS, "Chunks.whole", "NULL_BLOCK in tables", "None in tables",
        ("adapters/test_groups.py::test_an_object_that_the_window_left_a_block_of_is_not_whole",),
    ),
    Mutant(
        "a load leaves blocks as they were that no object covers",
        CHUNKS, "Chunks.to_load", "first < begin or ", "",
        ("adapters/test_groups.py::test_a_block_that_no_object_covers_is_not_loaded",),
    ),
    Mutant(
        "a load begins at the start of its chunk",
        CHUNKS, "Chunks.to_load", "return chunks, first - begin, ", "return chunks, 0, ",
        ("adapters/test_reuse.py::test_blocks_that_the_engine_has_itself_are_left_out_of_a_load",),
    ),
    Mutant(
        "neighbouring chunks are named by the hashes of their first blocks",
        CHUNKS, "Chunks._keys", "hashes[(chunks.start + 1) * step - 1 :", "hashes[chunks.start * step :",
        ("adapters/test_chunk_contents.py::test_a_chunks_key_is_its_last_blocks_hash",),
    ),
    Mutant(
        "a single chunk is named by the hash of its first block",
        CHUNKS, "Chunks._keys", "hashes[(chunk + 1) * step - 1]", "hashes[chunk * step]",
        ("adapters/test_chunk_contents.py::test_a_chunks_key_is_its_last_blocks_hash",),
    ),
    # ---- connector.py -------------------------------------------------------------------------------
    Mutant(
        "an exception of ours reaches the engine",
        CONNECTOR, "fenced", "return default() if callable(default) else default", "raise",
        ("adapters/test_refusals.py::test_a_fault_once_is_counted_logged_and_survived",),
    ),
    Mutant(
        "loads of a step with a fault are not answered for",
        CONNECTOR, "KVServerConnector._begin_loads", "worker.answer_for_loads(plan)", "pass",
        ("adapters/test_refusals.py::test_a_fault_before_a_load_begins_fails_that_load_and_no_other",),
    ),
    Mutant(
        "vLLM does not know that hits are of the host's memory",
        CONNECTOR, "KVServerConnector.get_external_cache_hit_sources", "(HOST, l1)", "(None, l1)",
        ("adapters/test_connector_stats.py::test_vllms_prometheus_has_the_sums",),
    ),
    Mutant(
        "an engine that is never asked anything never states why it has no cache",
        CONNECTOR, "KVServerConnector.has_pending_push_work", "not self._stepped or ", "",
        ("adapters/test_cache_is_on.py::test_an_engine_without_any_request_reports_that_it_has_its_cache",),
    ),
    Mutant(
        "sleep takes memory away that is still written",
        CONNECTOR, "KVServerConnector.unregister_kv_caches", "if not self._unregister():",
        "if not self._unregister() and False:",
        ("adapters/test_sleep.py::test_sleep_fails_while_a_hung_daemon_may_write",),
    ),
    Mutant(
        "an engine that computed registers as one that did not",
        CONNECTOR, "KVServerConnector._begin_loads", "|= not plan.idle", "|= False", (OUT_OF_SYNC,),
    ),
    Mutant(
        "an engine whose first step computes nothing registers as one that has computed",
        CONNECTOR, "KVServerConnector._begin_loads", "|= not plan.idle", "|= True", (OUT_OF_SYNC,),
    ),
    # ---- context_length.py --------------------------------------------------------------------------
    Mutant(
        "a length that was fitted to the memory counts",
        CONTEXT_LENGTH, "counted_length", "== -1", "== -2", IDENTITY_TESTS,
    ),
    Mutant(
        "of a package one file is read",
        CONTEXT_LENGTH, "_files", 'origin.parent.rglob("*.py") if', "[origin] if", (LENGTHS,),
    ),
    Mutant(
        "what a model imports of another one is not read",
        CONTEXT_LENGTH, "names_it", "if each in known", "if False", (LENGTHS,),
    ),
    # ---- foreign_code.py ----------------------------------------------------------------------------
    Mutant(
        "code of others counts by its name",
        FOREIGN_CODE, "code_of", "return code_digest(_places(package))", "return package", (CODE,),
    ),
    Mutant(
        "an operation that others replaced does not count",
        FOREIGN_CODE, "_registered", '"op_registry_oot"', '"none"', (CODE,),
    ),
    Mutant(
        "remote code of another repository does not count",
        FOREIGN_CODE, "_elsewhere", 'partition("--")', 'partition("?")', (CODE,),
    ),
    # ---- identity.py --------------------------------------------------------------------------------
    Mutant(
        "keys of a random chain are durable",
        IDENTITY, "chain_durability", " if start in [", " if True or start in [", (DURABILITY,),
    ),
    Mutant(
        "keys of xxhash are durable",
        IDENTITY, "chain_durability", 'if not algorithm.startswith("sha256"):', 'if False:', (DURABILITY,),
    ),
    Mutant(
        "samples of a model's files name it on other machines",
        IDENTITY, "with_weights", "if not (model_version or", "if False and not (model_version or", (DURABILITY,),
    ),
    Mutant(
        "an engine that counts its images shares them",
        IDENTITY, "config_identity", "and not cache.enable_prefix_caching:", "and False:", IDENTITY_TESTS,
    ),
    Mutant(
        "weights at another place without files have the name of none",
        IDENTITY, "weights_of", "        if model_version:\n            return", "        if True:\n            return",
        IDENTITY_TESTS,
    ),
    # ---- sources.py ---------------------------------------------------------------------------------
    Mutant(
        "the tokens of a failed load count as loaded",
        SOURCES, "Sources.load_failed", "            account.loading = None\n", "", ("adapters/test_sources.py",),
    ),
    Mutant(
        "a request that was resumed counts as it was placed then",
        SOURCES, "Sources.placed", " and request.num_preemptions <= 0", "", ("adapters/test_sources.py",),
    ),
    # ---- support.py ---------------------------------------------------------------------------------
    Mutant(
        "sessions are served whose hashes are other tokens'",
        SUPPORT, "rehashes_sessions", ">= (0, 32)", ">= (0, 0)", (SESSIONS,),
    ),
    Mutant(
        "states are served where no state is kept at the end of a block",
        SUPPORT, "_states_not_served", 'spec.mamba_cache_mode != "align"', "False", ("adapters/test_refusals.py",),
    ),
    Mutant(
        "states are served with speculative decoding",
        SUPPORT, "_states_not_served", "vllm_config.speculative_config", "False", ("adapters/test_refusals.py",),
    ),
    Mutant(
        "hits without experts are loaded",
        SUPPORT, "takes_hits_without_experts_back", 'hasattr(AuxOutputSchedulerConnector, "cap_external_hit")', "True",
        (EXPERTS,),
    ),
    # ---- variants.py --------------------------------------------------------------------------------
    Mutant(
        "engines whose hashes start elsewhere share",
        VARIANTS, "Variants.epoch", 'parts = [f"chain={self._chain}"]', "parts = ['']",
        ("adapters/test_variants.py::test_a_variant_is_a_short_text_that_distinguishes_chain_weights_and_lora",),
    ),
    Mutant(
        "embeddings of another dtype are shared",
        VARIANTS, "Variants._confuses_embeddings", "request.prompt_embeds.dtype != self._embeddings_dtype", "False",
        (EMBEDDINGS,),
    ),
    Mutant(
        "a prompt that runs while another dtype arrives is stored to its end",
        VARIANTS, "Variants.is_current", " and request.prompt_embeds is None", "", (EMBEDDINGS,),
    ),
    Mutant(
        "prompts of tokens and embeddings are shared",
        VARIANTS, "Variants.of", "request.prompt_is_token_ids is not None", "False", (EMBEDDINGS,),
    ),
    Mutant(
        "a second reset keeps the epoch of the first",
        VARIANTS, "Variants.weights_changed", "self._epoch += 1", "pass",
        ("adapters/test_resets.py::test_every_reset_begins_an_epoch_of_its_own",),
    ),
    Mutant(
        "images whose names users gave are shared",
        VARIANTS, "Variants.of", "and not self._trusts_uuids", "and False", ("adapters/test_variants.py",),
    ),
    Mutant(
        "a LoRA of the hub is shared",
        VARIANTS, "Variants.of", "known is not None and known.fingerprint is None", "False",
        ("adapters/test_variants.py",),
    ),
    Mutant(
        "KV of a private epoch is durable",
        VARIANTS, "Variants.of", "if private or self.private else", "if private else", (DURABILITY,),
    ),
    Mutant(
        "KV of images that users name is durable",
        VARIANTS, "Variants.of", "if private or self.private else", "if self.private else", (DURABILITY,),
    ),
    Mutant(
        "samples of a LoRA's files name it on other machines",
        VARIANTS, "Variants.of", "if not self._whole_digests:", "if False:", (DURABILITY,),
    ),
    Mutant(
        "a LoRA whose files were replaced is served",
        LORAS, "Loras._look", "_stamps(known.request) == known.stamps", "True", (UNLISTED,),
    ),
    Mutant(
        "KV is stored though a LoRA's files were replaced while its step ran",
        "adapters/vllm/acceptance.py", "Acceptance._take_accepted", "if same and", "if True and", (LOOKED_AT,),
    ),
    Mutant(
        "a store waits for ever for a look at a LoRA's files",
        "adapters/vllm/acceptance.py", "Acceptance._take_accepted", "and now < unsent.accepted_at + _LOOK_SECONDS", "",
        (f"{LOOKED_AT}::test_files_that_do_not_answer_hold_up_no_request",),
    ),
    Mutant(
        "the number of LoRAs is not bounded",
        LORAS, "Loras._add", "len(self._loras) >= MOST_LORAS", "False", (LOOKED_AT,),
    ),
    Mutant(
        "a LoRA that moved to another path goes on at the old one before vLLM 0.31",
        LORAS, "Loras._known", "self._replace(known)", "return None",
        ("issues/adapters/test_a_lora_at_a_new_path_had_the_old_ones_blocks.py",),
    ),
    # ---- sessions -----------------------------------------------------------------------------------
    Mutant(
        "a session that gains images stays in the shared namespace",
        "adapters/vllm/requests.py", "RequestState.begin_turn", "self.variant = variant", "pass", (TURNS,),
    ),
    Mutant(
        "a session keeps its first prompt's boundaries",
        "adapters/vllm/requests.py", "RequestState.begin_turn", "self.boundaries = None", "pass", (TURNS,),
    ),
    Mutant(
        "a session stores the tail of its first prompt only",
        "adapters/vllm/requests.py", "RequestState.begin_turn", "self.has_prompt_tail = self.give_up = False",
        "self.give_up = False", (TURNS,),
    ),
    Mutant(
        "what a later turn of a session wishes is ignored",
        "adapters/vllm/requests.py", "RequestState.begin_turn", "self.wishes = wishes", "pass", (TURNS,),
    ),
)  # fmt: skip
