"""Mutants of `adapters/vllm`: the scheduler half and what it plans."""

from __future__ import annotations

from support.mutation import Mutant

EPOCHS = "adapters/vllm/epochs.py"
SCHEDULER = "adapters/vllm/scheduler.py"
SLEEPS = "adapters/vllm/sleeps.py"
SLEPT = "issues/adapters/test_nothing_was_found_again_after_sleep.py"
REQUESTS = "adapters/vllm/requests.py"
HITS = "adapters/vllm/hits.py"
PROMISES = "adapters/vllm/promises.py"
FAILED_LOADS_TEST = "adapters/test_failed_loads.py"
PROMISES_TEST = "adapters/test_promises.py"
STORE_PLANS = "adapters/vllm/store_plans.py"
LOAD_PLANS = "adapters/vllm/load_plans.py"
BLOCKPOOL = "adapters/vllm/blockpool.py"
PINS = "adapters/test_pins.py"
STATE_TESTS = ("adapters/test_groups.py", "adapters/test_states.py")
NEW_DAEMON = "issues/adapters/test_a_new_daemon_lacked_what_the_old_one_had.py"
RESET = "issues/adapters/test_a_reset_failed_over_quarantined_blocks.py"
SESSIONS = "issues/adapters/test_a_sessions_chunks_had_other_tokens_keys.py"
UNLISTED = "issues/adapters/test_what_the_identity_did_not_list_was_shared.py"

ONE_BLOCK = "issues/adapters/test_a_load_of_one_block_held_up_each_warm_request.py"
LAST_BLOCKS = "issues/adapters/test_a_request_waited_for_the_last_blocks_that_stores_kept.py"
SHORTAGE = "adapters/vllm/shortage.py"
PAUSED = "issues/adapters/test_a_pause_beside_a_load_raised.py"
FORGOTTEN = "adapters/vllm/forgotten.py"
TAKEN_BACK = "issues/adapters/test_kv_of_a_step_that_vllm_took_back_was_stored.py"
ACCEPTANCE = "adapters/vllm/acceptance.py"

MUTANTS = (
    # ---- acceptance.py ------------------------------------------------------------------------------
    Mutant(
        "a store goes out with the step that computes its KV",
        ACCEPTANCE, "Acceptance.hold", "self._planning.stores.append(", "self._accept(", (TAKEN_BACK,),
    ),
    Mutant(
        "a store leaves by the mark in front of its own step",
        ACCEPTANCE, "Acceptance.hold", "self._step + 1", "self._step", ("adapters/test_ordering.py",),
    ),
    Mutant(
        "a step that vLLM dropped counts as accepted",
        ACCEPTANCE, "Acceptance._drop_step", "self._drop(unsent)", "self._accept(unsent)", (TAKEN_BACK,),
    ),
    Mutant(
        "blocks of a dropped step are trusted",
        ACCEPTANCE, "Acceptance._drop_step", "self._suspect(table[before // tokens :])", "pass",
        (f"{TAKEN_BACK}::test_what_later_requests_compute_behind_such_a_step_is_not_found",),
    ),
    Mutant(
        "what vLLM takes back of a request is stored all the same",
        ACCEPTANCE, "Acceptance._still_computed",
        "unsent.end_tokens <= min(unsent.state.request.num_computed_tokens, unsent.state.trusted_tokens)", "True", (TAKEN_BACK,),
    ),
    Mutant(
        "only the blocks that failed to load are garbage, not what was computed behind them",
        ACCEPTANCE, "Acceptance.invalid_blocks", "state.trusted_tokens = min(state.trusted_tokens, place * tokens)", "pass",
        (TAKEN_BACK,),
    ),
    Mutant(
        "what a sibling loaded is stored",
        ACCEPTANCE, "Acceptance.loaded_by_sibling", "self._suspect(table[first // tokens : -(-end // tokens)])", "pass",
        (TAKEN_BACK,),
    ),
    Mutant(
        "an aborted request's step is accepted",
        SCHEDULER, "SchedulerHalf._plan_last_stores", "min(state.accepted_tokens, state.computed) if aborted else state.computed", "state.computed",
        (TAKEN_BACK,),
    ),
    # ---- blockpool.py -------------------------------------------------------------------------------
    Mutant(
        "quarantined blocks keep vLLM from a reset",
        BLOCKPOOL, "PoolHook._unpinned", "self.unpin(pinned)", "pinned = []", (RESET,),
    ),
    Mutant("a reset frees quarantined blocks", BLOCKPOOL, "PoolHook._unpinned", "self.pin(pinned)", "pass", (RESET,)),
    Mutant(
        "a pin counts as an owner of its block",
        BLOCKPOOL, "", "_PIN = 1 << 20", "_PIN = 1",
        ("adapters/test_blockpool.py::test_a_pinned_block_never_has_as_many_references_as_requests_share_it",),
    ),
    Mutant(
        "blocks that only pins keep are not counted",
        BLOCKPOOL, "PoolHook._releasing", "self.kept.update(", "list(", (PINS,),
    ),
    Mutant(
        "a block that a request shares again counts as kept",
        BLOCKPOOL, "PoolHook.on_block_accessed", "self.kept.discard(block.block_id)", "pass",
        ("adapters/test_blockpool.py",),
    ),
    Mutant(
        "pins of quarantined blocks are reported as owners",
        BLOCKPOOL, "PoolHook._state", "block.ref_cnt % _PIN", "min(block.ref_cnt, 9)", ("adapters/test_blockpool.py",),
    ),
    Mutant(
        "a release of another pool's block is recorded as this pool's",
        BLOCKPOOL, "PoolHook._releasing", 'and getattr(b, "pool", None) in ours', "",
        ("adapters/test_blockpool.py::test_blocks_of_another_pool_are_that_pools_to_release",),
    ),
    Mutant(
        "an allocation is not reported",
        BLOCKPOOL, "PoolHook.on_block_allocated", "self._append(_ALLOCATED | block.block_id)", "pass",
        ("adapters/test_blockpool.py",),
    ),
    # ---- hits.py ------------------------------------------------------------------------------------
    Mutant(
        "a prompt of more chunks than a message takes is refused",
        HITS, "Hits._useful_chunks", ", MAX_CHUNKS)", ")",
        ("issues/adapters/test_a_very_long_prompt_was_always_a_miss.py",),
    ),
    Mutant(
        "more is loaded for a request than it wants",
        HITS, "Hits._useful_chunks", "state.wishes.most_tokens // self._chunks.tokens", "MAX_CHUNKS",
        ("adapters/test_wishes.py",),
    ),
    Mutant(
        "a hit leaves no token to compute",
        HITS, "Hits._usable", "int(request.num_tokens) - 1", "int(request.num_tokens)",
        ("adapters/test_reuse.py::test_a_prompt_of_whole_chunks_leaves_its_last_token_to_compute",),
    ),
    Mutant(
        "a hit does not count what the engine has itself",
        HITS, "Hits._worth_loading", "self._usable(request, found) - local_tokens", "self._usable(request, found)",
        ("adapters/test_reuse.py::test_blocks_that_the_engine_has_itself_are_left_out_of_a_load",),
    ),
    Mutant(
        "a request waits for a load of one block",
        HITS, "Hits._worth_loading", " or tokens <= _FREE_TOKENS", "",
        (f"{ONE_BLOCK}::test_beside_its_own_prefix_an_engine_computes_one_block_and_loads_two",),
    ),
    Mutant(
        "a hit has the block that vLLM leaves out of its own",
        HITS, "Hits._usable", "self._facts.drops_last_block and self._chunks.only_full", "False", (ONE_BLOCK,),
    ),
    Mutant(
        "a hit of windows ends where these have nothing",
        HITS, "Hits._usable", "and self._chunks.only_full", "",
        (f"{ONE_BLOCK}::test_an_engine_of_a_hybrid_loads_whole_chunks",),
    ),
    Mutant(
        "an engine that has a prompt itself waits for the answer",
        HITS, "Hits.tokens_to_load", "if has_all:", "if False:",
        ("adapters/test_reuse.py::test_an_engine_that_has_a_prompt_itself_waits_for_no_answer",),
    ),
    Mutant(
        "an engine that has a prompt itself awaits a fill",
        HITS, "Hits.has_all", "self._lookups.forgo(state)", "pass",
        ("adapters/test_fills.py::test_an_engine_that_has_a_prompt_itself_awaits_no_fill",),
    ),
    Mutant(
        "a preempted request keeps its old answer",
        HITS, "Hits._answer_to", "            state.answer = None\n", "",
        ("adapters/test_reuse.py::test_preempted_requests_go_on_and_load_what_they_had_stored",),
    ),
    Mutant(
        "an answer from before a failure is loaded",
        HITS, "Hits._answer_to", "state.answer.hit_chunks > self._useful_chunks(state)", "False",
        (f"{FAILED_LOADS_TEST}::test_an_answer_from_before_a_failure_is_not_used_as_far_as_it_failed",),
    ),
    Mutant(
        "an engine that cannot prefill after a hit is given one",
        HITS, "Hits.tokens_to_load", "self._facts.whole_prompts_only and", "False and",
        ("adapters/test_whole_prompts.py",),
    ),
    # ---- load_plans.py ------------------------------------------------------------------------------
    Mutant(
        "single blocks behind the end of the chunks are not loaded",
        LOAD_PLANS, "LoadPlanner.plan", "if end > of_chunks:", "if False:",
        ("adapters/test_tails.py::test_a_prompt_is_found_up_to_its_last_whole_block",),
    ),
    # ---- promises.py --------------------------------------------------------------------------------
    Mutant(
        "promised tokens whose load failed count as loaded",
        PROMISES, "Promises.failed", "promise.placed:", "False:", (PROMISES_TEST,),
    ),
    Mutant(
        "a promise that vLLM does not use is forgotten",
        PROMISES, "Promises.placed", " - l1, promise.l2 - l2,", " - promise.l1, 0,", (PROMISES_TEST,),
    ),
    # ---- requests.py --------------------------------------------------------------------------------
    Mutant(
        "a resumed request keeps the blocks that it lost",
        REQUESTS, "Requests._follow_tables", "state.tables = ()", "pass",
        ("issues/adapters/test_vllm_0_29_stored_nothing.py::test_preempted_requests_are_stored_from_their_new_blocks",),
    ),
    # ---- sleeps.py ----------------------------------------------------------------------------------
    Mutant(
        "a reset that no sleep explains keeps sharing",
        SLEEPS, "Sleeps.reported", "resets > explained", "False", (SLEPT,),
    ),
    Mutant(
        "a sleep explains every reset before it",
        SLEEPS, "Sleeps.reported", "resets > explained", "resets > 0 == explained", (SLEPT,),
    ),
    Mutant(
        "a step of a sleeping engine decides",
        SLEEPS, "Sleeps.reported", "wakes == ASLEEP", "False", (SLEPT,),
    ),
    Mutant(
        "requests wait for a report that never comes",
        SLEEPS, "Sleeps.gave_up", "now < self._deadline", "True", (SLEPT,),
    ),
    Mutant(
        "what is found while a reset is in question is loaded",
        SCHEDULER, "SchedulerHalf.matched_tokens", "self._epochs.in_question()", "False", (SLEPT,),
    ),
    # ---- scheduler.py -------------------------------------------------------------------------------
    Mutant(
        "the report of a load's blocks goes before the load",
        SCHEDULER, "SchedulerHalf.plan_step", "if not (idle and self._plan.loads):", "if True:",
        ("adapters/test_reports.py::test_a_load_that_alone_is_waited_for_goes_before_the_report_of_its_blocks",),
    ),
    Mutant(
        "what was computed upon a session's blocks is stored",
        SCHEDULER, "SchedulerHalf.new_request", "self._stale_hashes = True", "pass", (SESSIONS,),
    ),
    Mutant(
        "a request that must not be stored is",
        SCHEDULER, "SchedulerHalf.plan_step", "if may_store and state.wishes.stores and not state.lost:",
        "if may_store and not state.lost:", ("adapters/test_wishes.py",),
    ),
    # ---- shortage.py --------------------------------------------------------------------------------
    Mutant(
        "stores are cancelled for blocks that the engine does not need",
        SHORTAGE, "Shortage.pass_ended", "or soon > free", "or True",
        (f"{PINS}::test_an_engine_with_room_keeps_the_blocks_of_all_its_stores",),
    ),
    Mutant(
        "a running request is preempted for blocks that stores keep",
        SHORTAGE, "Shortage.pass_ended", "or soon > free", "", (LAST_BLOCKS,),
    ),
    Mutant(
        "a request waits for blocks that stores keep",
        SHORTAGE, "Shortage.pass_ended", "self._passes >= PATIENCE", "False", (LAST_BLOCKS,),
    ),
    Mutant(
        "stores are cancelled though the request needs more",
        SHORTAGE, "Shortage.pass_ended", "self._blocks(have, tokens) <= free + kept", "True", (f"{LAST_BLOCKS}::test_stores_go_on_while_a_request_waits_that_needs_more_than_they_keep",),
    ),
    Mutant(
        "stores of a healthy daemon are cancelled",
        SHORTAGE, "Shortage.pass_ended", "self._passes >= PATIENCE", "self._passes >= 1",
        (f"{LAST_BLOCKS}::test_a_store_of_a_healthy_daemon_ends_before_it_is_cancelled",),
    ),
    Mutant(
        "a request is thought to need its whole prompt where vLLM admits a part",
        SHORTAGE, "Shortage.asked", "else self._admitted_tokens", "else request.num_tokens", (f"{LAST_BLOCKS}::test_stores_are_cancelled_for_one_step_of_a_prompt_where_vllm_admits_that",),
    ),
    Mutant(
        "a request that was loaded waits for blocks that stores keep",
        SHORTAGE, "Shortage.pass_ended", "list(self._loaded())", "[]",
        (f"{LAST_BLOCKS}::test_a_request_that_was_loaded_is_served_beside_stores_that_keep_blocks",),
    ),
    Mutant(
        "requests without cache wait for blocks that stores keep",
        SCHEDULER, "SchedulerHalf.matched_tokens", "self._shortage.asked(request, local_tokens, 0)", "pass",
        (f"{LAST_BLOCKS}::test_a_request_without_cache_is_served_as_well",),
    ),
    # ---- forgotten.py -------------------------------------------------------------------------------
    Mutant(
        "KV of before a reset is used",
        FORGOTTEN, "WaitingForLoads.reset", "self.begin_again(set(found))", "pass", (PAUSED,),
    ),
    Mutant(
        "a reset fails beside a load",
        FORGOTTEN, "WaitingForLoads.blocks", "if self._may_forget(each)", "if False", (PAUSED,),
    ),
    Mutant(
        "a reset that is to disturb no request cancels a load",
        FORGOTTEN, "WaitingForLoads.blocks", "not resets_running_requests()", "False", (PAUSED,),
    ),
    Mutant(
        "blocks of requests that load are free after a reset",
        BLOCKPOOL, "PoolHook._unpinned", 'self._mutely("touch", blocks)', "pass", (PAUSED,),
    ),
    Mutant(
        "stores are cancelled for a request that waits for its answer",
        SCHEDULER, "SchedulerHalf.matched_tokens", "if tokens is not None:\n            self._shortage.asked(request, local_tokens, tokens)",
        "self._shortage.asked(request, local_tokens, tokens or 0)", ("issues/adapters/test_stores_were_cancelled_while_a_lookup_was_awaited.py",),
    ),
    Mutant(
        "stores go on when the weights may have changed",
        SCHEDULER, "SchedulerHalf._begin_epoch", "self._cancel_stores(list(self._pins))", "pass",
        (f"{PINS}::test_a_reset_succeeds_beside_stores_and_cancels_them",),
    ),
    Mutant(
        "a new session keeps what was stored in the last one",
        SCHEDULER, "SchedulerHalf._begin_session", "            state.store_again()\n", "",
        (f"{NEW_DAEMON}::test_a_running_requests_first_chunks_are_stored_again",),
    ),
    Mutant(
        "a new session keeps the answers of the last one",
        SCHEDULER, "SchedulerHalf._begin_session", "            state.answer = None\n", "",
        ("adapters/test_waiting_requests.py::test_what_the_last_daemon_had_is_not_loaded_from_the_next_one",),
    ),
    Mutant(
        "after a reset the old answers count",
        SCHEDULER, "SchedulerHalf._begin_epoch", "            state.answer = None\n", "",
        ("adapters/test_waiting_requests.py::test_what_the_old_weights_made_is_not_loaded_after_a_reset",),
    ),
    Mutant(
        "after a reset requests store into the old epoch",
        SCHEDULER, "SchedulerHalf._begin_epoch", "state.variant = self._variants.of(state.request) or state.variant",
        "pass", ("adapters/test_resets.py",),
    ),
    Mutant(
        "a load under way at a reset is used",
        SCHEDULER, "SchedulerHalf._begin_epoch", "self._abort_loads(state)", "pass", ("adapters/test_resets.py",),
    ),
    Mutant(
        "KV of the old weights is stored after a reset",
        EPOCHS, "Epochs.reset_cache", "self._pool.clears + (not self._pool.unused)", "0",
        ("adapters/test_resets.py",),
    ),
    Mutant(
        "a request that is aborted while it loads stores blocks that were not filled",
        SCHEDULER, "SchedulerHalf.allocated", "state.computed = 0", "pass",
        (
            "adapters/test_tails.py::"
            "test_a_preempted_request_that_is_aborted_before_its_blocks_are_filled_stores_none_of_them",
        ),
    ),
    Mutant(
        "the state at the end of what prompts share is not requested",
        SCHEDULER, "SchedulerHalf.matched_tokens", "self._want_state(", "print(", STATE_TESTS,
    ),
    Mutant(
        "a request whose load failed tries again and again",
        SCHEDULER, "SchedulerHalf._load_failed", "state.give_up = True", "pass",
        (f"{FAILED_LOADS_TEST}::test_a_request_tries_one_load_whatever_is_remembered",),
    ),
    Mutant(
        "a load that failed is tried again by every request",
        SCHEDULER, "SchedulerHalf._load_failed", "self._failed.failed(load)", "pass", (FAILED_LOADS_TEST,),
    ),
    Mutant(
        "what a failed load did not bring is not stored",
        SCHEDULER, "SchedulerHalf._load_failed", "            state.store_again()\n", "",
        ("adapters/test_failures.py::test_cleared_between_lookup_and_load",),
    ),
    Mutant(
        "the load of an aborted request goes on",
        SCHEDULER, "SchedulerHalf.request_finished", "self._abort_loads(state)", "pass",
        ("adapters/test_ordering.py::test_a_load_that_is_aborted_is_never_sent",),
    ),
    Mutant(
        "chunks keep the size that the last daemon wanted",
        SCHEDULER, "SchedulerHalf._begin_session", "self._chunks.resize(", "print(",
        ("adapters/test_reuse.py::test_a_second_engine_loads_what_the_first_one_stored",),
    ),
    # ---- store_plans.py -----------------------------------------------------------------------------
    Mutant(
        "each message of a prompt begins a chain of its own in L2",
        STORE_PLANS, "StorePlanner._add_chunks", "if linked else None", "if False else None",
        ("issues/adapters/test_messages_of_one_prompt_named_no_chunk_before_them.py",),
    ),
    Mutant(
        "windows name the chunk before them, which may have been dropped",
        STORE_PLANS, "StorePlanner._add_chunks", 'and self._chunks.groups[group].kind == "full"', "",
        ("issues/adapters/test_messages_of_one_prompt_named_no_chunk_before_them.py",),
    ),
    Mutant(
        "ranks take turns within a message instead of a prompt",
        STORE_PLANS, "StorePlanner._add_chunks", "first_chunk=chunks.start", "first_chunk=0",
        ("adapters/test_ranks.py::test_ranks_take_turns_to_store_what_all_hold",),
    ),
    Mutant(
        "the position that a draft model rewrites is stored",
        STORE_PLANS, "StorePlanner._confirmed", "            tokens = request.num_tokens - 1", "            pass",
        ("adapters/test_reuse.py::test_with_a_draft_model_the_last_position_is_held_back",),
    ),
    Mutant(
        "rejected drafts are stored",
        STORE_PLANS, "StorePlanner._confirmed", "len(request.block_hashes) * self._chunks.hash_block_tokens",
        "computed", ("adapters/test_reuse.py::test_rejected_drafts_are_never_stored",),
    ),
    Mutant(
        "the last token of a request, whose KV is not computed, is stored",
        STORE_PLANS, "StorePlanner.plan_last", "request.num_tokens - 1 - self._facts.holds_back_tail",
        "request.num_tokens",
        ("adapters/test_tails.py::test_the_last_token_is_in_no_block_though_drafts_were_computed_there",),
    ),
    Mutant(
        "of a prompt that ends inside a block the end is stored once its answer has filled that",
        STORE_PLANS, "StorePlanner.plan", "computed >= state.request.num_prompt_tokens",
        "confirmed >= state.request.num_prompt_tokens",
        ("adapters/test_tails.py::test_the_end_of_a_prompt_is_found_after_its_answer_filled_the_chunk",),
    ),
    Mutant(
        "under async scheduling states of generated tokens are requested too late",
        STORE_PLANS, "StorePlanner.want_state", "min(computed, request.num_tokens)", "computed", STATE_TESTS,
    ),
    Mutant(
        "the engine's own wish for a state is forgotten",
        STORE_PLANS, "StorePlanner.want_state", "min(wanted, own) if own > tokens else wanted", "wanted", STATE_TESTS,
    ),
    Mutant(
        "keys that were stored anew stay remembered as failed",
        STORE_PLANS, "StorePlanner.copies_of", "1 if group.replicated else self._facts.world_size", "1 << 20",
        (FAILED_LOADS_TEST,),
    ),
    Mutant(
        "what is computed after a LoRA's files were replaced is stored",
        STORE_PLANS, "StorePlanner.plan", "if not self._variants.is_current(state.request, state.variant):",
        "if False:", (UNLISTED,),
    ),
)  # fmt: skip
