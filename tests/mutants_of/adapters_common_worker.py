"""Mutants of `adapters/common`: copies, and blocks that must not be touched."""

from __future__ import annotations

from support.mutation import Mutant

LOAD_ENDS = "adapters/common/load_ends.py"
WORKER = "adapters/common/worker.py"
HAZARDS = "adapters/common/hazards.py"
COPIES = "adapters/common/copies.py"
ENDINGS = "adapters/common/endings.py"
FAILED_LOADS = "adapters/common/failed_loads.py"
FAILED_LOADS_TEST = "adapters/test_failed_loads.py"
PINS = "adapters/test_pins.py"
WITHOUT_END = "issues/adapters/test_stores_without_an_end_were_never_forgotten.py"
PLANES = "adapters/common/planes.py"
NOT_ADOPTED = "issues/adapters/test_a_copy_began_in_a_session_that_was_not_adopted.py"

MUTANTS = (
    # ---- copies.py ----------------------------------------------------------------------------------
    Mutant(
        "a running copy cannot be cancelled",
        COPIES, "Copy.cancel", " or self.move(State.RUNNING, running)", "",
        (f"{PINS}::test_a_load_into_blocks_that_a_store_keeps_waits_for_the_cancel_of_the_store",),
    ),
    Mutant(
        "a running load is taken for ended as soon as it is cancelled",
        COPIES, "Copy.cancel", "State.CANCELLED if isinstance(self.spec, StoreSpec) else State.CANCELLING",
        "State.CANCELLED",
        (
            "adapters/test_failures.py::test_stopped_during_a_load",
            "adapters/test_failures.py::test_aborted_while_the_daemon_is_stopped_in_its_load",
        ),
    ),
    # ---- endings.py ---------------------------------------------------------------------------------
    Mutant(
        "a load that may still be written frees its blocks",
        ENDINGS, "load_action", "return Action.QUARANTINE", "return Action.FAIL",
        ("adapters/test_endings.py", "adapters/test_failures.py::test_stopped_during_a_load"),
    ),
    Mutant(
        "a load that the server may begin is failed",
        ENDINGS, "load_action", "return Action.TIME_OUT", "return Action.FAIL",
        ("adapters/test_failures.py::test_a_load_that_was_given_up_is_never_begun",),
    ),
    Mutant(
        "an aborted load keeps its request until the load's timeout",
        ENDINGS, "load_action", " or seconds_given_up > _ABORT_GRACE_SECONDS", "",
        ("issues/adapters/test_an_aborted_load_kept_the_id_of_its_request.py",),
    ),
    # ---- failed_loads.py ----------------------------------------------------------------------------
    Mutant(
        "the memory of failed loads has no bound",
        FAILED_LOADS, "FailedLoads.failed", "while len(self._keys) > MOST_KEYS:", "while False:", (FAILED_LOADS_TEST,),
    ),
    Mutant(
        "one rank's store makes keys loadable for all",
        FAILED_LOADS, "FailedLoads.store_copied", "if left > objects:", "if False:", (FAILED_LOADS_TEST,),
    ),
    # ---- hazards.py ---------------------------------------------------------------------------------
    Mutant(
        "quarantine is released at the first rank's word",
        HAZARDS, "Quarantine.release", "if held.ranks == 0:", "if True:",
        ("adapters/test_ends_of_copies.py::test_quarantine_ends_with_the_last_ranks_word",),
    ),
    Mutant(
        "only one rank's quarantine is remembered",
        HAZARDS, "Quarantine.add", "held.ranks += 1", "pass",
        ("adapters/test_ends_of_copies.py::test_quarantine_ends_with_the_last_ranks_word",),
    ),
    Mutant(
        "quarantined blocks are allocated",
        HAZARDS, "Quarantine.add", "self._pool.pin(block_ids)", "pass",
        ("adapters/test_failures.py::test_stopped_during_a_load",),
    ),
    Mutant(
        "a store has ended when the first rank reports it",
        HAZARDS, "PinnedStores.ended", "if store.ranks_left == 0:", "if True:",
        ("adapters/test_ranks.py::test_a_store_counts_as_pending_until_both_ranks_ended_it",),
    ),
    Mutant(
        "a store is forgotten before its deadline",
        HAZARDS, "PinnedStores._forget_late", "and self._clock() >= self._forget_at[0][0]", "", (WITHOUT_END,),
    ),
    Mutant(
        "stores whose ranks never answer are kept",
        HAZARDS, "PinnedStores._forget_late", "self._forget(store_id)", "pass", (WITHOUT_END,),
    ),
    Mutant(
        "a store's time begins before its step was computed",
        HAZARDS, "PinnedStores._is_awaited", "0 < store.step <= self._ended", "store.step > 0",
        (WITHOUT_END,),
    ),
    Mutant(
        "stores do not pin the blocks that they read",
        HAZARDS, "PinnedStores.add", "self._pool.pin(block_ids)", "pass",
        (f"{PINS}::test_a_late_store_stores_what_its_request_computed",),
    ),
    Mutant(
        "the pins of a store outlive it",
        HAZARDS, "PinnedStores._forget", "self._pool.unpin(self._stores.pop(store_id).block_ids[::-1])",
        "self._stores.pop(store_id)", (f"{PINS}::test_a_session_that_ends_ends_the_pins_of_its_stores",),
    ),
    Mutant(
        "a prefix's beginning is evicted before its end",
        HAZARDS, "PinnedStores._forget", "block_ids[::-1]", "block_ids",
        ("adapters/test_blockpool.py::test_of_a_prefix_that_a_store_kept_the_end_is_evicted_first",),
    ),
    Mutant(
        "stores that keep blocks go on",
        HAZARDS, "PinnedStores.cancel_all_that_keep", "not self._pool.kept.isdisjoint(s.block_ids)", "False", (PINS,),
    ),
    Mutant(
        "a store is cancelled again and again",
        HAZARDS, "PinnedStores.cancel_all_that_keep", "self._stores[store_id].cancelled = True", "pass",
        (f"{PINS}::test_a_request_that_needs_the_blocks_waits_for_the_cancel_of_the_store",),
    ),
    # ---- planes.py ----------------------------------------------------------------------------------
    Mutant(
        "planes of one memory are not in the order of their addresses",
        PLANES, "in_slot_order", "(piece.plane.memory, piece.plane.offset)", "piece.plane.memory",
        ("adapters/test_planes.py::test_gathered_through_planes_a_block_is_the_tensors_block",),
    ),
    # ---- worker.py ----------------------------------------------------------------------------------
    Mutant(
        "a store is not cancelled at its deadline",
        WORKER, "WorkerHalf._time_out", "        copy.cancel()\n", "",
        ("adapters/test_ends_of_copies.py::test_a_store_is_cancelled_at_its_deadline",),
    ),
    Mutant(
        "the word of an old session is given to the free list of the new one",
        WORKER, "WorkerHalf._forget", "if copy.session is self._session:", "if True:",
        ("adapters/test_ends_of_copies.py::test_stores_in_a_new_session_have_words_of_their_own",),
    ),
    Mutant(
        "a copy begins in a session whose words are not the worker's yet",
        WORKER, "WorkerHalf._usable", "usable if usable is current else None", "self._link.usable()",
        (f"{NOT_ADOPTED}::test_no_two_copies_of_a_session_have_one_word_whenever_the_link_changes_it",),
    ),
    Mutant(
        "a null block is quarantined",
        WORKER, "WorkerHalf._look", "[i for i in ids_of(spec) if i != NULL_BLOCK]", "ids_of(spec)",
        ("adapters/test_ends_of_copies.py::test_the_null_block_is_not_quarantined",),
    ),
    Mutant(
        "stores that a fault kept from beginning are not answered for",
        WORKER, "WorkerHalf.answer_for_stores", "self._report.ended_stores.append(store.copy_id)", "pass",
        ("issues/adapters/test_a_fault_skipped_what_must_happen.py",),
    ),
    Mutant(
        "skipped chunks count as stored bytes",
        WORKER, "WorkerHalf._store_ended", "answer.stored * spec", "(answer.stored + answer.skipped) * spec",
        ("adapters/test_connector_stats.py::test_chunks_that_were_there_are_no_stored_bytes",),
    ),
    Mutant(
        "a load goes on when its request has ended",
        WORKER, "WorkerHalf.start_loads", "+= aborted.cancel()", "+= 0",
        ("adapters/test_ordering.py::test_a_load_that_is_aborted_is_never_sent",),
    ),
    Mutant(
        "a load that a fault kept from beginning is not answered for",
        WORKER, "WorkerHalf.answer_for_loads", "self._part_ended(load, failed=True)", "pass",
        ("adapters/test_refusals.py::test_a_fault_before_a_load_begins_fails_that_load_and_no_other",),
    ),
    Mutant(
        "the word of a message that could not be sent is lost",
        WORKER, "WorkerHalf._begin", "self._free_words.append(copy.word)", "pass",
        ("adapters/test_refusals.py::test_messages_that_find_no_room_use_no_state_words_up",),
    ),
    Mutant(
        "quarantined blocks are not released when the load is over",
        WORKER, "WorkerHalf._load_ended", "self._report.released.append(spec.copy_id)", "pass",
        ("adapters/test_failures.py::test_stopped_during_a_load",),
    ),
    Mutant(
        "a load that is refused waits for its deadline",
        WORKER, "WorkerHalf._receive", "copy.move(State.PENDING, State.CANCELLED)", "pass",
        ("adapters/test_failures.py::test_a_load_that_is_refused_is_over_at_once",),
    ),
    Mutant(
        "an idle step waits for a load's reply",
        WORKER, "WorkerHalf._wait_idle", "[copy for copy in copies if copy.open and isinstance(copy.spec, LoadSpec)]", "[]",
        ("adapters/test_ends_of_copies.py::test_an_idle_step_waits_for_the_oldest_load_by_its_state_words",),
    ),
    Mutant(
        "an idle step does not wait while loads are being cancelled",
        WORKER, "WorkerHalf._wait_idle", "copy.open or copy.writing", "copy.open",
        ("adapters/test_ends_of_copies.py::test_an_idle_step_waits_for_a_load_that_is_being_cancelled",),
    ),
    Mutant(
        "a finished load is reported twice",
        LOAD_ENDS, "LoadEnds.take_finished", "self._finished, self._failed = set(), set()", "pass",
        ("adapters/test_hazards.py",),
    ),
    Mutant(
        "copies go on when the memory goes",
        WORKER, "WorkerHalf.detach", "            copy.cancel()\n", "            pass\n",
        ("adapters/test_sleep.py::test_a_load_that_a_hung_daemon_has_not_read_writes_nothing_after_sleep",),
    ),
    Mutant(
        "the memory may go while a load is written",
        WORKER, "WorkerHalf.detach", "copy.writing for", "False for",
        ("adapters/test_sleep.py::test_sleep_fails_while_a_hung_daemon_may_write",),
    ),
    Mutant(
        "a load counts as whole although its copy of another object group failed",
        LOAD_ENDS, "LoadEnds.part_ended", "any_failed or failed", "failed",
        ("adapters/test_hybrids.py::test_when_one_object_group_fails_to_load_the_request_is_computed",),
    ),
)  # fmt: skip
