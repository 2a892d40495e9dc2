"""Deliberate faults in a copy of the code, each with the tests that must notice it. By hand, not in CI: README.md.

    .venv/bin/python tests/mutants.py [--list] [--check] [--core | --adapters] [--trust] [--only WORD …]

An anchor is a symbol and a text that must be in it exactly once: `--check`, which CI runs, lists those that no longer fit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

from support.mutation import Mutant, Outcome, Result, Tests, copy_package, mutated_package

CACHE, INDEX, POOL = "kvserver/cache/cache.py", "kvserver/cache/index.py", "kvserver/cache/pages.py"
SPACE, CACHE_STORES, LEASES = "kvserver/cache/space.py", "kvserver/cache/store_plans.py", "kvserver/cache/leases.py"
CHUNK, GROUPS = "kvserver/cache/chunk.py", "kvserver/cache/groups.py"
EVICTION, MISSES, NAMESPACE = (
    "kvserver/cache/eviction/lru.py",
    "kvserver/cache/misses.py",
    "kvserver/cache/namespace.py",
)
STORES, LOADS, SERVER_COPIES = "kvserver/server/stores.py", "kvserver/server/loads.py", "kvserver/server/copies.py"
COPY_CHECKS = "kvserver/server/copy_checks.py"
CAPACITY, CHECKS = "kvserver/config/capacity.py", "kvserver/cli/checks.py"
LIFELINE, HANDLERS = "kvserver/server/lifeline.py", "kvserver/server/handlers.py"
BENEFIT, SOURCES = "kvserver/telemetry/benefit.py", "adapters/vllm/sources.py"
INSTANCES, WORKERS, L1_LOOKUPS = (
    "kvserver/server/instances.py",
    "kvserver/server/workers.py",
    "kvserver/server/lookups.py",
)
EXPLAIN, UPKEEP = "kvserver/telemetry/explain.py", "kvserver/server/upkeep.py"
STATUS = "kvserver/server/status.py"
CLIENT, SUPPORT, BACKENDS = "kvserver/protocol/client.py", "adapters/vllm/support.py", "adapters/vllm/backends.py"
WORKER, HAZARDS, COPIES = "adapters/common/worker.py", "adapters/common/hazards.py", "adapters/common/copies.py"
ENDINGS = "adapters/common/endings.py"
SCHEDULER, REQUESTS = "adapters/vllm/scheduler.py", "adapters/vllm/requests.py"
HITS = "adapters/vllm/hits.py"
FAILED_LOADS, PROMISES = "adapters/common/failed_loads.py", "adapters/vllm/promises.py"
FAILED_LOADS_TEST, PROMISES_TEST = "adapters/test_failed_loads.py", "adapters/test_promises.py"
STORE_PLANS, LOAD_PLANS = "adapters/vllm/store_plans.py", "adapters/vllm/load_plans.py"
DISPATCHER, LOOKUPS, LINK = "adapters/common/dispatcher.py", "adapters/common/lookups.py", "adapters/common/link.py"
CONNECTOR, CHUNKS, BLOCKPOOL = "adapters/vllm/connector.py", "adapters/vllm/chunks.py", "adapters/vllm/blockpool.py"
CACHE_STATUS, BOARD = "adapters/common/cache_status.py", "adapters/common/board.py"
SEND_QUEUE, NOTICES, VARIANTS = (
    "adapters/common/send_queue.py",
    "adapters/common/notices.py",
    "adapters/vllm/variants.py",
)

PINS, DURABILITY = "adapters/test_pins.py", "adapters/test_durability.py"
STATE_TESTS = ("adapters/test_groups.py", "adapters/test_states.py")
WITHOUT_END = "issues/adapters/test_stores_without_an_end_were_never_forgotten.py"
NEW_DAEMON = "issues/adapters/test_a_new_daemon_lacked_what_the_old_one_had.py"
IDENTITY, CANONICAL = "adapters/vllm/identity.py", "adapters/vllm/canonical.py"
WEIGHTS, PLANES = "adapters/common/weights.py", "adapters/common/planes.py"

FORKED = "issues/test_a_forked_child_hid_its_parents_death.py"
NOT_ADOPTED = "issues/adapters/test_a_copy_began_in_a_session_that_was_not_adopted.py"
DYING = "issues/adapters/test_a_dying_daemons_writes_were_over_at_its_end_of_file.py"
RESET = "issues/adapters/test_a_reset_failed_over_quarantined_blocks.py"
SESSIONS = "issues/adapters/test_a_sessions_chunks_had_other_tokens_keys.py"
EXPLAIN_TESTS = ("unit/telemetry/test_explain.py", "daemon/test_explain.py")
OUT_OF_SYNC = "issues/adapters/test_an_idle_restarted_engine_stayed_out_of_sync.py"
L2_EVENTS = "kvserver/server/l2_events.py"
HUB, FEED, STREAM = "kvserver/kv_events/hub.py", "kvserver/kv_events/feed.py", "kvserver/kv_events/stream.py"
CONSUMERS = ("model/test_kv_events.py",)
CACHE_TESTS = ("unit/cache/test_cache.py",)
GROUP_TESTS = ("unit/cache/test_groups.py",)
MISSES_TESTS = ("issues/test_one_evicted_chunk_was_charged_with_all_behind_it.py",)
INDEX_TESTS = ("unit/cache/test_index.py",)
L1_MODELS_TESTS = ("unit/server/test_l1_models.py",)
POOL_TESTS = ("unit/cache/test_pool.py",)
REFUSALS = "unit/server/test_refusals.py"
EVICTION_TESTS = ("unit/cache/test_eviction.py",)
SLRU, POLICY_TESTS = "kvserver/cache/eviction/slru.py", ("unit/cache/test_policies.py",)
SHARES, SHARES_TESTS = "kvserver/cache/shares.py", ("unit/cache/test_shares.py", "unit/cache/test_policies.py")
NAMESPACE_TESTS = ("unit/cache/test_namespace.py",)
IDENTITY_TESTS = ("adapters/test_identity.py",)
SHOWN_PASSWORDS = "issues/test_config_showed_passwords_of_storage.py"
UNLISTED = "issues/adapters/test_what_the_identity_did_not_list_was_shared.py"

BARE_L1, CLUSTER = "kvserver/replay/bare_l1.py", "kvserver/replay/cluster.py"
ROUTERS, RECORDER = "kvserver/replay/routers.py", "kvserver/replay/recorder.py"
CLUSTER_TESTS, RECORDER_TESTS = ("unit/replay/test_cluster.py",), ("unit/replay/test_recorder.py",)

REPLAY = (
    Mutant(
        "what a machine read from L2 counts as found in L1",
        BARE_L1,
        "BareL1.serve",
        "found - filled",
        "found",
        CLUSTER_TESTS,
    ),
    Mutant(
        "blocks for which L1 had no space are written to L2",
        CLUSTER,
        "_Cluster.serve",
        "prompt.keys[: served.resident * KEY_BYTES]",
        "prompt.keys",
        CLUSTER_TESTS,
    ),
    Mutant(
        "a short common beginning decides the machine", ROUTERS, "PrefixAffinity.choose", "_MATCH", "0", CLUSTER_TESTS
    ),
    Mutant("all recordings have one salt", RECORDER, "Recorder._id", "key=self._salt", "key=b'salt'", RECORDER_TESTS),
    Mutant(
        "equal keys of two namespaces are one block of a recording",
        RECORDER,
        "Recorder._id",
        "namespace + key",
        "key",
        RECORDER_TESTS,
    ),
    Mutant(
        "a recording states its loss again in each line",
        RECORDER,
        "Recorder._write",
        "self._lost_written = lost",
        "pass",
        RECORDER_TESTS,
    ),
    Mutant(
        "a recording grows beyond its size",
        RECORDER,
        "Recorder._write",
        "self._bytes + len(text)",
        "self._bytes",
        RECORDER_TESTS,
    ),
)

WHAT_IF = "kvserver/telemetry/what_if.py"
WHAT_IF_UNIT, WHAT_IF_DAEMON = ("unit/telemetry/test_what_if.py",), ("daemon/test_what_if.py",)

WHAT_IF_CURVE = (
    Mutant("stores are not in the curve", WHAT_IF, "WhatIfCurve.handle", "self._stored(event)", "pass", WHAT_IF_UNIT),
    Mutant(
        "what a clear removed is still a hit of larger sizes",
        WHAT_IF,
        "WhatIfCurve._cleared",
        "self._clears.get(prefix, 0) + 1",
        "0",
        WHAT_IF_UNIT,
    ),
    Mutant(
        "a namespace keeps its salt when it is cleared",
        WHAT_IF,
        "WhatIfCurve._cleared",
        "self._salts.clear()",
        "pass",
        WHAT_IF_UNIT,
    ),
    Mutant(
        "hybrid models hit wherever full attention does",
        WHAT_IF,
        "rules_of",
        "HitRules(full, chunk_tokens, others)",
        "HitRules(full, chunk_tokens, [])",
        WHAT_IF_UNIT,
    ),
    Mutant(
        "an object of several ranks or groups has the first group's pages",
        WHAT_IF,
        "WhatIfCurve._stored",
        "event.group.place, event.pages)",
        "event.group.place, 1)",
        WHAT_IF_UNIT,
    ),
    Mutant(
        "what L1 found though it is not listed stays unlisted",
        WHAT_IF,
        "WhatIfCurve._looked_up",
        "rules, outcome.hit_chunks, pages)",
        "rules, outcome.hit_chunks, 0)",
        WHAT_IF_UNIT,
    ),
    Mutant(
        "a fleet's unlimited size is the sum of the daemons'",
        WHAT_IF,
        "merge_what_if",
        "max(0.0, again)",
        "0.0",
        (*WHAT_IF_UNIT, *WHAT_IF_DAEMON),
    ),
    Mutant(
        "daemons have salts of their own, so that sketches cannot be merged",
        WHAT_IF,
        "WhatIfCurve._salt",
        'b"%b/%d/%d" % (namespace,',
        'b"%b/%d/%d" % (namespace + secrets.token_bytes(8),',
        WHAT_IF_UNIT,
    ),
    Mutant(
        "the sketch of /status is never made",
        "kvserver/parts.py",
        "Observability._tick",
        "self.what_if.tick()",
        "pass",
        WHAT_IF_DAEMON,
    ),
    Mutant(
        "what was read from L2 is not used in the curve",
        "kvserver/server/fills.py",
        "Fills._count_ready",
        "fill.worker.layout.objects[group], pages,",
        "fill.worker.layout.objects[group], 0,",
        WHAT_IF_DAEMON,
    ),
    Mutant(
        "stores do not state how many pages an object has",
        "kvserver/server/stores.py",
        "Stores._publish_ready",
        "keys, group.objects, pages)",
        "keys, group.objects, 0)",
        WHAT_IF_DAEMON,
    ),
)

HISTORY, AGES = "kvserver/web/history.py", "kvserver/telemetry/resident_ages.py"
HISTORY_TESTS, AGES_TESTS = ("unit/web/test_history.py",), ("unit/telemetry/test_resident_ages.py",)
PAGE_TESTS = ("daemon/test_page_data.py",)

PAGE_AND_HISTORY = (
    Mutant(
        "a sample is begun each time that it might be due",
        HISTORY,
        "History.tick",
        "now >= self._due",
        "True",
        HISTORY_TESTS,
    ),
    Mutant(
        "a number that is no longer kept begins with the wrong sample",
        HISTORY, "History.since", "islice(self._rows, first - (self._taken - len(self._rows)), None)", "self._rows", HISTORY_TESTS,
    ),
    Mutant(
        "a chunk that a resync names is as young as the resync",
        AGES, "_Tier.add", "if stored_ns == _UNKNOWN_NS", "if False", AGES_TESTS,
    ),
    Mutant("an evicted chunk is still counted by its age", AGES, "_Tier.remove", "self._stored_ns.pop", "self._before.pop", AGES_TESTS),
    Mutant("the sample of ages grows without limit", AGES, "_Tier.add", "> self._most", "> 1 << 60", AGES_TESTS),
    Mutant("a clear of one namespace forgets the ages of all", AGES, "_Tier.clear", "not name.startswith(prefix)", "False", AGES_TESTS),
    Mutant(
        "the history is a part of the shell, which needs no token",
        "kvserver/web/access.py", "is_shell", 'path == "/"', 'path in ("/", "/history")', PAGE_TESTS,
    ),
    Mutant(
        "another site's page gets the shell of a daemon that needs a token",
        "kvserver/web/access.py", "Access.refusal", "if foreign := _foreign_origin(method, host, headers)",
        "if not is_shell(method, path) and (foreign := _foreign_origin(method, host, headers))", PAGE_TESTS,
    ),
    Mutant(
        "samples leave out instances that disconnected",
        "kvserver/server/instances.py", "Instances.all_counts", "(*self.by_id.values(), *self.departed.values())", "self.by_id.values()", PAGE_TESTS,
    ),
)  # fmt: skip

CLEARS, CLEAR_TESTS = "kvserver/server/clears.py", ("daemon/test_operator_clear.py",)

COMMANDS = (
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
        CLEARS, "Clears._of_model", "for id in self._upkeep.cache.index.ids_of_model(model_name)", "for id in ()", CLEAR_TESTS,
    ),
    Mutant(
        "a clear without a terminal asks no one and clears",
        "kvserver/cli/clear.py", "_not_agreed", "if not sys.stdin.isatty():", "return None\n    if not sys.stdin.isatty():",
        CLEAR_TESTS,
    ),
    Mutant(
        "a slow copy is normal",
        "kvserver/bench/verdicts.py", "at_least", "ratio >= least", "True", ("unit/bench/test_verdicts.py",),
    ),
    Mutant(
        "what this process used counts as other work",
        "kvserver/bench/verdicts.py", "MachineWatch.reasons", " - (own - before[3])", " + 1e9", ("unit/bench/test_verdicts.py",),
    ),
    Mutant(
        "what a bench wrote to a shared store stays",
        "kvserver/bench/storage.py", "TierMover.close", "self._tier.shared", "False",
        ("daemon/test_operator_bench.py",),
    ),
    Mutant(
        "a bench locks the folder of a running daemon",
        "kvserver/bench/storage.py", "opened", 'path=f"{folder}/tier", ', "", ("daemon/test_operator_bench.py",),
    ),
    Mutant(
        "a bundle shows secrets that the daemon's environment names",
        "kvserver/cli/bundle.py", "_redactor", "secrets_of(os.environ) | secrets_of(environ)", "set[str]()", ("daemon/test_operator_bundle.py",),
    ),
    Mutant(
        "a bundle shows token ids of the log",
        "kvserver/cli/redaction.py", "Redactor.text", "*(_OF_LOGS if log else ())", "*()", ("unit/cli/test_redaction.py",),
    ),
    Mutant(
        "a bundle shows passwords of URLs",
        "kvserver/cli/redaction.py", "", '"//"),', '"//x@"),', ("unit/cli/test_redaction.py",),
    ),
    Mutant(
        "a log is cut within a line",
        "kvserver/cli/bundle.py", "_tail", "if end > _LOG_BYTES:", "if False:", ("daemon/test_operator_bundle.py",),
    ),
    Mutant(
        "rates are of two incarnations of the daemon",
        "kvserver/cli/top_view.py", "rates", "now.boot_id != before.boot_id or ", "", ("unit/cli/test_top.py",),
    ),
    Mutant(
        "a bundle has the journal of another process",
        "kvserver/cli/bundle.py", "_log", 'f"_PID={pid}"', 'f"_PID={pid + 1}"', ("daemon/test_operator_bundle.py",),
    ),
    Mutant(
        "what the screen has no line for is never shown",
        "kvserver/cli/top_scroll.py", "Scroll.shown", "first = 1 + self._hidden", "first = 1", ("daemon/test_operator_top.py",),
    ),
    Mutant(
        "a screen is scrolled beyond the end of its text",
        "kvserver/cli/top_scroll.py", "Scroll.shown", "min(self._hidden, len(lines) - 1 - self._page)", "self._hidden",
        ("daemon/test_operator_top.py",),
    ),
    Mutant(
        "a clear of a model passes over KV of engines that are not known",
        CLEARS, "Clears._unnamed_tiers", "local[name].count((b\"\",)) > ", "0 > ", CLEAR_TESTS,
    ),
    Mutant(
        "names that clients chose move the cursor",
        "kvserver/cli/terminal.py", "plain", "one if one.isprintable() else", "one if True else", ("unit/cli/test_terminal.py",),
    ),
)  # fmt: skip

STORES_AND_LOADS = (
    # ---- what each model has ------------------------------------------------------------------
    Mutant(
        "a slot that was freed after a failed copy still counts for its model",
        CACHE_STORES, "StorePlans.finish_store", "chunk.namespace.model.pages -= plan.pages * len(plan.slots)", "pass", L1_MODELS_TESTS,
    ),
    Mutant(
        "the chunks of a cleared namespace still count for their model",
        INDEX, "Index._count", "namespace.model.chunks += more", "namespace.model.chunks += max(0, more)", L1_MODELS_TESTS,
    ),
    Mutant(
        "a chunk that was never whole counts as one that was never loaded",
        SPACE, "Space._evict_chunk", "bool(chunk.ready) and not chunk.loaded", "not chunk.loaded", L1_MODELS_TESTS,
    ),
    # ---- what the cache brought ---------------------------------------------------------------
    Mutant(
        "a load that failed on one rank brought what the others loaded",
        BENEFIT, "LoadWaits.ended", "min(all_tokens)", "max(all_tokens)", ("unit/telemetry/test_benefit.py",),
    ),
    Mutant(
        "tokens from L1 count as tokens from L0",
        BENEFIT, "Benefit.request_ended", '"l1": loaded', '"l1": local',
        ("unit/telemetry/test_benefit.py::test_the_sources_add_up_to_the_prompts",),
    ),
    # ---- block lifetimes ----------------------------------------------------------------------
    Mutant(
        "after lost reports requests own the blocks that they had before",
        "kvserver/telemetry/block_lifecycle.py", "_Instance.lose_track", "self.request_blocks = None", "pass",
        ("unit/telemetry/test_l0_random.py",),
    ),
    # ---- what engines find of a prompt --------------------------------------------------------
    Mutant(
        "chunks are forgotten when their last reader disconnects",
        "kvserver/routing/prefix_index.py", "KVIndex._forget_if_empty",
        "if not read and not any(map(self._size_of, self._owners.get(namespace_prefix, {}).values())):", "if not read:",
        ("unit/routing/test_kv_index.py::test_random_events_agree_with_a_plain_model",),
    ),
    # ---- what a lookup finds, and leases ------------------------------------------------------
    Mutant(
        "a lookup finds a chunk that is still being filled",
        CACHE, "_lease", "if chunk.ready & full != full:", "if False:", CACHE_TESTS,
    ),
    Mutant(
        "a hit ends where only full attention goes on",
        GROUPS, "Groups.boundary", "boundary = missing ", "break ", GROUP_TESTS,
    ),
    Mutant(
        "chunks behind the hit stay leased",
        CACHE, "_lease", "for chunk in found[boundary:]:", "for chunk in found[:0]:", GROUP_TESTS,
    ),
    Mutant(
        "a load reads another group's object",
        CACHE, "Cache.plan_load", "chunk.ready >> group & 1", "chunk.ready", GROUP_TESTS,
    ),
    Mutant(
        "an object is dropped while it is in use",
        CACHE_STORES, "StorePlans.drop_objects", " or chunk.leases or chunk.pins", "", GROUP_TESTS,
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
        "a lookup counts chunks behind one that is missing",
        CACHE, "_lease", "del found[number:]", "del found[number]", CACHE_TESTS,
    ),
    Mutant(
        "the first lease of a request that asks again is never ended",
        CACHE, "Cache.lookup", "self.leases.end(owner)", "pass", CACHE_TESTS,
    ),
    Mutant(
        "the end of a lease makes the end of a prefix the youngest",
        LEASES, "Leases._end", "reversed(lease.chunks)", "lease.chunks", CACHE_TESTS,
    ),
    Mutant(
        "the end of a lease does not show its chunks to eviction",
        LEASES, "Leases._end", "self._policy.use(reversed(lease.chunks))", "pass", CACHE_TESTS,
    ),
    Mutant(
        "a chunk that is read when its namespace is cleared is removed twice",
        SPACE, "Space._free_one_chunk", " or namespace.chunks.get(chunk.key) is None", "", CACHE_TESTS,
    ),
    # ---- single blocks behind the last full chunk ---------------------------------------------
    Mutant(
        "a block is named among the chunks, whose keys are the same",
        "kvserver/cache/namespace.py", "tails_of", "namespace + _TAILS", "namespace", ("unit/cache/test_tails.py",),
    ),
    Mutant(
        "a tail leaves L1 after the chunk that it follows",
        CACHE_STORES, "StorePlans.finish_store", "before=self._chunk_before(plan)", "before=None", ("unit/cache/test_tails.py",),
    ),
    Mutant(
        "a request that has a tail loses the lease of its chunks",
        LEASES, "Leases.add", "lease.chunks += chunks", "lease.chunks = chunks", ("unit/cache/test_tails.py",),
    ),
    Mutant(
        "what a tail covers counts as missed",
        "kvserver/cache/misses.py", "LookupOutcome.missed_tokens", "found[self.missed[0][0]] -= self.tail_tokens", "pass",
        ("unit/cache/test_tails.py", "daemon/test_tails.py"),
    ),
    Mutant(
        "a lookup that waits for its tail is forgotten with its request",
        "kvserver/server/handlers.py", "Handlers.handle", "self.lookups.complete((request.instance_id, request.request_id))",
        "pass", ("daemon/test_tails.py",),
    ),
    Mutant(
        "a tail is published as if it were chunks",
        STORES, "Stores._publish_ready", "group.chunks_namespace(ticket.namespace)", "ticket.namespace", ("daemon/test_tails.py",),
    ),
    Mutant(
        "consumers believe in single blocks that were evicted",
        "kvserver/cache/space.py", "Space._evict_chunk", "plan.evicted_tails.append((chunk.namespace, chunk.key))", "pass", CONSUMERS,
    ),
    Mutant(
        "a load of chunks and blocks saves its tokens twice",
        SERVER_COPIES, "_counts_tokens", "(alone or not load.group.layout.tails)", "True", ("daemon/test_tails.py",),
    ),
    Mutant(
        "of groups that all ranks have alike each block is stored by every rank",
        STORES, "Stores._plan_objects", "places = own_places(request, worker, group)",
        "places = range(chunk_count(request.keys))", ("daemon/test_tails.py",),
    ),
    # ---- stores and loads ---------------------------------------------------------------------
    Mutant(
        "a chunk is stored twice while the first copy runs",
        CACHE_STORES, "StorePlans.extend_plan", "any(map(chunk.has_slot, plan.slots))", "chunk.done >> plan.slots.start & 1", CACHE_TESTS,
    ),
    Mutant(
        "a chunk that another rank stored counts as this rank's",
        CACHE_STORES, "StorePlans.extend_plan", "any(map(chunk.has_slot, plan.slots))", "not chunk.empty", CACHE_TESTS,
    ),
    Mutant(
        "making room for one rank evicts the other ranks' bytes of that chunk",
        CACHE_STORES, "StorePlans.plan_store", "self.index.find_chunks(namespace_id, plan.keys)", "[]",
        ("issues/test_a_prompt_larger_than_l1_was_refused_whole.py",),
    ),
    Mutant(
        "a chunk is found when its first rank was copied",
        CACHE_STORES, "StorePlans.finish_store", "if chunk.done & mask == mask:", "if True:",
        CACHE_TESTS,
    ),
    Mutant(
        "a failed copy is published",
        CACHE_STORES, "StorePlans.finish_store", "if copied and not chunk.detached and", "if not chunk.detached and", CACHE_TESTS,
    ),
    Mutant(
        "a store that ends after a clear is published",
        CACHE_STORES, "StorePlans.finish_store", "if copied and not chunk.detached and", "if copied and", CACHE_TESTS,
    ),
    Mutant(
        "a failed copy keeps its pages",
        CACHE_STORES, "StorePlans.finish_store", "self.pool.free_pages(chunk.slot(number))", "pass", CACHE_TESTS,
    ),
    Mutant(
        "one rank's failure takes the chunk away that another rank fills",
        CACHE_STORES, "StorePlans.finish_store", "chunk.empty", "not chunk.done", CACHE_TESTS,
    ),
    Mutant(
        "a load reads a chunk that is still being filled",
        CACHE, "Cache.plan_load", "if chunk is not None and chunk.ready >> group & 1]", "if chunk is not None]", CACHE_TESTS,
    ),
    Mutant(
        "what is read may be evicted",
        SPACE, "Space.pin_chunks", "            chunk.pins += 1", "            chunk.pins += 0", CACHE_TESTS,
    ),
    Mutant(
        "a load is no use of its chunks",
        CACHE, "Cache.finish_load", "self._free_or_track(*reversed(chunks))", "self._free_or_track()", CACHE_TESTS,
    ),
    Mutant(
        "the pages of a cleared chunk are freed while it is read",
        SPACE, "Space._free_or_track", "if chunk.detached and not chunk.pins:", "if chunk.detached:", CACHE_TESTS,
    ),
    Mutant(
        "a clear of one namespace clears all",
        SPACE, "Space.clear_namespaces", "if id.startswith(base) else None", "if True else None", CACHE_TESTS,
    ),
    Mutant(
        "a store evicts while pages of cleared chunks could be freed",
        SPACE, "Space._allocate_slot", "if done := self._free_one_chunk():", "if done := 0:", CACHE_TESTS,
    ),
    Mutant(
        "an eviction is not published",
        SPACE, "Space._evict_chunk", "plan.evicted.append((chunk.namespace.id, chunk.key))", "pass",
        ("daemon/test_kv_stream.py::test_all_consumers_know_what_l1_holds_through_evictions_a_clear_a_halt_a_kill_and_the_end",),
    ),
    Mutant(
        "the end of a used prefix becomes the youngest",
        CACHE_STORES, "StorePlans.finish_store", "*reversed(plan.prefix)", "*plan.prefix", CACHE_TESTS,
    ),
    Mutant(
        "a store has no space while leases of a disconnected engine could end",
        SPACE, "Space._allocate_slot", "if done := self.leases.end_one():", "if done := 0:",
        ("issues/test_turns_grew_with_the_cache.py::test_a_store_waits_for_the_leases_of_a_disconnected_engine",),
    ),
    Mutant(
        "one rank fills L1 with what the others have no room for",
        CACHE_STORES, "StorePlans.plan_store", "(pages * groups.slots[group])", "pages",
        ("issues/test_a_prompt_larger_than_l1_was_refused_whole.py",),
    ),
    Mutant(
        "leases of a disconnected engine never end",
        LEASES, "Leases.end_of_instance", "self._ownerless.append(leases)", "pass", CACHE_TESTS,
    ),
    # ---- what is reported of a request ------------------------------------------------------------
    Mutant(
        "the end of an earlier request with the same id is the end of this one",
        EXPLAIN, "Explain._open", "request.ended is None and ", "", EXPLAIN_TESTS,
    ),
    Mutant(
        "an id finds also the requests whose id only begins so",
        EXPLAIN, "Explain.find_requests", "(found or begun)", "[*found, *begun]", EXPLAIN_TESTS,
    ),
    Mutant(
        "requests are remembered beyond their bytes",
        EXPLAIN, "Explain._grow", "self._bytes > self._most_bytes", "False", EXPLAIN_TESTS,
    ),
    Mutant(
        "chunks that were never stored count as avoidable",
        "kvserver/telemetry/explain_facts.py", "Request.tokens", " - never * self.chunk_tokens", "", EXPLAIN_TESTS,
    ),
    Mutant(
        "the content of a field without a value is shown",
        "kvserver/telemetry/differences.py", "_shown", 'else ""', "else str(content)", ("unit/telemetry/test_differences.py",),
    ),
    Mutant(
        "no namespace that has the missing chunk is named",
        CACHE, "Cache.lookup", "self._namespace_with(missing_key)", 'b""', EXPLAIN_TESTS,
    ),
    # ---- why a lookup missed ------------------------------------------------------------------
    Mutant(
        "all missing chunks count under the reason of the first",
        CACHE, "Cache._why_missed", "if reason is MissReason.NEVER_STORED:", "if True:", MISSES_TESTS,
    ),
    Mutant(
        "chunks behind one that was never stored count as evicted",
        CACHE, "Cache._why_missed", "if reason is MissReason.NEVER_STORED:", "if False:", MISSES_TESTS,
    ),
    Mutant(
        "what is evicted from a large L1 is soon forgotten",
        MISSES, "EvictedKeys.add", "max(LEAST_REMEMBERED, chunks)", "LEAST_REMEMBERED", MISSES_TESTS,
    ),
    Mutant(
        "evicted keys overwrite each other while there is room",
        MISSES, "_Generation.add", "marks.index(0) if 0 in marks else self.room % _BUCKET", "self.room % _BUCKET",
        MISSES_TESTS,
    ),
    # ---- the index ----------------------------------------------------------------------------
    Mutant(
        "one rank's slot moves the bounds of the others wrongly",
        CHUNK, "Chunk.set_slot", "range(number, count)", "range(number + 1, count)", INDEX_TESTS,
    ),
    Mutant(
        "chunks of a cleared namespace are not detached",
        INDEX, "Index.detach_namespace", "namespace.cleared = True", "pass", INDEX_TESTS,
    ),
    Mutant(
        "a chunk that left the index is not detached",
        CHUNK, "Namespace.left", "self._left.cleared = True", "pass", INDEX_TESTS,
    ),
    Mutant(
        "an emptied namespace stays in memory",
        INDEX, "Index.detach_chunk", "del self._namespaces[namespace.id]", "pass", INDEX_TESTS,
    ),
    Mutant(
        "an emptied namespace takes whichever has its id along",
        INDEX, "Index.detach_chunk", "is namespace:", "is not None:", INDEX_TESTS,
        equivalent="remove() requires a chunk that is not detached, so its namespace is not cleared, and only clear() "
        "lets another take its id",
    ),
    Mutant(
        "cleared chunks are counted on",
        INDEX, "Index.detach_namespace", "self._count(namespace, -len(namespace.chunks))", "pass", INDEX_TESTS,
    ),
    # ---- pages --------------------------------------------------------------------------------
    Mutant(
        "the last page of a slot is missing",
        POOL, "PagePool.pages_for", "-(-slot_bytes // self.page_bytes)", "slot_bytes // self.page_bytes or 1", POOL_TESTS,
    ),
    Mutant(
        "a slot is refused although enough pages are free here and there",
        POOL, "PagePool.allocate_pages", "if count <= self.unused_pages:", "if False:", POOL_TESTS,
    ),
    Mutant(
        "a slot is refused if it needs more than a sixteenth of the free pages in several extents",
        POOL, "PagePool.allocate_pages", "if count <= self.unused_pages:", "if count <= self.unused_pages // 16:",
        ("unit/config/test_capacity.py::test_bursts_of_three_models_in_no_order_leave_no_room_stranded",),
    ),
    Mutant(
        "unpinned pages are used before all pinned ones are",
        POOL, "PagePool.allocate_pages", "if count <= self._pinned.pages:", "if False:", POOL_TESTS,
    ),
    Mutant(
        "a slot is cut from pages that are in use",
        POOL, "_FreeExtents.cut_extent", "self._insert(first + count, found - count)", "self._insert(first, found - count)", POOL_TESTS,
    ),
    Mutant(
        "free pages do not merge with those behind them",
        POOL, "_FreeExtents.add_extent", "if after is not None:", "if False:", POOL_TESTS,
    ),
    Mutant(
        "a freed slot that pinning reached into is all pinned",
        POOL, "PagePool._free_extent", "elif pinned >= count:", "elif pinned > 0:", POOL_TESTS,
    ),
    Mutant(
        "a large slot is gathered from shreds",
        POOL, "_gather", "least = granularity(count)", "least = 1", POOL_TESTS,
    ),
    Mutant(
        "a large L1 has more pages than there are numbers",
        POOL, "page_bytes_for", "page *= 2", "break", POOL_TESTS,
    ),
    # ---- who leaves ---------------------------------------------------------------------------
    Mutant(
        "a chunk that was used since is evicted by its old place",
        EVICTION, "LeastRecentlyUsed.track", "if older is not NOWHERE:", "if False:", EVICTION_TESTS,
    ),
    Mutant(
        "a chunk that a request leases is evicted",
        SPACE, "Space._allocate_slot", "if not (chunk.leases or chunk.pins):", "if not chunk.pins:", CACHE_TESTS,
    ),
    Mutant(
        "a chunk that is copied is evicted",
        SPACE, "Space._allocate_slot", "if not (chunk.leases or chunk.pins):", "if not chunk.leases:", CACHE_TESTS,
    ),
    Mutant(
        "a chunk that was freed comes back to the policy",
        EVICTION, "LeastRecentlyUsed.track", "elif chunk.detached:", "elif False:", EVICTION_TESTS,
    ),
    Mutant(
        "incomplete chunks leave as late as the others",
        EVICTION, "LeastRecentlyUsed.track", "end = self._incomplete", "end = used", EVICTION_TESTS,
    ),
    Mutant(
        "incomplete chunks are not evicted",
        SPACE, "Space._allocate_slot", "self.policy.pop_incomplete() or ", "", POLICY_TESTS,
    ),
    Mutant(
        "the end of a request is no use of what it found",
        LEASES, "Leases._end", "self._policy.use(", "self._policy.track(", POLICY_TESTS,
    ),
    Mutant(
        "what is used again stays on probation",
        SLRU, "ProtectedSegment.use", "chunk.state |= _USED", "pass", EVICTION_TESTS,
    ),
    Mutant(
        "the protected segment grows without end",
        SLRU, "ProtectedSegment.pop_chunk", "self._demote()", "pass", EVICTION_TESTS,
    ),
    Mutant(
        "what is stored again soon after its eviction is as new as any other",
        CACHE_STORES, "StorePlans.extend_plan", "if plan.returning:", "if False:", POLICY_TESTS,
    ),
    Mutant(
        "a chunk comes back without its prefix",
        CACHE_STORES, "StorePlans.extend_plan", "plan.returning = plan.returning and ", "plan.returning = ", POLICY_TESTS,
    ),
    # ---- shares of L1 -------------------------------------------------------------------------
    Mutant(
        "a share keeps nothing",
        SHARES, "Shares.spares", " or model.pages - chunk.page_count >= model.share_pages", " or True", SHARES_TESTS,
    ),
    Mutant(
        "an incomplete chunk is spared",
        SHARES, "Shares.spares", "not chunk.ready or ", "", SHARES_TESTS,
    ),
    Mutant(
        "an eviction leaves a model with less than its share where a chunk has several pages",
        SHARES, "Shares.spares", "model.pages - chunk.page_count >= model.share_pages", "model.pages > model.share_pages",
        SHARES_TESTS,
    ),
    Mutant(
        "what was spared stays before what is younger",
        SPACE, "Space._allocate_slot", "self._shares.pop_released() or ", "", SHARES_TESTS,
    ),
    Mutant(
        "a model has no space in its own share",
        SPACE, "Space._allocate_slot", "self._shares.pop_own(model)", "None", SHARES_TESTS,
    ),
    Mutant(
        "to spare a chunk costs a store no step",
        SPACE, "Space._allocate_slot", "plan.steps -= 1\n                continue", "continue", SHARES_TESTS,
    ),
    Mutant(
        "shares of more than all of L1 are taken",
        "kvserver/config/shares.py", "parse_shares", "> 1:", "> 2:", ("unit/config/test_config.py",),
    ),
    # ---- who shares ---------------------------------------------------------------------------
    Mutant(
        "chunks of another size are shared",
        NAMESPACE, "fingerprint", "        first.chunk_tokens,\n", "", NAMESPACE_TESTS,
    ),
    Mutant(
        "engines with other windows share, and their blocks of other sizes too",
        NAMESPACE, "fingerprint", "        first.object_groups,\n", "", NAMESPACE_TESTS,
    ),
    Mutant(
        "the groups of planes do not count",
        NAMESPACE, "fingerprint", "(plane.group, plane.run_bytes)", "plane.run_bytes",
        ("daemon/test_groups.py::test_models_whose_groups_differ_share_nothing",),
    ),
    Mutant(
        "only the first rank's planes count",
        NAMESPACE, "fingerprint", "for rank in ranks]", "for rank in ranks[:1]]", NAMESPACE_TESTS,
    ),
    Mutant(
        "the layout does not count",
        NAMESPACE, "fingerprint", "[rank.layout, [", "[[", NAMESPACE_TESTS,
    ),
    Mutant(
        "no field of the configuration counts",
        NAMESPACE, "fingerprint", "{field.name: field.digest for field in counted(first).values()}", "{}", NAMESPACE_TESTS,
    ),
    Mutant(
        "a private engine shares with its next start",
        NAMESPACE, "fingerprint", "[first.instance_id, first.incarnation] if", "[] if", NAMESPACE_TESTS,
    ),
    Mutant(
        "ranks of two configurations are taken for one engine's",
        NAMESPACE, "check_agreement", "if _digest(", "if False and _digest(", NAMESPACE_TESTS,
    ),
    Mutant(
        "a LoRA's namespace is not below that of its epoch",
        NAMESPACE, "with_variant", 'variant.split("/", 1)', "[variant]", NAMESPACE_TESTS,
    ),
    Mutant(
        "ranks with different numbers of blocks are taken for one engine's",
        NAMESPACE, "check_agreement", '"num_blocks", ', "", NAMESPACE_TESTS,
    ),
)  # fmt: skip

SERVER = (
    Mutant(
        "a container's limit need not hold what the index needs",
        CAPACITY, "bytes_beside_l1", "+ l1_bytes * _INDEXED_BYTES // _OBJECT_BYTES", "",
        ("unit/cli/test_checks.py", "daemon/test_kubernetes.py"),
    ),
    Mutant(
        "a limit that is too low for what is beside L1 is none",
        CHECKS, "memory_beside_l1", "if limit >= needed * MiB:", "if limit >= l1_bytes:",
        ("unit/cli/test_checks.py",),
    ),
    # ---- KV events ----------------------------------------------------------------------------
    Mutant(
        "a chunk that is described again is published again",
        HUB, "Hub._describe", "if key not in described:", "if True:", ("unit/kv_events/test_kv_hub.py",),
    ),
    Mutant(
        "KV events of a window name all blocks of its chunks",
        "kvserver/kv_events/descriptions.py", "of_objects", "if not objects.members:", "if True:",
        ("unit/kv_events/test_kv_groups.py",),
    ),
    Mutant(
        "KV events of a model with one window name all blocks of its chunks",
        GROUPS, "Groups.__init__", " and self.objects[0].blocks * self.objects[0].block_tokens == chunk_tokens", "",
        ("adapters/test_kv_events_groups.py::test_what_is_stored_dropped_and_cleared_is_named_by_group",),
    ),
    Mutant(
        "an engine announces an object in KV cache groups that it has no blocks of",
        "kvserver/kv_events/feed.py", "_FeedCursor.blocks_of", "groups or ", "",
        ("adapters/test_kv_events_groups.py::test_what_is_stored_dropped_and_cleared_is_named_by_group",),
    ),
    Mutant(
        "a resync names a chunk twice to the index",
        HUB, "Hub._confirm_l1", " if key not in confirmed]", "]", CONSUMERS,
    ),
    Mutant(
        "a chunk that is stored again during a resync is unknown to the index",
        HUB, "Hub._evict", "self._confirmed.get(tier, {})", "dict[bytes, dict[int, set[bytes]]]()", ("unit/server/test_resync.py",),
    ),
    Mutant(
        "a resync that begins again believes the one before",
        HUB, "Hub._resync", "self._confirmed[tier] = {}", "self._confirmed.setdefault(tier, {})", CONSUMERS,
    ),
    Mutant(
        "what L2 has described during a resync is removed at its end",
        HUB, "Hub._add", "if tier is Tier.L2 and tier in self._confirmed:", "if False:", ("unit/kv_events/test_kv_hub.py",),
    ),
    Mutant(
        "an eviction of a chunk removes its last block from those that are stored one by one",
        "kvserver/routing/prefix_index.py", "KVIndex.observe", "group >= 0 if event.group is None", "True if event.group is None",
        ("unit/routing/test_kv_index.py",),
    ),
    Mutant(
        "single blocks are found behind a fill that ends early",
        "kvserver/routing/prefix_index.py", "KVIndex._with_tail", "behind(whole) if match.l1_l2 == whole else match.l1_l2",
        "behind(match.l1_l2)", ("unit/routing/test_kv_index.py",),
    ),
    Mutant(
        "a match of a hybrid model does not join L1 and L2",
        "kvserver/routing/prefix_index.py", "KVIndex._boundaries", "first | second for", "max(first, second) for",
        ("unit/routing/test_boundaries.py",),
    ),
    Mutant(
        "an object that two tiers hold is removed with the first of them",
        L2_EVENTS, "L2Events._changed", "elif not elsewhere:", "else:", ("unit/server/test_l2_events.py",),
    ),
    Mutant(
        "a resync of L2 names again what has changed meanwhile",
        L2_EVENTS, "L2Events._unnamed", " and ObjectName(namespace, group, key) not in self._published", "", ("unit/server/test_l2_events.py",),
    ),
    Mutant(
        "a resync of L2 names what two tiers hold twice",
        L2_EVENTS, "L2Events._unnamed", "named = self._holds(walked, namespace, group, keys)", "named = 0", ("unit/server/test_l2_events.py",),
    ),
    Mutant(
        "a tier that cannot be read any more stays announced",
        L2_EVENTS, "L2Events.step", "self._bus.needs_resync.add(L2Resynced)", "pass", CONSUMERS,
    ),
    Mutant(
        "an object in L1 and L2 counts twice for the memory of descriptions",
        "kvserver/kv_events/described.py", "Described.add", "self.bytes += 0 if shared else size", "self.bytes += size",
        ("unit/kv_events/test_kv_hub.py",),
    ),
    Mutant(
        "descriptions of L2 leave no memory for those of L1",
        "kvserver/kv_events/described.py", "Described.trim", "self._l2_bytes <= self._limit // 2", "True",
        ("unit/kv_events/test_kv_hub.py",),
    ),
    Mutant(
        "a file tier does not report what it evicts",
        "kvserver/l2/files/records.py", "FileRecords.make_room", "self._changed(False, ObjectName(*evicted[:3]))", "pass",
        ("daemon/test_l2_events.py::test_what_the_tier_evicts_is_removed",),
    ),
    Mutant(
        "a follower receives again what its snapshot had",
        FEED, "_FeedCursor.start", "self._events[0].number <= number", "False", CONSUMERS,
    ),
    Mutant(
        "what happened since the snapshot is lost with its end",
        FEED, "_FeedCursor._pop", "self.whole = True", "self.whole = True; self.ready.clear()",
        ("unit/kv_events/test_kv_feed.py::test_what_happens_after_the_snapshot_is_in_the_same_reply_behind_it",),
    ),
    Mutant(
        "a reply that was lost does not come again",
        FEED, "_FeedCursor.advance", "if (request.cursor if request.follow == self.number else 0) == self._end:", "if True:",
        CONSUMERS,
    ),
    Mutant(
        "a stream begins without a clear of what an earlier daemon published",
        STREAM, "Stream._view", "self._add(view, [self._writer.cleared], 0)\n            if", "self._add(view, [], 0)\n            if",
        CONSUMERS,
    ),
    Mutant(
        "a block that two chunks share is removed with the first of them",
        "kvserver/kv_events/ledger.py", "Ledger.removed", "return _runs(flags)", "return _runs(bytes([1]) * len(flags))", CONSUMERS,
    ),
    # ---- copies -------------------------------------------------------------------------------
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
        "what a disconnected worker stored is published",
        STORES, "Stores.ended", "completion.done and not ticket.worker.closing", "completion.done",
        ("model/test_random_walk.py",),
    ),
    Mutant(
        "the null block is stored and loaded into",
        COPY_CHECKS, "_block_ids", "packed, least, most)", "packed, least, most, 0xFFFFFFFF)",
        (REFUSALS,),
    ),
    Mutant(
        "the null block of a window is loaded into",
        COPY_CHECKS, "_block_ids", "packed, least, most)", "packed, least, most, 0xFFFFFFFF)",
        ("daemon/test_groups.py::test_a_bad_load_is_refused_and_writes_nothing",),
    ),
    Mutant(
        "a load may leave out a whole chunk",
        COPY_CHECKS, "load_blocks", "if request.skip_blocks >= group.blocks:", "if False:",
        (REFUSALS,),
    ),
    Mutant(
        "a store that was whole after its deadline is published",
        STORES, "Stores.ended", "completion.done and self.copies.now_ns() > ticket.request.deadline_ns", "False",
        ("issues/test_a_late_store_was_published.py",),
    ),
    Mutant(
        "a copy that is late as it comes is begun",
        SERVER_COPIES, "Copies.namespace_of", "if request.deadline_ns <= self.now_ns():", "if False:",
        ("unit/server/test_refusals.py::test_nothing_is_evicted_for_a_store_whose_deadline_has_passed",),
    ),
    Mutant(
        "the word of a refused copy stays PENDING",
        SERVER_COPIES, "Copies.refuse", "worker.words.fail_word(request.word, request.sequence)", "pass",
        (REFUSALS,),
    ),
    Mutant(
        "a state word outside its page is written to",
        SERVER_COPIES, "Copies.worker_of", "if request.word >= worker.spec.words:", "if False:",
        (REFUSALS,),
    ),
    Mutant(
        "keys of chunks of another size are taken",
        COPY_CHECKS, "check_chunk", "if chunk_blocks != spec.chunk_blocks:", "if False:",
        (REFUSALS,),
    ),
    Mutant(
        "a part of the chunks is stored from the first blocks",
        STORES, "Stores._copy", "in plan.positions]", "in range(len(plan.positions))]",
        ("daemon/test_groups.py::test_a_part_of_the_chunks_is_stored_from_the_right_blocks",),
    ),
    Mutant(
        "the blocks that a load leaves out are written",
        SERVER_COPIES, "Copies.submit", "skip=skip,", "skip=0,",
        ("daemon/test_round_trip.py::test_the_first_blocks_of_a_load_can_be_left_untouched",),
    ),
    Mutant(
        "the server takes every rank's copy of what all of them hold",
        INSTANCES, "Worker._group", ", spec.rank, spec.world_size)", ")",
        ("daemon/test_replicated.py",),
    ),
    Mutant(
        "a store that cannot be queued keeps its slots pinned",
        STORES, "Stores._copy", "            self.cache.finish_store(plan, copied=False)\n", "",
        ("daemon/test_copies_not_taken.py",),
    ),
    Mutant(
        "a load that cannot be queued keeps its chunks pinned",
        LOADS, "Loads._copy", "            self.cache.finish_load(found, copied=False)\n", "",
        ("daemon/test_copies_not_taken.py",),
    ),
    Mutant(
        "a store that waits goes on for a disconnected worker",
        STORES, "Stores._extend_plan", "if ticket.worker.closing:", "if False:",
        ("issues/test_turns_grew_with_the_cache.py::test_a_worker_that_closes_while_its_store_waits_is_unmapped_and_leaves_nothing",),
    ),
    Mutant(
        "memory is unmapped under a store that waits",
        WORKERS, "Workers.unmap_if_idle", "and not worker.waiting ", "",
        ("issues/test_turns_grew_with_the_cache.py::test_a_worker_that_closes_while_its_store_waits_is_unmapped_and_leaves_nothing",),
    ),
    Mutant(
        "copies in flight are not cancelled at the daemon's end",
        UPKEEP, "Upkeep.drain", "self.workers.close_all(Disconnect.STOPPED)", "pass",
        ("daemon/test_operation.py::test_sigterm_ends_copies_in_flight_long_before_they_are_done_and_exits_zero",),
    ),
    Mutant(
        "the status shows no memory nodes",
        STATUS, "", "numa_nodes=list(placement.nodes)", "numa_nodes=[]",
        ("daemon/test_l1_memory.py::test_l1_may_stay_on_one_node",),
    ),
    # ---- lifelines ----------------------------------------------------------------------------
    Mutant(
        "there is no limit of connections",
        LIFELINE, "Lifelines.accept", "len(self._lifelines) >= MAX_CONNECTIONS or ", "",
        ("issues/test_no_test_covered_who_connects.py::test_one_connection_too_many_is_hung_up_on_and_the_others_live",),
    ),
    Mutant(
        "any user may connect",
        LIFELINE, "Lifelines.accept", " or uid not in (os.getuid(), 0)", "",
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
        ("unit/server/test_lifeline.py",),
    ),
    Mutant(
        "descriptors that the kernel left out are not missed",
        LIFELINE, "Lifelines._attach", "if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):", "if False:",
        ("unit/server/test_lifeline.py::test_too_many_descriptors_are_refused_and_closed",),
    ),
    Mutant(
        "an attachment serves many registrations",
        LIFELINE, "Lifelines.unused", " or lifeline.registration is not None", "",
        ("unit/server/test_lifeline.py::test_an_attachment_serves_one_registration",),
    ),
    Mutant(
        "descriptors that no worker claimed stay open",
        LIFELINE, "Lifelines.close", "os.close(fd)", "pass",
        ("unit/server/test_lifeline.py::test_descriptors_that_no_worker_claims_are_closed_with_their_connection",),
    ),
    Mutant(
        "descriptors that come after Attach stay open",
        LIFELINE, "Lifelines.read", "os.close(extra)", "pass",
        ("unit/server/test_lifeline.py::test_what_comes_after_attach_is_ignored",),
    ),
    Mutant(
        "a process that left a child is not seen to be dead",
        LIFELINE, "_open_process", "return os.pidfd_open(pid)", "return None",
        (f"{FORKED}::test_the_daemon_notices_the_death_while_the_child_runs",),
    ),
    Mutant(
        "a forked child keeps the lifeline",
        CLIENT, "_close_in_child", "attachment.close()", "pass", (f"{FORKED}::test_a_child_has_no_lifeline",),
    ),
    Mutant(
        "the server ends a connection without a word",
        LIFELINE, "Lifelines.detach", "self._send(lifeline, encode(Detached()))", "pass", (DYING,),
    ),
    Mutant(
        "the end of a connection is the end of the process",
        CLIENT, "Attachment.wait_for_death", "poller.poll()", "pass", (DYING,),
    ),
    # ---- requests -----------------------------------------------------------------------------
    Mutant(
        "a copy meant for the last daemon is taken",
        HANDLERS, "Handlers._check_boot", "if boot_id != self.hello.boot_id:", "if False:",
        (REFUSALS,),
    ),
    Mutant(
        "every version is spoken",
        HANDLERS, "Handlers._hello", "if not OLDEST_PROTOCOL_VERSION <= request.protocol_version <= PROTOCOL_VERSION:",
        "if False:", (REFUSALS,),
    ),
    Mutant(
        "a hit is reported although the device is lost",
        L1_LOOKUPS, "L1Lookups.answer", "if namespace is None or self.devices.lost:", "if namespace is None:",
        ("daemon/test_device_loss.py",),
    ),
    Mutant(
        "a disconnected instance is never forgotten",
        WORKERS, "Workers.tick", "self.instances.forget_departed(self.clock())", "pass",
        ("model/test_departures.py",),
    ),
    Mutant(
        "a worker whose memory was taken away stays",
        UPKEEP, "Upkeep._complete", "self.workers.close_worker(worker, Disconnect.DIED)", "pass",
        ("daemon/test_failures.py::test_memory_truncated_during_a_store_drops_the_instance_and_publishes_nothing",),
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
    # ---- who is connected ---------------------------------------------------------------------
    Mutant(
        "another live engine of the same id is taken for this one",
        INSTANCES, "Instances._check_incarnation", "if instance.incarnation != incarnation:", "if False:",
        (REFUSALS,),
    ),
    Mutant(
        "an instance serves on when one of its ranks disconnected",
        INSTANCES, "Instances.remove_worker", "        instance.refresh_namespace()\n", "",
        ("daemon/test_round_trip.py::test_a_rank_may_come_back_after_its_connection_ended",),
    ),
    Mutant(
        "an instance serves before the memory of all ranks is mapped",
        INSTANCES, "Instance.refresh_namespace", "all(worker.mapped for worker in self.workers.values())", "True",
        ("daemon/test_ranks_still_mapped.py",),
    ),
    Mutant(
        "the variants of an instance outlive its namespace",
        INSTANCES, "Instance.refresh_namespace", "self._variants.clear()", "pass",
        ("daemon/test_round_trip.py::test_a_rank_that_comes_back_otherwise_takes_the_variants_along",),
    ),
    Mutant(
        "totals forget the disconnected instances",
        INSTANCES, "Instances._forget", "self._forgotten.add(self.departed.pop(name).counts)", "self.departed.pop(name)", ("unit/server/test_departed.py",),
    ),
    Mutant(
        "memory is unmapped while copies run",
        WORKERS, "Workers.unmap_if_idle", "not worker.tickets and ", "", ("daemon/test_failures.py",),
    ),
    Mutant(
        "the copies of a disconnected worker go on",
        WORKERS, "Workers.close_worker", "self.tickets.cancel_copy(number)", "pass", ("daemon/test_failures.py",),
    ),
    Mutant(
        "the leases of a disconnected engine stay",
        WORKERS, "Workers.close_worker", "self.cache.end_leases_of(ended.instance_id)", "pass", ("daemon/test_failures.py",),
    ),
    # ---- what is shown of settings ---------------------------------------------------------------
    Mutant(
        "/config shows the password of a tier",
        "kvserver/config/sources.py", "Configuration.table", "_shown(getattr(self.settings, name))", "getattr(self.settings, name)",
        (SHOWN_PASSWORDS,),
    ),
    Mutant(
        "a refused setting is logged with its password",
        "kvserver/config/sources.py", "_bad", "{_shown(values[name])!r}", "{values[name]!r}", (SHOWN_PASSWORDS,),
    ),
    Mutant(
        "a password with an @ is shown from there on",
        "kvserver/config/tiers.py", "without_user", "//[^/?#\\s]+@", "//[^@/?#\\s]+@", (SHOWN_PASSWORDS,),
    ),
)  # fmt: skip

WORKER_HALF = (
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
        "a load that may still be written frees its blocks",
        ENDINGS, "load_action", "return Action.QUARANTINE", "return Action.FAIL",
        ("adapters/test_endings.py", "adapters/test_failures.py::test_stopped_during_a_load"),
    ),
    Mutant(
        "quarantined blocks are not released when the load is over",
        WORKER, "WorkerHalf._load_ended", "self._report.released.append(spec.copy_id)", "pass",
        ("adapters/test_failures.py::test_stopped_during_a_load",),
    ),
    Mutant(
        "a load that the server may begin is failed",
        ENDINGS, "load_action", "return Action.TIME_OUT", "return Action.FAIL",
        ("adapters/test_failures.py::test_a_load_that_was_given_up_is_never_begun",),
    ),
    Mutant(
        "a load that is refused waits for its deadline",
        WORKER, "WorkerHalf._receive", "copy.move(State.PENDING, State.CANCELLED)", "pass",
        ("adapters/test_failures.py::test_a_load_that_is_refused_is_over_at_once",),
    ),
    Mutant(
        "a finished load is reported twice",
        WORKER, "WorkerHalf.take_finished", "self._finished, self._failed = set(), set()", "pass",
        ("adapters/test_hazards.py",),
    ),
    Mutant(
        "ranks take turns within a message instead of a prompt",
        STORE_PLANS, "StorePlanner._add_chunks", "first_chunk=chunks.start", "first_chunk=0",
        ("adapters/test_ranks.py::test_ranks_take_turns_to_store_what_all_hold",),
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
    # ---- blocks that must not be touched ------------------------------------------------------
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
        "quarantined blocks keep vLLM from a reset",
        BLOCKPOOL, "PoolHook._unpinned", "self.unpin(pinned)", "pinned = []", (RESET,),
    ),
    Mutant(
        "a reset frees quarantined blocks",
        BLOCKPOOL, "PoolHook._unpinned", "self.pin(pinned)", "pass", (RESET,),
    ),
    Mutant(
        "scales are filled over what was loaded",
        BACKENDS, "begin_scales", '.endswith("per_token_head")', '.endswith("none")',
        ("issues/adapters/test_scales_were_filled_over_a_load.py",),
    ),
    Mutant(
        "sessions are served whose hashes are other tokens'",
        SUPPORT, "rehashes_sessions", ">= (0, 32)", ">= (0, 0)", (SESSIONS,),
    ),
    Mutant(
        "what was computed upon a session's blocks is stored",
        SCHEDULER, "SchedulerHalf.new_request", "self._stale_hashes = True", "pass", (SESSIONS,),
    ),
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
        "a request that must not be stored is",
        SCHEDULER, "SchedulerHalf.plan_step", "if may_store and state.wishes.stores and not state.lost:", "if may_store and not state.lost:",
        ("adapters/test_wishes.py",),
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
        HAZARDS, "PinnedStores._is_awaited", "oldest.step <= self._ended", "oldest.step <= self._planned", (WITHOUT_END,),
    ),
    Mutant(
        "stores do not pin the blocks that they read",
        HAZARDS, "PinnedStores.add", "self._pool.pin(block_ids)", "pass",
        (f"{PINS}::test_a_late_store_stores_what_its_request_computed",),
    ),
    Mutant(
        "the pins of a store outlive it",
        HAZARDS, "PinnedStores._forget", "self._pool.unpin(self._stores.pop(store_id).block_ids[::-1])", "self._stores.pop(store_id)",
        (f"{PINS}::test_a_session_that_ends_ends_the_pins_of_its_stores",),
    ),
    Mutant(
        "a prefix's beginning is evicted before its end",
        HAZARDS, "PinnedStores._forget", "block_ids[::-1]", "block_ids",
        ("adapters/test_blockpool.py::test_of_a_prefix_that_a_store_kept_the_end_is_evicted_first",),
    ),
    Mutant(
        "stores keep any number of blocks",
        HAZARDS, "PinnedStores.cancel_beyond", "if len(kept) + len(blocks) <= most:", "if True:", (PINS,),
    ),
    Mutant(
        "a store is cancelled again and again",
        HAZARDS, "PinnedStores.cancel_beyond", "store.cancelled = True", "pass",
        (f"{PINS}::test_a_request_that_needs_the_blocks_waits_for_the_cancel_of_the_store",),
    ),
    Mutant(
        "stores are cancelled for blocks that the engine does not need",
        SCHEDULER, "SchedulerHalf._bound_pins", "2 * self._pool.free < self._pool.size", "True",
        (f"{PINS}::test_an_engine_with_room_keeps_the_blocks_of_all_its_stores",),
    ),
    Mutant(
        "a request waits for blocks that stores keep",
        SCHEDULER, "SchedulerHalf._bound_pins", "any(state.awaits_blocks for state in requests)", "False",
        (f"{PINS}::test_a_long_prompt_waits_for_the_cancel_though_half_of_the_pool_is_free",),
    ),
    Mutant(
        "stores are cancelled for a request that waits for its answer",
        SCHEDULER, "SchedulerHalf.matched_tokens", "state.awaits_blocks = tokens is not None", "state.awaits_blocks = True",
        ("issues/adapters/test_stores_were_cancelled_while_a_lookup_was_awaited.py",),
    ),
    Mutant(
        "stores go on when the weights may have changed",
        SCHEDULER, "SchedulerHalf._begin_epoch", "self._plan.abort_stores.extend(self._pins)", "pass",
        (f"{PINS}::test_a_reset_succeeds_beside_stores_and_cancels_them",),
    ),
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
)  # fmt: skip

SCHEDULER_HALF = (
    Mutant(
        "the tokens of a failed load count as loaded",
        SOURCES, "Sources.load_failed", "            account.loading = None\n", "", ("adapters/test_sources.py",),
    ),
    Mutant(
        "a request that was resumed counts as it was placed then",
        SOURCES, "Sources.placed", " and request.num_preemptions <= 0", "", ("adapters/test_sources.py",),
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
        SCHEDULER, "SchedulerHalf._begin_epoch", "state.variant = self._variants.of(state.request) or state.variant", "pass",
        ("adapters/test_resets.py",),
    ),
    Mutant(
        "a load under way at a reset is used",
        SCHEDULER, "SchedulerHalf._begin_epoch", "self._abort_loads(state)", "pass",
        ("adapters/test_resets.py",),
    ),
    Mutant(
        "KV of the old weights is stored after a reset",
        SCHEDULER, "SchedulerHalf.reset_cache", "self._pool.clears + (not self._pool.unused)", "0",
        ("adapters/test_resets.py",),
    ),
    Mutant(
        "the position that a draft model rewrites is stored",
        STORE_PLANS, "StorePlanner._confirmed", "            tokens = request.num_tokens - 1", "            pass",
        ("adapters/test_reuse.py::test_with_a_draft_model_the_last_position_is_held_back",),
    ),
    Mutant(
        "rejected drafts are stored",
        STORE_PLANS, "StorePlanner._confirmed",
        "len(request.block_hashes) * self._chunks.hash_block_tokens", "computed",
        ("adapters/test_reuse.py::test_rejected_drafts_are_never_stored",),
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
        "a request that is aborted while it loads stores blocks that were not filled",
        SCHEDULER, "SchedulerHalf.allocated", "state.computed = 0", "pass",
        (
            "adapters/test_tails.py::"
            "test_a_preempted_request_that_is_aborted_before_its_blocks_are_filled_stores_none_of_them",
        ),
    ),
    Mutant(
        "single blocks behind the end of the chunks are not loaded",
        LOAD_PLANS, "LoadPlanner.plan", "if end > of_chunks:", "if False:",
        ("adapters/test_tails.py::test_a_prompt_is_found_up_to_its_last_whole_block",),
    ),
    Mutant(
        "a lookup that ends inside a chunk does not go on there",
        "adapters/common/lookups.py", "Lookups._answered", "if found.wants_tail:", "if False:",
        ("adapters/test_tails.py::test_the_next_turn_of_a_chat_finds_where_the_last_one_ended",),
    ),
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
        "the state at the end of what prompts share is not requested",
        SCHEDULER, "SchedulerHalf.matched_tokens", "self._want_state(", "print(", STATE_TESTS,
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
        "states are served where no state is kept at the end of a block",
        SUPPORT, "_states_not_served", 'spec.mamba_cache_mode != "align"', "False", ("adapters/test_refusals.py",),
    ),
    Mutant(
        "states are served with speculative decoding",
        SUPPORT, "_states_not_served", "vllm_config.speculative_config", "False",
        ("adapters/test_refusals.py",),
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
        "what a kept boundary needs is dropped with the generated one before",
        "adapters/common/boundaries.py", "Boundaries.superseded", "chunk for chunk in before if chunk not in needed", "*before",
        ("adapters/test_kept_boundaries.py::test_what_each_kept_boundary_needs_is_stored_and_stays",),
    ),
    Mutant(
        "a load counts as whole although its copy of another object group failed",
        WORKER, "WorkerHalf._part_ended", "any_failed or failed", "failed",
        ("adapters/test_hybrids.py::test_when_one_object_group_fails_to_load_the_request_is_computed",),
    ),
    Mutant(
        "a hit leaves no token to compute",
        HITS, "Hits._worth_loading", "request.num_tokens - 1) - local_tokens",
        "request.num_tokens) - local_tokens",
        ("adapters/test_reuse.py::test_a_prompt_of_whole_chunks_leaves_its_last_token_to_compute",),
    ),
    Mutant(
        "a hit does not count what the engine has itself",
        HITS, "Hits._worth_loading", "request.num_tokens - 1) - local_tokens", "request.num_tokens - 1)",
        ("adapters/test_reuse.py::test_blocks_that_the_engine_has_itself_are_left_out_of_a_load",),
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
        "a load begins at the start of its chunk",
        CHUNKS, "Chunks.to_load", "return chunks, first - begin, ", "return chunks, 0, ",
        ("adapters/test_reuse.py::test_blocks_that_the_engine_has_itself_are_left_out_of_a_load",),
    ),
    Mutant(
        "a preempted request keeps its old answer",
        HITS, "Hits._answer_to", "            state.answer = None\n", "",
        ("adapters/test_reuse.py::test_preempted_requests_go_on_and_load_what_they_had_stored",),
    ),
    Mutant(
        "a resumed request keeps the blocks that it lost",
        REQUESTS, "Requests._follow_tables", "state.tables = ()", "pass",
        ("issues/adapters/test_vllm_0_29_stored_nothing.py::test_preempted_requests_are_stored_from_their_new_blocks",),
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
        "an answer from before a failure is loaded",
        HITS, "Hits._answer_to", "state.answer.hit_chunks > self._useful_chunks(state)", "False",
        (f"{FAILED_LOADS_TEST}::test_an_answer_from_before_a_failure_is_not_used_as_far_as_it_failed",),
    ),
    Mutant(
        "keys that were stored anew stay remembered as failed",
        STORE_PLANS, "StorePlanner._add_store", "1 if group.replicated else self._facts.world_size", "1 << 20", (FAILED_LOADS_TEST,),
    ),
    Mutant(
        "the memory of failed loads has no bound",
        FAILED_LOADS, "FailedLoads.failed", "while len(self._keys) > MOST_KEYS:", "while False:", (FAILED_LOADS_TEST,),
    ),
    Mutant(
        "one rank's store makes keys loadable for all",
        FAILED_LOADS, "FailedLoads.store_copied", "if left > objects:", "if False:", (FAILED_LOADS_TEST,),
    ),
    Mutant(
        "promised tokens whose load failed count as loaded",
        PROMISES, "Promises.failed", "promise.placed:", "False:", (PROMISES_TEST,),
    ),
    Mutant(
        "a promise that vLLM does not use is forgotten",
        PROMISES, "Promises.placed", " - l1, promise.l2 - l2,", " - promise.l1, 0,", (PROMISES_TEST,),
    ),
    Mutant(
        "what a fill read counts as of L1",
        "kvserver/server/lookups.py", "L1Lookups.answer_again", "l2_chunks=l2_chunks", "l2_chunks=0",
        ("unit/server/test_fills.py::test_the_reply_counts_the_chunks_of_each_tier",),
    ),
    Mutant(
        "requests that wait for storage look for replies once and no more",
        LOOKUPS, "Lookups.next_pass", "self._full = self._looked_at_fills = False", "self._full = False", ("adapters/test_fills.py",),
    ),
    Mutant(
        "a late fill is awaited for ever",
        "adapters/common/fills.py", "AwaitedFills.end_late", "if usable and now <= deadline:", "if usable:",
        ("adapters/test_fills.py::test_requests_compute_though_the_daemon_never_answers_their_fills",),
    ),
    Mutant(
        "the daemon's memory of fills, which ends with leases, counts more than what the engine states",
        "kvserver/server/reports.py", "EngineReports.end_request",
        "of_fills if request.l2_tokens is None else request.l2_tokens", "of_fills",
        ("issues/adapters/test_what_a_long_request_loaded_from_l2_counted_as_l1s.py",),
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
        "an engine that cannot prefill after a hit is given one",
        HITS, "Hits.tokens_to_load", "self._facts.whole_prompts_only and", "False and",
        ("adapters/test_whole_prompts.py",),
    ),
    # ---- lookups ------------------------------------------------------------------------------
    Mutant(
        "BAD_KEYS does not renew the session",
        DISPATCHER, "", "    ErrorCode.BAD_KEYS.value,\n", "",
        (f"{NEW_DAEMON}::test_a_daemon_with_chunks_of_another_size_is_served",),
    ),
    Mutant(
        "an unknown instance does not renew the session",
        DISPATCHER, "", "    ErrorCode.UNKNOWN_INSTANCE.value,\n", "",
        (NEW_DAEMON,),
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
    Mutant(
        "chunks keep the size that the last daemon wanted",
        SCHEDULER, "SchedulerHalf._begin_session", "self._chunks.resize(", "print(",
        ("adapters/test_reuse.py::test_a_second_engine_loads_what_the_first_one_stored",),
    ),
    Mutant(
        "a dead daemon's socket is queried",
        LINK, "absence", "not has_listener(endpoint)", "False",
        ("issues/adapters/test_an_engine_waited_for_a_daemon_that_was_dead.py",),
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
        "neighbouring chunks are named by the hashes of their first blocks",
        CHUNKS, "Chunks._keys", "hashes[(chunks.start + 1) * step - 1 :", "hashes[chunks.start * step :",
        ("adapters/test_chunk_contents.py::test_a_chunks_key_is_its_last_blocks_hash",),
    ),
    Mutant(
        "a single chunk is named by the hash of its first block",
        CHUNKS, "Chunks._keys", "hashes[(chunk + 1) * step - 1]", "hashes[chunk * step]",
        ("adapters/test_chunk_contents.py::test_a_chunks_key_is_its_last_blocks_hash",),
    ),
    Mutant(
        "pins of quarantined blocks are reported as owners",
        BLOCKPOOL, "PoolHook._state", "block.ref_cnt % _PIN", "min(block.ref_cnt, 9)",
        ("adapters/test_blockpool.py",),
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
    Mutant(
        "a notice that could not be sent requests no full state",
        NOTICES, "Notices._send", " or number is None", "",
        ("adapters/test_full_states.py",),
    ),
    Mutant(
        "engines whose hashes start elsewhere share",
        VARIANTS, "Variants.epoch", 'parts = [f"chain={self._chain}"]', "parts = ['']",
        ("adapters/test_variants.py::test_a_variant_is_a_short_text_that_distinguishes_chain_weights_and_lora",),
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
        VARIANTS, "Variants.of", "known is not None and known.fingerprint is None", "False", ("adapters/test_variants.py",),
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
        "a whole digest is of samples",
        WEIGHTS, "file_digest", "if whole else", "if False else", ("adapters/test_weights.py",),
    ),
    Mutant(
        "a whole digest that was kept is used when it is damaged",
        WEIGHTS, "_whole_digest", "return _checked(known.read_text())", "return known.read_text()", ("adapters/test_weights.py",),
    ),
    Mutant(
        "a LoRA whose files were replaced is served",
        VARIANTS, "Variants._lora", "if known.stamps == stamps:", "if True:", (UNLISTED,),
    ),
    Mutant(
        "what is computed after a LoRA's files were replaced is stored",
        STORE_PLANS, "StorePlanner.plan", "if not self._variants.is_current(state.request, state.variant):", "if False:", (UNLISTED,),
    ),
    # ---- what must agree ----------------------------------------------------------------------
    Mutant(
        "a field that no class declares does not count",
        CANONICAL, "counted_fields", 'declared | set(getattr(config, "__dict__", ()))', "declared", IDENTITY_TESTS,
    ),
    Mutant(
        "an engine that counts its images shares them",
        IDENTITY, "config_identity", "and not cache.enable_prefix_caching:", "and False:", IDENTITY_TESTS,
    ),
    Mutant(
        "weights at another place without files have the name of none",
        IDENTITY, "weights_of", "        if model_version:\n            return", "        if True:\n            return", IDENTITY_TESTS,
    ),
    Mutant(
        "a length that was fitted to the memory counts",
        IDENTITY, "_max_model_len", "== -1", "== -2", IDENTITY_TESTS,
    ),
    Mutant(
        "only the first bytes of a tensor count",
        WEIGHTS, "_samples", " + (last - begin) * number // (count - 1)", "", ("adapters/test_weights.py",),
    ),
    Mutant(
        "a file that was replaced within its mtime is not read again",
        WEIGHTS, "stamp_of", "stat.st_ctime_ns,", "0,", ("adapters/test_weights.py",),
    ),
    # ---- the connector ------------------------------------------------------------------------
    Mutant(
        "an exception of ours reaches the engine",
        CONNECTOR, "fenced", "return default() if callable(default) else default", "raise",
        ("adapters/test_refusals.py::test_a_fault_once_is_counted_logged_and_survived",),
    ),
    Mutant(
        "loads of a step with a fault are not answered for",
        CONNECTOR, "KVServerConnector.start_load_kv", "worker.answer_for_loads(plan)", "pass",
        ("adapters/test_refusals.py::test_a_fault_before_a_load_begins_fails_that_load_and_no_other",),
    ),
    # ---- whether the cache is on --------------------------------------------------------------
    Mutant(
        "vLLM does not know that hits are of the host's memory",
        CONNECTOR, "KVServerConnector.get_external_cache_hit_sources", "(HOST, l1)", "(None, l1)",
        ("adapters/test_connector_stats.py::test_vllms_prometheus_has_the_sums",),
    ),
    Mutant(
        "planes of one memory are not in the order of their addresses",
        PLANES, "in_slot_order", "(piece.plane.memory, piece.plane.offset)", "piece.plane.memory",
        ("adapters/test_planes.py::test_gathered_through_planes_a_block_is_the_tensors_block",),
    ),
    Mutant(
        "an engine that is never asked anything never states why it has no cache",
        CONNECTOR, "KVServerConnector.has_pending_push_work", "not self._stepped or ", "",
        ("adapters/test_cache_is_on.py::test_an_engine_without_any_request_reports_that_it_has_its_cache",),
    ),
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
    Mutant(
        "a reason that no longer holds stays",
        BOARD, "Board._show", "self._series(index, before[0]).set(0)", "pass",
        ("adapters/test_cache_is_on.py::test_the_daemon_of_an_idle_engine_goes_and_comes_back",),
    ),
    Mutant(
        "sleep takes memory away that is still written",
        CONNECTOR, "KVServerConnector.unregister_kv_caches", "if not self._unregister():",
        "if not self._unregister() and False:",
        ("adapters/test_sleep.py::test_sleep_fails_while_a_hung_daemon_may_write",),
    ),
    Mutant(
        "an engine that computed registers as one that did not",
        CONNECTOR, "KVServerConnector.start_load_kv", "|= not plan.idle", "|= False", (OUT_OF_SYNC,),
    ),
    Mutant(
        "an engine whose first step computes nothing registers as one that has computed",
        CONNECTOR, "KVServerConnector.start_load_kv", "|= not plan.idle", "|= True", (OUT_OF_SYNC,),
    ),
)  # fmt: skip

REMOTE, REMOTE_PARTS = "unit/l2/test_remote.py", ("unit/l2/test_remote_parts.py",)
REMOTE_FAULTS = "unit/l2/test_remote_faults.py"
LANES, GENERATIONS = "kvserver/l2/remote/lanes.py", "kvserver/l2/remote/generations.py"
STORE_WORK, REMOTE_TIER = "kvserver/l2/remote/work.py", "kvserver/l2/remote/tier.py"
EXISTENCE, MOONCAKE = "kvserver/l2/remote/existence.py", "kvserver/l2/remote/mooncake.py"

REMOTE_TIERS = (
    # ---- what a lane may touch ----------------------------------------------------------------
    Mutant(
        "a job that is copying to or from L1 ends before its copy",
        LANES,
        "Lanes._end_outside",
        "if job.phase is JobPhase.INSIDE:",
        "if False:",
        REMOTE_PARTS,
    ),
    Mutant(
        "a job that was ended copies to L1",
        LANES,
        "Lanes._inside",
        "if job.phase is JobPhase.ENDED:",
        "if False:",
        REMOTE_PARTS,
    ),
    Mutant(
        "a tier is closed while L1 is being copied",
        LANES,
        "Lanes.close",
        "self._left.wait_for(lambda: not self._open.jobs)",
        "pass",
        REMOTE_PARTS,
    ),
    Mutant(
        "a get waits for puts",
        LANES,
        "Lanes._next",
        "if all_kinds else",
        "if True else",
        REMOTE_PARTS,
    ),
    Mutant(
        "jobs that waited in the queue open the breaker",
        LANES,
        "Lanes._watch_clock",
        "job.began_ns > 0 or self._all_hang()",
        "True",
        REMOTE_PARTS,
    ),
    Mutant(
        "clients that hang for good never open the breaker",
        LANES,
        "Lanes._watch_clock",
        "job.began_ns > 0 or self._all_hang()",
        "job.began_ns > 0",
        REMOTE_PARTS,
    ),
    Mutant(
        "small jobs of other kinds share a command",
        LANES,
        "_take_bundle",
        "queue[0].bundle != jobs[0].bundle",
        "False",
        REMOTE_PARTS,
    ),
    Mutant(
        "a command takes all that is queued, however large",
        LANES,
        "_take_bundle",
        "while queue and size < BUNDLE_BYTES:",
        "while queue:",
        REMOTE_PARTS,
    ),
    Mutant(
        "each object of a command that failed counts for the breaker",
        REMOTE_TIER,
        "RemoteTier._apply",
        "not 0 < job.command == self._failed_command",
        "True",
        REMOTE_PARTS,
    ),
    # ---- what is served -----------------------------------------------------------------------
    Mutant(
        "a record whose checks failed is a hit",
        STORE_WORK,
        "_read",
        "if match is RecordMatch.CORRUPT:",
        "if False:",
        (f"{REMOTE_FAULTS}::test_wrong_bytes_under_a_right_name_are_found",),
    ),
    Mutant(
        "a record of another coverage or generation is a hit",
        STORE_WORK,
        "_read",
        "if match is RecordMatch.OTHER:",
        "if False:",
        (f"{REMOTE_FAULTS}::test_an_earlier_generations_bytes_under_a_right_name_are_a_miss",),
    ),
    Mutant(
        "an object that another daemon cleared while it was read is a hit",
        STORE_WORK,
        "StoreWork.get",
        "changed = self._generations.of(client, namespace) != generation",
        "changed = False",
        (f"{REMOTE_FAULTS}::test_what_another_daemon_cleared_while_it_was_under_way_counts_no_more",),
    ),
    Mutant(
        "an object that another daemon cleared while it was written is remembered",
        STORE_WORK,
        "StoreWork.put",
        "changed = self._generations.of(client, namespace) != generation",
        "changed = False",
        (f"{REMOTE_FAULTS}::test_what_another_daemon_cleared_while_it_was_under_way_counts_no_more",),
    ),
    Mutant(
        "a lost id of a scope is replaced by one that was used before",
        GENERATIONS,
        "Generations.of",
        "value or client.create_id(name, os.urandom(_ID_BYTES))",
        "value or bytes(16)",
        ("unit/l2/test_valkey.py::test_what_was_cleared_stays_so_when_the_server_loses_the_ids",),
    ),
    Mutant(
        "a clear that failed is forgotten",
        GENERATIONS,
        "Generations.write",
        "client.write_id(self._names.of_id(scope), value)",
        "self._unwritten.pop(scope); client.write_id(self._names.of_id(scope), value)",
        (f"{REMOTE_FAULTS}::test_a_clear_whose_write_fails_keeps_the_scope_closed",),
    ),
    Mutant(
        "what another daemon cleared is still promised",
        REMOTE_TIER,
        "RemoteTier.drain",
        "self._existence.forget_namespaces(namespace)",
        "pass",
        (f"{REMOTE_FAULTS}::test_a_clear_by_one_daemon_is_seen_by_the_other_in_time",),
    ),
    Mutant(
        "what was cleared is still promised",
        REMOTE_TIER,
        "RemoteTier.clear",
        "self._existence.forget_namespaces(scope)",
        "pass",
        (f"{REMOTE}::test_what_was_cleared_is_never_served_again",),
    ),
    Mutant(
        "a get that ended just before a clear is a hit",
        REMOTE_TIER,
        "RemoteTier._apply",
        "if ticket.void:",
        "if False:",
        (f"{REMOTE}::test_a_put_and_a_get_that_have_ended_when_a_clear_begins_count_no_more",),
    ),
    Mutant(
        "objects are promised while the breaker is open",
        REMOTE_TIER,
        "RemoteTier.holds",
        "if self._refusal():",
        "if False:",
        (f"{REMOTE_FAULTS}::test_the_breaker_opens_for_a_store_that_hangs_and_closes_when_it_goes_on",),
    ),
    Mutant(
        "a store of corrupt objects is used for ever",
        REMOTE_TIER,
        "RemoteTier._watch_corruption",
        "self._corrupt_in_a_row == _CORRUPT_TO_CLOSE",
        "False",
        (f"{REMOTE_FAULTS}::test_eight_corrupt_objects_in_a_row_close_the_tier",),
    ),
    Mutant(
        "what a store had once is promised for ever",
        EXISTENCE,
        "Existence.bitmap",
        "> now_ns",
        "> 0",
        REMOTE_PARTS,
    ),
    Mutant(
        "groups of one chunk have one name",
        "kvserver/l2/remote/names.py",
        "Names.of",
        "/{name.group}/",
        "/",
        REMOTE_PARTS,
    ),
    Mutant(
        "a buffer that grew is not the one that Mooncake's client writes to",
        MOONCAKE,
        "_MooncakeClient._ask",
        "self._mapped != self._buffer.growths",
        "not self._mapped",
        ("unit/l2/test_mooncake.py::test_a_buffer_that_grew_is_the_one_that_is_written_to",),
    ),
    Mutant(
        "a process of Mooncake's client that hangs is used on",
        MOONCAKE,
        "_MooncakeClient.close",
        "self._process.kill()",
        "pass",
        ("unit/l2/test_mooncake.py::test_a_process_that_hangs_ends_with_its_request",),
    ),
    Mutant(
        "a clear leaves the id that Mooncake has",
        "kvserver/l2/remote/mooncake_child.py",
        "LibraryStore.write_id",
        "batch_upsert_from",
        "batch_put_from",
        (f"{REMOTE}::test_a_clear_survives_a_restart",),
    ),
    Mutant(
        "two daemons that start together have other ids of one scope",
        "kvserver/l2/remote/valkey.py",
        "_ValkeyClient.create_id",
        "conditional_set=condition, ",
        "",
        (f"{REMOTE_FAULTS}::test_the_first_id_of_a_scope_is_the_one_that_all_use",),
    ),
)

FILE_TIER, FILE_RECORDS = "kvserver/l2/files/tier.py", "kvserver/l2/files/records.py"
FILE_PUTS, FILE_GETS = "kvserver/l2/files/puts.py", "kvserver/l2/files/gets.py"
FILE_LOG = "kvserver/l2/files/log_writer.py"
FILE_OPENING, FILE_JOURNAL = "kvserver/l2/files/opening.py", "kvserver/l2/files/journal.py"
FILES, FILE_FAULTS = "unit/l2/test_files.py", "unit/l2/test_files_faults.py"

FILE_TIERS = (
    Mutant(
        "a get that began before a clear is a hit",
        FILE_GETS, "FileGets.ended", "if get.void or get.generation != self._records.generation_of(get.name) or closed:",
        "if False:",
        (f"{FILES}::TestClear",),
    ),
    Mutant(
        "a put that began before a clear is found after it",
        FILE_PUTS, "FilePuts._is_current", "put.generation == self._records.generation_of(put.name)", "True",
        (f"{FILES}::TestClear",),
    ),
    Mutant(
        "a put that was dropped meanwhile is found",
        FILE_PUTS, "FilePuts.ended", "not put.void", "True", (f"{FILES}::TestObjects",),
    ),
    Mutant(
        "the journal's records of before a clear are found after a restart",
        FILE_OPENING, "open_tier", "    _drop_other_generations(table, known)\n", "", (f"{FILES}::TestClear",),
    ),
    Mutant(
        "a clear's generation returns",
        "kvserver/l2/files/generations.py", "_new_generation", "secrets.randbits(63) + 1", "5", (f"{FILES}::TestClear",),
    ),
    Mutant(
        "pages of a clear that is not durable are used again",
        FILE_TIER, "FileTier.drain", "parts.clears.durable and ", "",
        (f"{FILE_FAULTS}::TestJournal",),
    ),
    Mutant(
        "pages are used again before their drop is in the journal",
        FILE_RECORDS, "FileRecords._release", "self._writer.free_later(extents, _pages_of(extents))",
        "self.pool.free_pages(extents)", (f"{FILE_FAULTS}::TestJournal",),
    ),
    Mutant(
        "pages whose drop could not be written are used again",
        FILE_LOG, "LogWriter._write", "return\n            self._pool", "pass\n            self._pool",
        (f"{FILE_FAULTS}::TestJournal",),
    ),
    Mutant(
        "pages are used again while a get reads them",
        FILE_RECORDS, "FileRecords._release", "if extents in self._reads:", "if False:", (f"{FILES}::TestEviction",),
    ),
    Mutant(
        "entries are appended behind a bad one",
        FILE_JOURNAL, "replay", "if writable and os.fstat(fd).st_size != end:", "if False:", (f"{FILE_FAULTS}::TestFiles",),
    ),
    Mutant(
        "a journal of another data file counts",
        FILE_JOURNAL, "_read_head", "intact and of_data == data_id", "intact", (f"{FILE_FAULTS}::TestFiles",),
    ),
    Mutant(
        "records dropped while opening return",
        FILE_OPENING, "open_tier", "written.append(table.drain_log())", "table.drain_log()", (f"{FILES}::TestReopening",),
    ),
    Mutant(
        "each put waits for a journal's write of its own",
        FILE_PUTS, "FilePuts.start", "sum(each.pages for each in self._waiting)", "put.pages", (f"{FILES}::TestEviction",),
    ),
    Mutant(
        "a get with another coverage reads the object",
        FILE_GETS, "FileGets.begin", " or found.meaning != meaning_of(memory)", "", (f"{FILES}::TestObjects",),
    ),
    Mutant(
        "a corrupt object is promised again",
        FILE_GETS, "FileGets._found_corrupt", "self._records.remove(get.name)", "pass", (f"{FILE_FAULTS}::TestRecords",),
    ),
    Mutant(
        "a disk of corrupt objects is used for ever",
        FILE_GETS, "FileGets._found_corrupt", "self._corrupt_in_a_row >= MOST_CORRUPT", "False",
        (f"{FILE_FAULTS}::TestRecords",),
    ),
    Mutant(
        "a loss of power closes the tier",
        FILE_GETS, "FileGets._found_corrupt", "if get.recovered:", "if False:", (f"{FILE_FAULTS}::TestFiles",),
    ),
)  # fmt: skip

FILLS, SPILL = "kvserver/server/fills.py", "kvserver/server/spill.py"
PRESENCE, READ_RATES = "kvserver/server/presence.py", "kvserver/server/read_rates.py"
FILL_TESTS, SPILL_TESTS = ("unit/server/test_fills.py",), ("unit/server/test_spill.py",)
RATE_TESTS = ("unit/server/test_read_rates.py",)

L2_AND_L1 = (
    Mutant(
        "an object whose read failed becomes READY",
        FILLS,
        "Fills._batch_ended",
        "failed=batch.failed",
        "failed=()",
        FILL_TESTS,
    ),
    Mutant(
        "a failed copy of a whole fill is published",
        CACHE_STORES,
        "StorePlans.finish_store",
        "and place not in failed",
        "",
        FILL_TESTS,
    ),
    Mutant(
        "a fill that waits for room holds up those that have begun",
        FILLS,
        "Fills.step",
        "                    continue\n                fill.began = True",
        "                    return False\n                fill.began = True",
        ("issues/test_a_fill_that_waits_for_room_held_up_others.py",),
    ),
    Mutant(
        "a fill's evictions cost nothing of its turn",
        FILLS,
        "Fills._reserve_batch",
        "4 * (len(plan.evicted) + len(plan.evicted_tails))",
        "0",
        ("issues/test_a_fill_evicted_more_in_a_turn_than_its_share.py",),
    ),
    Mutant(
        "what L2 stored is published after evictions from L1",
        "kvserver/server/upkeep.py",
        "Upkeep.complete_tickets",
        "self.l2_events.publish()",
        "pass",
        ("unit/server/test_l2_events.py",),
    ),
    Mutant(
        "fills use more of L1 than their bound",
        FILLS,
        "Fills._fits_beside_others",
        "return not used or used + fill.bytes <= self._bound",
        "return True",
        FILL_TESTS,
    ),
    Mutant(
        "a fill is answered only when its reads have ended",
        FILLS,
        "Fills.step",
        "if fill.due_ns <= now_ns:",
        "if False:",
        FILL_TESTS,
    ),
    Mutant(
        "the end of its request lets a fill go on",
        FILLS,
        "Fills.end",
        "self._finish(fill)",
        "pass",
        FILL_TESTS,
    ),
    Mutant(
        "what only one start of an engine can use is written",
        INSTANCES,
        "Instance.durability",
        " or self.private",
        "",
        SPILL_TESTS,
    ),
    Mutant(
        "what must stay on its machine is in tiers that machines share",
        INSTANCES,
        "Instance.durability",
        "if self.machine_only else of_variant",
        "if False else of_variant",
        SPILL_TESTS,
    ),
    Mutant(
        "an object is in a tier that outlives those who can find it",
        "kvserver/server/tiers.py",
        "ConfiguredTier.admits",
        "Durability.ANYWHERE if self.tier.shared else Durability.MACHINE",
        "Durability.MACHINE",
        SPILL_TESTS,
    ),
    Mutant(
        "the durability of a variant is ignored",
        SERVER_COPIES,
        "Copies.coverage_in_l2",
        "instance.durability(ticket.request.durability)",
        "instance.durability(Durability.ANYWHERE)",
        SPILL_TESTS,
    ),
    Mutant(
        "a tier is searched for what it may not have",
        "kvserver/server/tiers.py",
        "Tiers.present",
        " if each.admits(durability) else 0",
        "",
        FILL_TESTS,
    ),
    Mutant(
        "a shared tier is probed for what it may not have",
        "kvserver/server/tiers.py",
        "Tiers.unknown_to",
        " and each.admits(durability)",
        "",
        FILL_TESTS,
    ),
    Mutant(
        "tiers are searched for what ends with its process",
        PRESENCE,
        "Presence.attainable",
        " or durability is Durability.PROCESS",
        "",
        FILL_TESTS,
        equivalent="no tier admits objects of that durability: it only saves the search",
    ),
    Mutant(
        "what is computed sooner is read",
        PRESENCE,
        "Presence.with_l2",
        "if most > hit_chunks and self.is_slow(",
        "if False and self.is_slow(",
        FILL_TESTS,
    ),
    Mutant(
        "an engine that waits for a slow tier all the same reads from it",
        FILLS,
        "Fills._plan",
        "if self._presence.is_slow(",
        "if False and self._presence.is_slow(",
        FILL_TESTS,
    ),
    Mutant(
        "an engine of unknown speed never reads",
        PRESENCE,
        "Presence.is_slow",
        "bool(speed) and ",
        "",
        FILL_TESTS,
        equivalent="at a speed of 0 nothing is computed sooner",
    ),
    Mutant(
        "a new engine does not know how fast the last one was",
        INSTANCES,
        "Instance.expected_speed",
        "self.speeds.of(self.namespace)",
        "0.0",
        FILL_TESTS,
    ),
    Mutant(
        "reads that other fills wait for are not counted",
        READ_RATES,
        "_Tier.expected_seconds",
        " + self.queued_bytes",
        "",
        RATE_TESTS,
    ),
    Mutant(
        "a slow tier is never tried again",
        READ_RATES,
        "_Tier.rate",
        " or now - self.last_end > _FORGOTTEN_SECONDS",
        "",
        RATE_TESTS,
    ),
    Mutant(
        "idle time counts as time of reading",
        READ_RATES,
        "_Tier.change",
        "        if self.open:\n",
        "        if self.changed:\n",
        RATE_TESTS,
    ),
    Mutant(
        "a failed read counts as bytes",
        FILLS,
        "Fills._read",
        "batch.coverage.bytes if done else 0",
        "batch.coverage.bytes",
        FILL_TESTS,
    ),
    Mutant(
        "what a fill has read still counts as queued",
        FILLS,
        "Fills._read",
        "self._rates.queue(tier, -less)",
        "pass",
        FILL_TESTS,
    ),
    Mutant(
        "what an ended fill had queued counts on",
        FILLS,
        "Fills._finish",
        "self._unqueue(fill)",
        "pass",
        FILL_TESTS,
    ),
    Mutant(
        "slow fills are not counted",
        FILLS,
        "Fills._finish",
        "fill.instance.counts.fills_slower += 1",
        "pass",
        FILL_TESTS,
    ),
    Mutant(
        "a fill reads before it has slots for all",
        FILLS,
        "Fills.step",
        "            if fill.todo:\n                return True\n",
        "",
        FILL_TESTS,
    ),
    Mutant(
        "a model with windows reads what finds no space for its chunks",
        FILLS,
        "Fills._cut",
        "        self._release(fill)\n",
        "",
        FILL_TESTS,
    ),
    Mutant(
        "the slots of an ended fill stay reserved",
        FILLS,
        "Fills._finish",
        "self._release(fill)",
        "pass",
        FILL_TESTS,
    ),
    Mutant(
        "a fill that finds a tier busy gives up",
        FILLS,
        "Fills._has_room",
        "return known == free",
        "return True",
        FILL_TESTS,
    ),
    Mutant(
        "the second fill of a prompt reads it again",
        FILLS,
        "Fills._reserve_batch",
        "if id(chunk) not in own",
        "if False",
        FILL_TESTS,
    ),
    Mutant(
        "chunks are read before windows and states",
        PRESENCE,
        "hit_with",
        'specs[group].kind == "full"',
        'specs[group].kind != "full"',
        FILL_TESTS,
    ),
    Mutant(
        "what is behind a hole in L2 counts as attainable",
        PRESENCE,
        "hit_with",
        "if ready & layout.full != layout.full:",
        "if False:",
        FILL_TESTS,
    ),
    Mutant(
        "a prompt that is only looked up grows old in its tiers",
        L1_LOOKUPS,
        "L1Lookups.answer",
        "self.ages.found(",
        "False and self.ages.found(",
        SPILL_TESTS,
    ),
    Mutant(
        "the beginning of a long prompt is older than its end",
        "kvserver/server/ages.py",
        "Ages.step",
        "first = max(0, prompt.chunks - left)",
        "first = 0",
        SPILL_TESTS,
    ),
    Mutant(
        "the queue of a tier has no bound",
        SPILL,
        "Spill._offer",
        "if len(queue.names) >= MOST_QUEUED:",
        "if False:",
        SPILL_TESTS,
    ),
    Mutant(
        "an object that waits is queued once more",
        SPILL,
        "Spill._offer",
        "if name not in queue.names:",
        "if True:",
        SPILL_TESTS,
    ),
    Mutant(
        "puts have no bound",
        SPILL,
        "Spill._may_put",
        "queue.puts >= _MOST_PUTS or",
        "False or",
        SPILL_TESTS,
    ),
    Mutant(
        "an object that left L1 while it waited is written from other pages",
        SPILL,
        "Spill._put_next",
        "or not chunk.ready >> item.coverage.group & 1",
        "",
        SPILL_TESTS,
    ),
    Mutant(
        "a written object stays pinned",
        SPILL,
        "Spill._put_next",
        "self._cache.unpin_chunks([chunk])",
        "pass",
        SPILL_TESTS,
    ),
    Mutant(
        "a tier that may only be read is written to",
        SPILL,
        "Spill._offer",
        "if not queue.configured.writable:",
        "if False:",
        SPILL_TESTS,
        equivalent="_put_next() drops it for the same reason: it only saves the queue",
    ),
    Mutant(
        "single uses are written with admit=reused",
        SPILL,
        "Spill.stored",
        'queue.configured.url.admit == "all"',
        "True",
        SPILL_TESTS,
    ),
    Mutant(
        "a clear lets fills go on",
        FILLS,
        "Fills.clear",
        "self._finish(fill)",
        "pass",
        FILL_TESTS,
        equivalent="tiers cancel what is under way, and cleared chunks are not read: the fill only ends later",
    ),
    Mutant(
        "a load does not end what its fill occupies",
        FILLS,
        "Fills.loaded",
        "filled.bytes = 0",
        "pass",
        FILL_TESTS,
    ),
    Mutant(
        "the death of an engine leaves its fills",
        FILLS,
        "Fills.end_of_instance",
        "self.end(owner)",
        "pass",
        FILL_TESTS,
    ),
    Mutant(
        "a read that failed is not tried in the next tier",
        FILLS,
        "Fills._read",
        "self._read(fill, batch, place, tier)",
        "batch.failed.add(place)",
        FILL_TESTS,
    ),
    Mutant(
        "what was read for a request may be evicted before its answer",
        FILLS,
        "Fills._batch_ended",
        "self._pin(fill, ready)",
        "pass",
        FILL_TESTS,
    ),
    Mutant(
        "an object that is being written may be evicted",
        SPILL,
        "Spill._put_next",
        "self._cache.pin_chunks([chunk])",
        "self._cache.pins += 1; chunk.pins += 0",
        SPILL_TESTS,
    ),
    Mutant(
        "what was cleared while it waited is written",
        SPILL,
        "Spill._put_next",
        "chunk.detached or ",
        "",
        SPILL_TESTS,
    ),
    Mutant(
        "a child is written although its parent was not",
        SPILL,
        "Spill._put_next",
        "name._replace(key=item.parent) in queue.lost",
        "False",
        SPILL_TESTS,
    ),
    Mutant(
        "a write limit is ignored",
        SPILL,
        "Spill._may_put",
        "queue.credit > 0",
        "True",
        SPILL_TESTS,
    ),
)

MUTANTS = (
    REPLAY
    + WHAT_IF_CURVE
    + PAGE_AND_HISTORY
    + COMMANDS
    + L2_AND_L1
    + FILE_TIERS
    + REMOTE_TIERS
    + STORES_AND_LOADS
    + SERVER
    + WORKER_HALF
    + SCHEDULER_HALF
)


def problems() -> list[str]:
    """What in the table no longer fits the code."""
    found = [problem for mutant in MUTANTS if (problem := mutant.problem()) is not None]
    return found + [f"{name}: named twice" for name, count in Counter(m.name for m in MUTANTS).items() if count > 1]


def run(mutants: list[Mutant], venv: str, trust: bool) -> list[tuple[Mutant, Result]]:
    """Prints a line for each. SystemExit if their tests fail without any mutation, unless we `trust` that they pass."""
    results: list[tuple[Mutant, Result]] = []
    with tempfile.TemporaryDirectory(prefix="kvs-unmutated-") as base, mutated_package(None) as unmutated:
        copy_package(Path(base))
        tests = Tests(venv, Path(base))
        try:
            every = sorted({test for mutant in mutants for test in mutant.tests})
            if not trust:
                sound = tests.run(unmutated, every, seconds=3600)
                if sound.outcome != Outcome.SURVIVED:
                    raise SystemExit(f"without any mutation: {sound.output}")
                print(f"{venv}: all these tests pass without any mutation, in {sound.seconds:.0f} s", flush=True)
            for mutant in mutants:
                with mutated_package(mutant) as folder:
                    results.append((mutant, tests.run(folder, mutant.tests)))
                result = results[-1][1]
                print(
                    f"{result.outcome.value:10} {result.seconds:5.1f} s  {mutant.file} {mutant.symbol}: {mutant.name}"
                    f"{'  <- ' + result.by if result.by else ''}",
                    flush=True,
                )
                if result.outcome in (Outcome.BROKEN, Outcome.TIMEOUT):
                    print(result.output)
        finally:
            tests.close()
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the table and run nothing")
    parser.add_argument("--check", action="store_true", help="look only whether every anchor fits the code")
    parser.add_argument("--core", action="store_true", help="only those whose tests run in .venv")
    parser.add_argument("--adapters", action="store_true", help="only those whose tests run in .venv-vllm")
    parser.add_argument("--trust", action="store_true", help="the tests pass without any mutation: do not look again")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="only those with this in name or file")
    options = parser.parse_args()
    if found := problems():
        print("\n".join(found))
        return 1
    chosen = [m for m in MUTANTS if any(word in f"{m.file} {m.symbol} {m.name}" for word in options.only)]
    if options.check or options.list:
        for mutant in chosen if options.list else ():
            print(f"{mutant.venv:8}  {mutant.file} {mutant.symbol}: {mutant.name}")
        print(f"{len(chosen)} mutants, every anchor fits")
        return 0
    counts: Counter[str] = Counter()
    survivors: list[str] = []
    for mutant in chosen:
        if mutant.equivalent:
            counts[Outcome.EQUIVALENT.value] += 1
            print(f"equivalent          {mutant.file} {mutant.symbol}: {mutant.name}: {mutant.equivalent}")
    for venv in ("core", "adapters"):
        mine = [mutant for mutant in chosen if mutant.venv == venv and not mutant.equivalent]
        if not mine or (options.adapters if venv == "core" else options.core):
            continue
        for mutant, result in run(mine, venv, options.trust):
            counts[result.outcome.value] += 1
            if result.outcome in (Outcome.SURVIVED, Outcome.BROKEN):
                survivors.append(f"{result.outcome.value}: {mutant.file} {mutant.symbol}: {mutant.name}")
    print(f"{sum(counts.values())} mutants: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    print("\n".join(survivors), end="\n" if survivors else "")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
