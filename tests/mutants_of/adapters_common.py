"""Mutants of `adapters/common`: the link to the daemon, and what either half sends."""

from __future__ import annotations

from support.mutation import Mutant

DISPATCHER = "adapters/common/dispatcher.py"
LOOKUPS = "adapters/common/lookups.py"
LINK = "adapters/common/link.py"
CACHE_STATUS = "adapters/common/cache_status.py"
BOARD = "adapters/common/board.py"
SEND_QUEUE = "adapters/common/send_queue.py"
ORDERING = "adapters/test_ordering.py"
NOTICES = "adapters/common/notices.py"
NEW_DAEMON = "issues/adapters/test_a_new_daemon_lacked_what_the_old_one_had.py"
WEIGHTS = "adapters/common/weights.py"

MUTANTS = (
    # ---- board.py -----------------------------------------------------------------------------------
    Mutant(
        "a reason that no longer holds stays",
        BOARD, "Board._show", "self._series(index, before[0]).set(0)", "pass",
        ("adapters/test_cache_is_on.py::test_the_daemon_of_an_idle_engine_goes_and_comes_back",),
    ),
    # ---- boundaries.py ------------------------------------------------------------------------------
    Mutant(
        "what a kept boundary needs is dropped with the generated one before",
        "adapters/common/boundaries.py", "Boundaries.superseded", "chunk for chunk in before if chunk not in needed",
        "*before", ("adapters/test_kept_boundaries.py::test_what_each_kept_boundary_needs_is_stored_and_stays",),
    ),
    # ---- cache_status.py ----------------------------------------------------------------------------
    Mutant(
        "what an idle engine reported last hides that its daemon has ended",
        CACHE_STATUS, "EngineCacheStatus.verdict", "and not self.known_here:", "and True:",
        ("adapters/test_cache_is_on.py::test_the_daemon_of_an_idle_engine_goes_and_comes_back",),
    ),
    Mutant(
        "one rank without cache is outvoted by the daemon's answer",
        CACHE_STATUS, "EngineCacheStatus.verdict", "if half.reason in _LASTING}:", "if False}:",
        (
            "adapters/test_cache_status.py::"
            "test_no_answer_of_the_daemon_outvotes_a_rank_that_has_no_cache_for_good",
        ),
    ),
    # ---- dispatcher.py ------------------------------------------------------------------------------
    Mutant(
        "BAD_KEYS does not renew the session",
        DISPATCHER, "", "    ErrorCode.BAD_KEYS.value,\n", "",
        (f"{NEW_DAEMON}::test_a_daemon_with_chunks_of_another_size_is_served",),
    ),
    Mutant(
        "an unknown instance does not renew the session",
        DISPATCHER, "", "    ErrorCode.UNKNOWN_INSTANCE.value,\n", "", (NEW_DAEMON,),
    ),
    # ---- fills.py -----------------------------------------------------------------------------------
    Mutant(
        "a late fill is awaited for ever",
        "adapters/common/fills.py", "AwaitedFills.end_late", "if usable and now <= deadline:", "if usable:",
        ("adapters/test_fills.py::test_requests_compute_though_the_daemon_never_answers_their_fills",),
    ),
    # ---- link.py ------------------------------------------------------------------------------------
    Mutant(
        "a dead daemon's socket is queried",
        LINK, "absence", "not has_listener(endpoint)", "False",
        ("issues/adapters/test_an_engine_waited_for_a_daemon_that_was_dead.py",),
    ),
    Mutant(
        "another user's daemon is queried",
        LINK, "absence", "if why := barrier(endpoint):", "if why := \"\":",
        ("issues/adapters/test_another_users_daemon_seemed_not_to_answer.py",),
    ),
    Mutant(
        "a breaker that opened stays open",
        LINK, "Breaker.answered", "was_open, self._failures = self.open, 0", "was_open = self.open",
        ("adapters/test_failures.py::test_a_hung_daemon_costs_a_millisecond_per_pass_and_nothing_once_the_breaker_is_open",),
    ),
    Mutant(
        "a breaker never opens",
        LINK, "Breaker.open", "self._failures >= BREAKER_LIMIT", "False",
        ("adapters/test_failures.py::test_a_hung_daemon_costs_a_millisecond_per_pass_and_nothing_once_the_breaker_is_open",),
    ),
    Mutant(
        "a session ends before the server has closed its mappings",
        LINK, "Link._end", "        self._hang_up(session)\n        session.ended.set()",
        "        session.ended.set()\n        self._hang_up(session)", ("adapters/test_sleep.py",),
    ),
    Mutant(
        "there is no session while the next one is made",
        LINK, "Link._watch", "return True", "return False",
        ("issues/adapters/test_requests_missed_while_the_session_was_renewed.py",),
    ),
    Mutant(
        "an idle scheduler half keeps the session of a dead daemon",
        LINK, "Link._watch", "self._wait(session.lifeline, seconds)", "self._wait(None, seconds)",
        ("issues/adapters/test_an_idle_scheduler_kept_its_session_with_a_dead_daemon.py",),
    ),
    Mutant(
        "a session of the scheduler half outlasts its daemon while none answers",
        LINK, "Link._watch", "                return False", "                return keeps",
        ("issues/adapters/test_a_half_waited_for_the_answer_of_a_daemon_that_had_ended.py",),
    ),
    # ---- lookups.py ---------------------------------------------------------------------------------
    Mutant(
        "a lookup that ends inside a chunk does not go on there",
        LOOKUPS, "Lookups._answered", "if found.wants_tail:", "if False:",
        ("adapters/test_tails.py::test_the_next_turn_of_a_chat_finds_where_the_last_one_ended",),
    ),
    Mutant(
        "requests that wait for storage look for replies once and no more",
        LOOKUPS, "Lookups.next_pass", "self._full = self._looked_at_fills = False", "self._full = False",
        ("adapters/test_fills.py",),
    ),
    Mutant(
        "every request waits its own time for its answer",
        LOOKUPS, "Lookups._wait", "self._poll_left -= time.monotonic() - began", "pass",
        ("adapters/test_failures.py::test_a_hung_daemon_costs_a_millisecond_per_pass_and_nothing_once_the_breaker_is_open",),
    ),
    Mutant(
        "a lookup without an answer does not open the breaker",
        LOOKUPS, "Lookups._give_up", "self._dispatcher.timed_out()", "pass",
        ("adapters/test_failures.py::test_a_hung_daemon_costs_a_millisecond_per_pass_and_nothing_once_the_breaker_is_open",),
    ),
    # ---- notices.py ---------------------------------------------------------------------------------
    Mutant(
        "a notice that could not be sent requests no full state",
        NOTICES, "Notices._send", " or number is None", "", ("adapters/test_full_states.py",),
    ),
    # ---- send_queue.py ------------------------------------------------------------------------------
    Mutant(
        "a store leaves in front of the forward that computes it",
        SEND_QUEUE, "OrderedSendQueue.post", "step > computed_in", "step >= computed_in", (ORDERING,),
    ),
    Mutant(
        "a store waits for every forward that was queued",
        SEND_QUEUE, "OrderedSendQueue.post", "step > computed_in", "False", (ORDERING,),
    ),
    Mutant(
        "a step without a mark sends by an earlier step's",
        SEND_QUEUE, "OrderedSendQueue.begin_step", "self._marks, deque(maxlen=_MARKS)", "self._marks, self._marks", (ORDERING,),
    ),
    Mutant(
        "a message whose copy was cancelled is sent",
        SEND_QUEUE, "OrderedSendQueue._send", "if not queued.is_wanted():", "if False:",
        ("adapters/test_ordering.py::test_a_store_that_is_cancelled_for_its_blocks_is_never_sent",),
    ),
    Mutant(
        "a message waits for nothing that the engine does",
        SEND_QUEUE, "OrderedSendQueue._deliver", "queued.event.synchronize()", "pass",
        ("adapters/test_ordering.py::test_a_store_waits_for_the_forward_that_writes_its_blocks",),
    ),
    # ---- weights.py ---------------------------------------------------------------------------------
    Mutant(
        "a whole digest is of samples",
        WEIGHTS, "file_digest", "if whole else", "if False else", ("adapters/test_weights.py",),
    ),
    Mutant(
        "a whole digest that was kept is used when it is damaged",
        WEIGHTS, "_whole_digest", "return _checked(known.read_text())", "return known.read_text()",
        ("adapters/test_weights.py",),
    ),
    Mutant(
        "only the first bytes of a tensor count",
        WEIGHTS, "_samples", " + (last - begin) * number // (count - 1)", "", ("adapters/test_weights.py",),
    ),
    Mutant(
        "a file that was replaced within its mtime is not read again",
        WEIGHTS, "stamp_of", "stat.st_ctime_ns,", "0,", ("adapters/test_weights.py",),
    ),
)  # fmt: skip
