"""Mutants of `kvserver/server`: requests and copies."""

from __future__ import annotations

from support.mutation import Mutant

STORES = "kvserver/server/stores.py"
LOADS = "kvserver/server/loads.py"
SERVER_COPIES = "kvserver/server/copies.py"
COPY_CHECKS = "kvserver/server/copy_checks.py"
HANDLERS = "kvserver/server/handlers.py"
L1_LOOKUPS = "kvserver/server/lookups.py"
UPKEEP = "kvserver/server/upkeep.py"
STATUS = "kvserver/server/status.py"
REFUSALS = "unit/server/test_refusals.py"
WHAT_IF_DAEMON = ("daemon/test_what_if.py",)
CLEARS = "kvserver/server/clears.py"
LOOP = "kvserver/server/loop.py"
CLEAR_TESTS = ("daemon/test_operator_clear.py",)
SERVING_TESTS = ("daemon/test_serving.py",)
SPILL_TESTS = ("unit/tiering/test_spill.py",)

MUTANTS = (
    # ---- loop.py ------------------------------------------------------------------------------------
    Mutant(
        "systemd ends a daemon that works",
        LOOP, "Server._keep_time", "self._guarded(report_alive, self.failure)", "pass", ("daemon/test_service_manager.py",),
    ),
    # ---- clears.py ----------------------------------------------------------------------------------
    Mutant(
        "a clear of one engine takes KV of others without a word",
        CLEARS, "Clears.clear", "not request.shared and (report.shared_with or shared_tiers)", "False", CLEAR_TESTS,
    ),
    Mutant("a dry run clears", CLEARS, "Clears.clear", "if request.dry_run:", "if False:", CLEAR_TESTS),
    Mutant(
        "what machines share counts as this one's",
        CLEARS, "Clears._tiers_of", "tier.shared and everywhere", "False", CLEAR_TESTS,
    ),
    Mutant(
        "a clear of many namespaces holds up the loop",
        CLEARS, "Clears._of_model", "if len(prefixes) > MOST_NAMESPACES:", "if False:", CLEAR_TESTS,
    ),
    Mutant(
        "KV of a model whose engines have left cannot be cleared by its name",
        CLEARS, "Clears._of_model", "for id in self._upkeep.cache.index.ids_of_model(model_name)", "for id in ()",
        CLEAR_TESTS,
    ),
    Mutant(
        "a clear of a model passes over KV of engines that are not known",
        CLEARS, "Clears._unnamed_tiers", "local[name].count((b\"\",)) > ", "0 > ", CLEAR_TESTS,
    ),
    # ---- copies.py ----------------------------------------------------------------------------------
    Mutant(
        "a load of chunks and blocks saves its tokens twice",
        SERVER_COPIES, "_counts_tokens", "(alone or not load.group.layout.tails)", "True", ("daemon/test_tails.py",),
    ),
    Mutant(
        "every rank counts the tokens that a load saved",
        SERVER_COPIES, "Copies._count_copied", "if _counts_tokens(ticket):", "if True:",
        ("daemon/test_counted_once.py",),
    ),
    Mutant(
        "skipped chunks count as stored",
        SERVER_COPIES, "Copies._count_copied", "counts.stored_chunks += chunks",
        "counts.stored_chunks += len(ticket.plan.prefix)", ("daemon/test_counted_once.py",),
    ),
    Mutant(
        "a copy that is late as it comes is begun",
        SERVER_COPIES, "Copies.namespace_of", "if request.deadline_ns <= self.now_ns():", "if False:",
        ("unit/server/test_refusals.py::test_nothing_is_evicted_for_a_store_whose_deadline_has_passed",),
    ),
    Mutant(
        "the word of a refused copy stays PENDING",
        SERVER_COPIES, "Copies.refuse", "worker.words.fail_word(request.word, request.sequence)", "pass", (REFUSALS,),
    ),
    Mutant(
        "a state word outside its page is written to",
        SERVER_COPIES, "Copies.worker_of", "if request.word >= worker.spec.words:", "if False:", (REFUSALS,),
    ),
    Mutant(
        "the blocks that a load leaves out are written",
        SERVER_COPIES, "Copies.submit", "skip=skip,", "skip=0,",
        ("daemon/test_round_trip.py::test_the_first_blocks_of_a_load_can_be_left_untouched",),
    ),
    Mutant(
        "the durability of a variant is ignored",
        SERVER_COPIES, "Copies.coverage_in_l2", "instance.durability(ticket.request.durability)",
        "instance.durability(Durability.ANYWHERE)", SPILL_TESTS,
    ),
    # ---- copy_checks.py -----------------------------------------------------------------------------
    Mutant(
        "half a key is a parent, of which the tier's index stops the loop",
        COPY_CHECKS, "store_blocks", "if request.after is not None and len(request.after) != KEY_BYTES:", "if False:",
        (REFUSALS,),
    ),
    Mutant(
        "the null block is stored and loaded into",
        COPY_CHECKS, "_block_ids", "packed, least, most)", "packed, least, most, 0xFFFFFFFF)", (REFUSALS,),
    ),
    Mutant(
        "the null block of a window is loaded into",
        COPY_CHECKS, "_block_ids", "packed, least, most)", "packed, least, most, 0xFFFFFFFF)",
        ("daemon/test_groups.py::test_a_bad_load_is_refused_and_writes_nothing",),
    ),
    Mutant(
        "a load may leave out a whole chunk",
        COPY_CHECKS, "load_blocks", "if request.skip_blocks >= group.blocks:", "if False:", (REFUSALS,),
    ),
    Mutant(
        "keys of chunks of another size are taken",
        COPY_CHECKS, "check_chunk", "if chunk_blocks != spec.chunk_blocks:", "if False:", (REFUSALS,),
    ),
    # ---- endpoint.py --------------------------------------------------------------------------------
    Mutant(
        "two daemons serve one endpoint after its folder was removed",
        "kvserver/server/endpoint.py", "Endpoint.keep_bound", "if not _is_at(self._lock_path, self._lock):", "if False:",
        (
            "issues/test_paths_once_bound_were_trusted_for_ever.py"
            "::test_what_was_removed_is_bound_again_and_engines_stay_connected",
        ),
    ),
    # ---- serving.py, and who asks it ---------------------------------------------------------------
    Mutant(
        "a lookup finds chunks although serving is off",
        L1_LOOKUPS, "L1Lookups._unavailable", "self.devices.lost or self.serving.why_nothing_is_found", "self.devices.lost",
        SERVING_TESTS,
    ),
    Mutant(
        "the second half of a lookup finds blocks although serving is off",
        L1_LOOKUPS, "L1Lookups.answer_tail", "if self._unavailable:", "if False:", SERVING_TESTS,
    ),
    Mutant(
        "a store is taken although stores are off",
        STORES, "Stores._plan", "if not self.serving.takes_stores:", "if False:", SERVING_TESTS,
    ),
    Mutant(
        "with stores off nothing is found",
        "kvserver/server/serving.py", "Serving.why_nothing_is_found", 'if self.mode == "off"', 'if self.mode != "on"',
        SERVING_TESTS,
    ),
    # ---- handlers.py --------------------------------------------------------------------------------
    Mutant(
        "a lookup that waits for its tail is forgotten with its request",
        HANDLERS, "Handlers.handle", "self.lookups.complete((request.instance_id, request.request_id))", "pass",
        ("daemon/test_tails.py",),
    ),
    Mutant(
        "a copy meant for the last daemon is taken",
        HANDLERS, "Handlers._check_boot", "if boot_id != self.hello.boot_id:", "if False:", (REFUSALS,),
    ),
    Mutant(
        "every version is spoken",
        HANDLERS, "Handlers._hello", "if not OLDEST_PROTOCOL_VERSION <= request.protocol_version <= PROTOCOL_VERSION:",
        "if False:", (REFUSALS,),
    ),
    # ---- loads.py -----------------------------------------------------------------------------------
    Mutant(
        "a load that cannot be queued keeps its chunks pinned",
        LOADS, "Loads._copy", "            self.cache.finish_load(found, copied=False)\n", "",
        ("daemon/test_copies_not_taken.py",),
    ),
    # ---- lookups.py ---------------------------------------------------------------------------------
    Mutant(
        "a hit is reported although the device is lost",
        L1_LOOKUPS, "L1Lookups.answer", "if namespace is None or self._unavailable:", "if namespace is None:",
        ("daemon/test_device_loss.py",),
    ),
    Mutant(
        "what a fill read counts as of L1",
        L1_LOOKUPS, "L1Lookups.answer_again", "l2_chunks=l2_chunks", "l2_chunks=0",
        ("unit/tiering/test_fill_counts.py::test_the_reply_counts_the_chunks_of_each_tier",),
    ),
    # ---- status.py ----------------------------------------------------------------------------------
    Mutant(
        "the status shows no memory nodes",
        STATUS, "", "numa_nodes=list(placement.nodes)", "numa_nodes=[]",
        ("daemon/test_l1_memory.py::test_l1_may_stay_on_one_node",),
    ),
    # ---- stores.py ----------------------------------------------------------------------------------
    Mutant(
        "stores do not state how many pages an object has",
        STORES, "Stores._publish_ready", "keys, group.objects, pages)", "keys, group.objects, 0)", WHAT_IF_DAEMON,
    ),
    Mutant(
        "objects are dropped although the store that replaces them failed",
        STORES, "Stores._drop", "not self.cache.has_objects(namespace, group.number, ticket.request.keys)", "False",
        ("daemon/test_object_groups.py",),
    ),
    Mutant(
        "a store writes the objects of group 0 whatever its group",
        STORES, "Stores._plan_objects", "group=group.number, slot", "group=0, slot", ("daemon/test_object_groups.py",),
    ),
    Mutant(
        "a tail is published as if it were chunks",
        STORES, "Stores._publish_ready", "group.chunks_namespace(ticket.namespace)", "ticket.namespace",
        ("daemon/test_tails.py",),
    ),
    Mutant(
        "of groups that all ranks have alike each block is stored by every rank",
        STORES, "Stores._plan_objects", "places = own_places(request, worker, group)",
        "places = range(chunk_count(request.keys))", ("daemon/test_tails.py",),
    ),
    Mutant(
        "what a disconnected worker stored is published",
        STORES, "Stores.ended", "completion.done and not ticket.worker.closing", "completion.done",
        ("model/test_random_walk.py",),
    ),
    Mutant(
        "a store that was whole after its deadline is published",
        STORES, "Stores.ended", "completion.done and self.copies.now_ns() > ticket.request.deadline_ns", "False",
        ("issues/test_a_late_store_was_published.py",),
    ),
    Mutant(
        "a part of the chunks is stored from the first blocks",
        STORES, "Stores._copy", "in plan.positions]", "in range(len(plan.positions))]",
        ("daemon/test_groups.py::test_a_part_of_the_chunks_is_stored_from_the_right_blocks",),
    ),
    Mutant(
        "a store that cannot be queued keeps its slots pinned",
        STORES, "Stores._copy", "            self.cache.finish_store(plan, copied=False)\n", "",
        ("daemon/test_copies_not_taken.py",),
    ),
    Mutant(
        "a store that waits goes on for a disconnected worker",
        STORES, "Stores._extend_plan", "if ticket.worker.closing:", "if False:",
        ("issues/test_turns_grew_with_the_cache.py::test_a_worker_that_closes_while_its_store_waits_is_unmapped_and_leaves_nothing",),
    ),
    Mutant(
        "each message of a prompt begins a chain of its own in a tier",
        STORES, "Stores._publish_ready", 'ticket.request.after or b""', 'b""', ("issues/test_a_prompt_stored_in_several_messages_left_l2_from_its_start.py",),
    ),
    Mutant(
        "a chunk behind those that L1 had has no parent",
        STORES, "Stores._publish_ready", "ticket.plan.prefix, after", "ready, after", ("issues/test_a_prompt_stored_in_several_messages_left_l2_from_its_start.py",),
    ),
    # ---- upkeep.py ----------------------------------------------------------------------------------
    Mutant(
        "copies in flight are not cancelled at the daemon's end",
        UPKEEP, "Upkeep.drain", "self.workers.close_all(Disconnect.STOPPED)", "pass",
        ("daemon/test_operation.py::test_sigterm_ends_copies_in_flight_long_before_they_are_done_and_exits_zero",),
    ),
    Mutant(
        "a worker whose memory was taken away stays",
        UPKEEP, "Upkeep._complete", "self.workers.close_worker(worker, Disconnect.DIED)", "pass",
        ("daemon/test_truncated_memory.py::test_memory_truncated_during_a_store_drops_the_instance_and_publishes_nothing",),
    ),
    Mutant(
        "the ticket of an ended copy keeps the memory mapped",
        UPKEEP, "Upkeep._complete", "worker.tickets.discard(completion.number)", "pass",
        ("daemon/test_failures.py::test_unregister_with_copies_in_flight_is_answered_when_the_memory_is_unmapped",),
    ),
    Mutant(
        "an audit on request hides that the accounting does not balance",
        UPKEEP, "Upkeep._audit", "outcome = Audit.UNBALANCED", "pass",
        ("daemon/test_operation.py::test_an_audit_on_request_states_whether_the_accounting_balances",),
    ),
)  # fmt: skip
