"""Mutants of `kvserver/engines`."""

from __future__ import annotations

from support.mutation import Mutant

LIFELINE = "kvserver/engines/lifeline.py"
INSTANCES = "kvserver/engines/instances.py"
WORKERS = "kvserver/engines/workers.py"
FORKED = "issues/test_a_forked_child_hid_its_parents_death.py"
DYING = "issues/adapters/test_a_dying_daemons_writes_were_over_at_its_end_of_file.py"
REFUSALS = "unit/server/test_refusals.py"
PAGE_TESTS = ("daemon/test_page_data.py",)
FILL_TESTS = ("unit/tiering/test_fill_speed.py",)
SPILL_TESTS = ("unit/tiering/test_spill.py",)

MUTANTS = (
    # ---- instances.py -------------------------------------------------------------------------------
    Mutant(
        "samples leave out instances that disconnected",
        INSTANCES, "Instances.all_counts", "(*self.by_id.values(), *self.departed.values())", "self.by_id.values()",
        PAGE_TESTS,
    ),
    Mutant(
        "the server takes every rank's copy of what all of them hold",
        "kvserver/engines/worker.py", "Worker._group", ", spec.rank, spec.world_size)", ")", ("daemon/test_replicated.py",),
    ),
    Mutant(
        "another live engine of the same id is taken for this one",
        INSTANCES, "Instances._check_incarnation", "if instance.incarnation != incarnation:", "if False:", (REFUSALS,),
    ),
    Mutant(
        "an instance serves on when one of its ranks disconnected",
        INSTANCES, "Instances.remove_worker", "        instance.refresh_namespace()\n", "",
        ("daemon/test_round_trip.py::test_a_rank_may_come_back_after_its_connection_ended",),
    ),
    Mutant(
        "an instance serves before the memory of all ranks is mapped",
        "kvserver/engines/instance.py", "Instance.refresh_namespace", "all(worker.mapped for worker in self.workers.values())", "True",
        ("daemon/test_ranks_still_mapped.py",),
    ),
    Mutant(
        "the variants of an instance outlive its namespace",
        "kvserver/engines/instance.py", "Instance.refresh_namespace", "self._variants.clear()", "pass",
        ("daemon/test_round_trip.py::test_a_rank_that_comes_back_otherwise_takes_the_variants_along",),
    ),
    Mutant(
        "totals forget the disconnected instances",
        INSTANCES, "Instances._forget", "self._forgotten.add(self.departed.pop(name).counts)",
        "self.departed.pop(name)", ("unit/engines/test_departed.py",),
    ),
    Mutant(
        "what only one start of an engine can use is written",
        "kvserver/engines/instance.py", "Instance.durability", " or self.private", "", SPILL_TESTS,
    ),
    Mutant(
        "what must stay on its machine is in tiers that machines share",
        "kvserver/engines/instance.py", "Instance.durability", "if self.machine_only else of_variant", "if False else of_variant",
        SPILL_TESTS,
    ),
    Mutant(
        "a new engine does not know how fast the last one was",
        "kvserver/engines/instance.py", "Instance.expected_speed", "self.speeds.of(self.namespace)", "0.0", FILL_TESTS,
    ),
    # ---- lifeline.py --------------------------------------------------------------------------------
    Mutant(
        "there is no limit of connections",
        LIFELINE, "Lifelines.accept", " or len(self._lifelines) >= MAX_CONNECTIONS", "",
        ("issues/test_no_test_covered_who_connects.py::test_one_connection_too_many_is_hung_up_on_and_the_others_live",),
    ),
    Mutant(
        "any user may connect",
        LIFELINE, "Lifelines.accept", "uid not in (os.getuid(), 0)", "False",
        ("issues/test_no_test_covered_who_connects.py::test_another_user_who_reaches_the_fd_socket_is_hung_up_on_even_with_the_token",),
    ),
    Mutant(
        "a silent connection keeps its place",
        LIFELINE, "Lifelines.close_silent", "now > lifeline.deadline", "False",
        ("issues/test_silent_connection_kept_its_place.py",),
    ),
    Mutant(
        "a worker that registered in time is hung up on",
        LIFELINE, "Lifelines.close_silent", "lifeline.registration is None and ", "",
        ("issues/test_silent_connection_kept_its_place.py",),
    ),
    Mutant(
        "any token will do",
        LIFELINE, "Lifelines._attach", "if decode_attach(raw).token != self.token:", "if not decode_attach(raw).token:",
        ("unit/engines/test_lifeline.py",),
    ),
    Mutant(
        "descriptors that the kernel left out are not missed",
        LIFELINE, "Lifelines._attach", "cut = flags & socket.MSG_CTRUNC", "cut = 0",
        ("unit/engines/test_lifeline.py::test_too_many_descriptors_are_refused_and_closed",),
    ),
    Mutant(
        "an attachment serves many registrations",
        LIFELINE, "Lifelines.unused", " or lifeline.registration is not None", "",
        ("unit/engines/test_lifeline.py::test_an_attachment_serves_one_registration",),
    ),
    Mutant(
        "descriptors that no worker claimed stay open",
        LIFELINE, "Lifelines.close", "os.close(fd)", "pass",
        ("unit/engines/test_lifeline.py::test_descriptors_that_no_worker_claims_are_closed_with_their_connection",),
    ),
    Mutant(
        "descriptors that come after Attach stay open",
        LIFELINE, "Lifelines.read", "os.close(extra)", "pass",
        ("unit/engines/test_lifeline.py::test_what_comes_after_attach_is_ignored",),
    ),
    Mutant(
        "a process that left a child is not seen to be dead",
        LIFELINE, "_open_process", "return os.pidfd_open(pid)", "return None",
        (f"{FORKED}::test_the_daemon_notices_the_death_while_the_child_runs",),
    ),
    Mutant(
        "the server ends a connection without a word",
        LIFELINE, "Lifelines.detach", "self._send(lifeline, encode(Detached()))", "pass", (DYING,),
    ),
    Mutant(
        "a worker takes the daemon's last descriptors",
        LIFELINE, "Lifelines._attach", "if cut or not has_free_descriptors(RESERVE):", "if cut:",
        ("issues/test_a_daemon_without_descriptors_was_aborted.py",),
    ),
    Mutant(
        "a connection without a worker takes the daemon's last descriptors",
        LIFELINE, "Lifelines.accept", "if not has_free_descriptors(FOR_ENGINES):", "if False:",
        ("daemon/test_bad_input.py::test_a_daemon_without_free_descriptors_refuses_connections_and_serves_on",),
    ),
    # ---- reports.py ---------------------------------------------------------------------------------
    Mutant(
        "the daemon's memory of fills, which ends with leases, counts more than what the engine states",
        "kvserver/engines/reports.py", "EngineReports.end_request",
        "of_fills if request.l2_tokens is None else request.l2_tokens", "of_fills",
        ("issues/adapters/test_what_a_long_request_loaded_from_l2_counted_as_l1s.py",),
    ),
    # ---- workers.py ---------------------------------------------------------------------------------
    Mutant(
        "memory is unmapped under a store that waits",
        WORKERS, "Workers.unmap_if_idle", "and not worker.waiting ", "",
        ("issues/test_turns_grew_with_the_cache.py::test_a_worker_that_closes_while_its_store_waits_is_unmapped_and_leaves_nothing",),
    ),
    Mutant(
        "a disconnected instance is never forgotten",
        WORKERS, "Workers.tick", "self.instances.forget_departed(self.clock())", "pass", ("model/test_departures.py",),
    ),
    Mutant(
        "memory is unmapped while copies run",
        WORKERS, "Workers.unmap_if_idle", "not worker.tickets and ", "",
        ("daemon/test_truncated_memory.py", "daemon/test_failures.py"),
    ),
    Mutant(
        "the copies of a disconnected worker go on",
        WORKERS, "Workers.close_worker", "self.tickets.cancel_copy(number)", "pass", ("daemon/test_failures.py",),
    ),
    Mutant(
        "the leases of a disconnected engine stay",
        WORKERS, "Workers.close_worker", "self.cache.end_leases_of(ended.instance_id)", "pass",
        ("daemon/test_failures.py",),
    ),
)  # fmt: skip
